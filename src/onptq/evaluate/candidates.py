"""Candidates: checkpoint folders by any tool, methods whose theta is made here, and finished runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onptq.checkpoint.catalogs import is_cataloged
from onptq.errors import OnPTQError, did_you_mean
from onptq.overrides import parse_override
from onptq.recipe import CYCLES, PRESETS, Recipe, method_names
from onptq.run import final_theta
from onptq.schemes import Scheme

DENSE = "dense"


@dataclass(frozen=True)
class MethodCandidate:
    """`method:scheme`, with `@preset` or `#seed` where another than the comparison's is wanted."""

    name: str
    recipe: Recipe
    init_run: Path | None = None  # the files of a run whose theta^(0) and first rollouts this one starts from

    @property
    def scheme(self) -> Scheme:
        return Scheme.parse(self.recipe.scheme)


@dataclass(frozen=True)
class CheckpointCandidate:
    """A checkpoint folder, by any tool."""

    name: str
    folder: str  # as it was given: a folder, or a name of the catalog


@dataclass(frozen=True)
class RunCandidate:
    """The theta of a finished run of `onptq quantize`."""

    name: str
    theta: Path
    scheme: Scheme

    @classmethod
    def of(cls, name: str, out: Path, recipe: Recipe) -> RunCandidate:
        """The run whose checkpoint is in `out`."""
        return cls(name, final_theta(out, recipe.rounds), Scheme.parse(recipe.scheme))


Candidate = MethodCandidate | CheckpointCandidate | RunCandidate


def parse_candidates(texts: Sequence[str], recipe: Recipe, overrides: Iterable[str] = ()) -> list[Candidate]:
    """Candidates from folders and `method:scheme[@preset][#seed]`, each with `name=` before it where it wants one.

    Methods follow `recipe` where they say nothing else; `overrides` (FIELD=VALUE) hold for those that name a preset too.
    """
    changes = list(overrides)
    candidates = [_parse(text, recipe, changes) for text in texts]
    names = [one.name for one in candidates]
    for name in names:
        if names.count(name) > 1 or name == DENSE:
            raise OnPTQError(f"{name!r} is the name of more than one model here; give one of them another: NAME={name}")
    if not candidates:
        raise OnPTQError("there is nothing to compare; expected at least one candidate")
    return candidates


def folder_name(name: str) -> str:
    """The folder of a candidate: its name where that is a plain file name, else the name made plain and a hash of it."""
    plain = re.sub(r"[^\w.+@-]+", "-", name)
    if plain == name and not name.startswith("."):
        return name
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _parse(text: str, recipe: Recipe, changes: Sequence[str]) -> Candidate:
    name, equals, rest = text.partition("=")
    own_name, body = (name, rest) if equals and name and rest else ("", text)
    if _is_checkpoint(text):  # a folder may have = in its name
        own_name, body = "", text
    if _is_checkpoint(body):
        return CheckpointCandidate(own_name or (body if is_cataloged(body) else Path(body).resolve().name), body)
    method, colon, settings = body.partition(":")
    if not colon:
        raise OnPTQError(
            f"candidate {text!r} is no folder here; expected a checkpoint folder, NAME=FOLDER, or METHOD:SCHEME such as "
            f"rtn:W4A8, with one of the methods {', '.join(method_names())}"
        )
    if method not in method_names():
        hint = did_you_mean(method, method_names())
        raise OnPTQError(f"candidate {text!r}: unknown method{hint}; expected one of {', '.join(method_names())}")
    settings, number, seed = settings.partition("#")
    scheme, at, preset = settings.partition("@")
    own: dict[str, Any] = {"scheme": scheme, "method": method}
    if number:
        own["seed"] = _seed(text, method, seed)
    try:
        resolved = (_preset(preset, recipe, changes) if at else recipe).with_overrides(own)
    except OnPTQError as error:
        raise OnPTQError(f"candidate {text!r}: {error}") from error
    if not Scheme.parse(resolved.scheme).quantizes_weights:
        raise OnPTQError(f"candidate {text!r} leaves the weights in 16 bits; expected W2 to W8")
    return MethodCandidate(own_name or f"{method}:{resolved.scheme}{at}{preset}{number}{seed}", resolved)


def _preset(preset: str, recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """A preset or a recipe file with the comparison's seed and compute settings."""
    shared = {"seed": recipe.seed} | {f"compute.{name}": value for name, value in recipe.compute.model_dump().items()}
    overrides = dict(map(parse_override, changes)) | shared
    if preset not in PRESETS and Path(preset).suffix in (".yaml", ".yml"):
        return Recipe.from_yaml(preset, overrides)
    return Recipe.preset(preset, overrides)


def _seed(text: str, method: str, seed: str) -> int:
    if method not in CYCLES:
        raise OnPTQError(f"candidate {text!r}: nothing in {method} is random; only {', '.join(CYCLES)} take a seed")
    if not (seed.isascii() and seed.isdigit()):
        raise OnPTQError(f"candidate {text!r}: {seed!r} is no seed; expected a whole number, e.g. {method}:W4A8#1")
    return int(seed)


def _is_checkpoint(text: str) -> bool:
    return is_cataloged(text) or Path(text).is_dir()
