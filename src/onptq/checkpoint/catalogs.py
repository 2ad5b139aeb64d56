"""Models that go by a name: `zoo:qwen2.5-vl` is looked up in the catalog whose prefix is `zoo`.

A package adds a catalog with an entry point of the group `onptq.sources`: the prefix, and an object with `locate` and `names`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol, cast

from onptq import errors

GROUP = "onptq.sources"
EMBEDDED = tuple(EntryPoint(prefix, "onptq.zoo.catalog", GROUP) for prefix in ("zoo", "real"))


class Catalog(Protocol):
    def locate(self, name: str) -> Path:
        """The checkpoint folder of `name`, which begins with the catalog's prefix and a colon."""

    def names(self) -> Iterable[str]:
        """Every name that `locate` resolves."""


def is_cataloged(model: str) -> bool:
    prefix, colon, _ = model.partition(":")
    return bool(colon) and prefix in _entries()


def locate(model: str) -> Path:
    """The checkpoint folder of a model that `is_cataloged`."""
    return _load(model.partition(":")[0]).locate(model)


def did_you_mean(model: str) -> str:
    """A hint at the cataloged name most like `model`; empty where none is close."""
    return errors.did_you_mean(model, (name for prefix in _entries() for name in _load(prefix).names()))


@cache
def _entries() -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in (*entry_points(group=GROUP), *EMBEDDED)}


def _load(prefix: str) -> Catalog:
    return cast(Catalog, _entries()[prefix].load())
