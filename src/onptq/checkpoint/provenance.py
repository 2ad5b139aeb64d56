"""The facts that a model card states: what a checkpoint was made from, what made its weights, what was measured of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onptq.checkpoint.source import is_hub_id
from onptq.data.calibration import Prompts
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.files import cached_hub_id, lies_inside
from onptq.plain_yaml import YAML_LIMIT, parse_yaml

CARD = "README.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class BaseModel:
    """The model that was quantized."""

    name: str  # a hub id, a catalog name or a folder's name; never a path
    hub_id: str | None = None  # of the model itself
    stated: str | None = None  # the hub id that the model's own card gives as its base model


@dataclass(frozen=True)
class Calibration:
    """The calibration set in a few numbers."""

    prompts: int
    holdout: int
    mix: Mapping[str, int]  # calibration prompts by their contents, e.g. "image and text": 100
    sha256: str  # of calibration and held-out prompts with their media, as in the run's recipe.yaml

    @classmethod
    def of(cls, prompts: Prompts) -> Calibration | None:
        """The numbers of `prompts`; None without any."""
        if not prompts.calibration:
            return None
        mix = Counter(map(_contents, prompts.calibration))
        digest = manifest_digest(prompts.every)
        return cls(len(prompts.calibration), len(prompts.holdout), dict(mix.most_common()), digest)


@dataclass(frozen=True)
class Update:
    """One round's update: the steps it took, and the iterate it ended with."""

    steps: int
    best_step: int  # 0 is the theta that the update began with


@dataclass(frozen=True)
class Provenance:
    """What made the weights of a checkpoint."""

    method: str
    init: str  # the base method that gave theta^(0)
    updates: tuple[Update, ...] = ()  # one per round; none where theta^(0) was exported
    rule: str | None = "risk"  # by which states of the model's own answers are selected; None: none are
    learns_codes: bool = False
    calibration: Calibration | None = None
    off_policy: bool = False  # the answers were the dense model's
    init_kept: bool = False  # held-out prompts did not speak for the calibrated theta
    why_init: str = ""  # why not; runs of earlier versions do not say

    @property
    def init_exported(self) -> bool:
        """Whether the weights are those of theta^(0)."""
        return self.init_kept or all(update.best_step == 0 for update in self.updates)


@dataclass(frozen=True)
class Estimate:
    """A figure and its confidence interval; None where there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Results:
    """Figures on held-out prompts by model and column; the baselines first, the checkpoint itself last."""

    rows: Mapping[str, Mapping[str, Estimate]]
    confidence: float
    states: int
    held_out: str  # the held-out prompts in words


def find_base(folder: Path, name: str | None = None) -> BaseModel:
    """The base model in `folder`, which its user calls `name`."""
    hub_id = name if name is not None and is_hub_id(name) and _HUB_ID.fullmatch(name) else cached_hub_id(folder)
    if hub_id is not None:
        return BaseModel(hub_id, hub_id)
    is_path = name is None or "/" in name or Path(name).exists()
    title = folder.absolute().name if is_path or name is None else name
    stated = read_front_matter(folder).get("base_model")
    first = stated[0] if isinstance(stated, list) and stated else stated
    return BaseModel(title, None, first if isinstance(first, str) and _HUB_ID.fullmatch(first) else None)


def read_front_matter(folder: Path) -> dict[str, Any]:
    """The metadata at the head of a folder's card; empty where there is none."""
    text = _read(folder, CARD)
    return parse_mapping(text[4:].partition("\n---")[0]) if text.startswith("---\n") else {}


def read_mapping(folder: Path, name: str) -> dict[str, Any]:
    """The YAML mapping in a file of a checkpoint; empty where there is none."""
    return parse_mapping(_read(folder, name))


def parse_mapping(text: str) -> dict[str, Any]:
    """The YAML mapping in a text; empty where it is none that can be read."""
    try:
        content = parse_yaml(text)
    except OnPTQError:
        return {}
    return content if isinstance(content, dict) else {}


def _read(folder: Path, name: str) -> str:
    path = folder / name
    if not path.is_file() or not lies_inside(folder, path):
        return ""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(YAML_LIMIT)
    except (OSError, ValueError):
        return ""


def _contents(prompt: Prompt) -> str:
    kinds = [name for name, media in (("image", prompt.images), ("audio", prompt.audios)) if media]
    return " and ".join([", ".join(kinds), "text"]) if kinds else "text only"
