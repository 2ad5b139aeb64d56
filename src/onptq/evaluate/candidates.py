"""Who is compared: a checkpoint folder made by anybody, or a method and a scheme to be built on the spot."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onptq.checkpoint.catalogs import is_cataloged
from onptq.errors import OnPTQError, did_you_mean
from onptq.overrides import parse_override
from onptq.recipe import Recipe
from onptq.schemes import Scheme

DENSE = "dense"
# Built by the whole job, by the recipe with these changes; every other method gives its theta at once.
CYCLE: Mapping[str, Mapping[str, Any]] = {
    "static": {"method": "static"},
    "uniform": {"method": "onptq", "select.rule": "all"},  # every on-policy state, all with the same weight
    "onptq": {"method": "onptq"},
}


@dataclass(frozen=True)
class Built:
    """`method:scheme`, with `@preset` or `#seed` where another than the comparison's is wanted."""

    name: str
    method: str
    recipe: Recipe

    @property
    def scheme(self) -> Scheme:
        return Scheme.parse(self.recipe.scheme)

    @property
    def by_the_cycle(self) -> bool:
        return self.method in CYCLE


@dataclass(frozen=True)
class Made:
    """A checkpoint as somebody left it."""

    name: str
    folder: str  # as it was given: a folder, or a name of the catalog


Candidate = Built | Made


def parse_candidates(texts: Sequence[str], recipe: Recipe, overrides: Iterable[str] = ()) -> list[Candidate]:
    """Folders, `name=folder`, and `method:scheme[@preset][#seed]`. `recipe` is what built ones follow where they say nothing
    else, `overrides` (FIELD=VALUE) holds for those that name a preset too."""
    changes = list(overrides)
    found = [_parse(text, recipe, changes) for text in texts]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1 or name == DENSE:
            raise OnPTQError(
                f"{name!r} is the name of more than one model here; give folders names of their own: NAME=FOLDER"
            )
    if not found:
        raise OnPTQError("there is nothing to compare; expected at least one candidate")
    return found


def folder_name(name: str) -> str:
    """The folder of a candidate: its name where that is a plain file name, else the name made plain and a hash of it."""
    plain = re.sub(r"[^\w.+@-]+", "-", name)
    if plain == name and not name.startswith("."):
        return name
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def method_names() -> list[str]:
    from onptq.methods import METHODS

    return [*METHODS, *CYCLE]


def _parse(text: str, recipe: Recipe, changes: Sequence[str]) -> Candidate:
    name, equals, folder = text.partition("=")
    if equals and name and _is_checkpoint(folder):
        return Made(name, folder)
    if _is_checkpoint(text):
        return Made(text if is_cataloged(text) else Path(text).resolve().name, text)
    method, colon, rest = text.partition(":")
    if not colon:
        raise OnPTQError(
            f"candidate {text!r} is no folder here; expected a checkpoint folder, NAME=FOLDER, or METHOD:SCHEME such as "
            f"rtn:W4A8, with one of the methods {', '.join(method_names())}"
        )
    if method not in method_names():
        hint = did_you_mean(method, method_names())
        raise OnPTQError(f"candidate {text!r}: unknown method{hint}; expected one of {', '.join(method_names())}")
    rest, number, seed = rest.partition("#")
    scheme, at, preset = rest.partition("@")
    base = recipe
    if at:
        shared = {"seed": recipe.seed} | {
            f"compute.{name}": value for name, value in recipe.compute.model_dump().items()
        }
        base = Recipe.preset(preset, dict(map(parse_override, changes)) | shared)
    own: dict[str, Any] = {"scheme": scheme} | dict(CYCLE.get(method, {}))
    if number:
        own["seed"] = _seed(text, method, seed)
    try:
        resolved = base.with_overrides(own)
    except OnPTQError as error:
        raise OnPTQError(f"candidate {text!r}: {error}") from error
    if not Scheme.parse(resolved.scheme).quantizes_weights:
        raise OnPTQError(f"candidate {text!r} leaves the weights in 16 bits; expected W2 to W8")
    return Built(f"{method}:{resolved.scheme}{at}{preset}{number}{seed}", method, resolved)


def _seed(text: str, method: str, seed: str) -> int:
    if method not in CYCLE:
        raise OnPTQError(f"candidate {text!r}: nothing in {method} is random; only {', '.join(CYCLE)} take a seed")
    if not (seed.isascii() and seed.isdigit()):
        raise OnPTQError(f"candidate {text!r}: {seed!r} is no seed; expected a whole number, e.g. {method}:W4A8#1")
    return int(seed)


def _is_checkpoint(text: str) -> bool:
    return is_cataloged(text) or Path(text).is_dir()
