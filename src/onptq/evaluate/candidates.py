"""Candidates: checkpoint folders by any tool, methods whose theta is made here, and finished runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onptq.checkpoint.catalogs import is_cataloged
from onptq.errors import OnPTQError, did_you_mean
from onptq.overrides import parse_override
from onptq.recipe import CYCLES, PRESETS, Recipe, method_names
from onptq.registry import METHODS
from onptq.run import final_theta
from onptq.schemes import Scheme

DENSE = "dense"
ELSEWHERE = {  # fields that a candidate's list of settings does not take, and where they are given
    "method": "it is the METHOD of METHOD:SCHEME",
    "scheme": "it is the SCHEME of METHOD:SCHEME",
    "seed": "write METHOD:SCHEME#SEED",
    "compute": "all candidates share it: --set changes it",
}


@dataclass(frozen=True)
class MethodCandidate:
    """`method:scheme`, with `@settings` or `#seed` where others than the comparison's are wanted."""

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
    """Candidates from folders and `method:scheme[@settings][#seed]`, each with `name=` before it where it wants one.

    Settings are a preset, a recipe file or FIELD=VALUE, with commas between them; `method@settings:scheme` is the same. Methods
    follow `recipe` where they say nothing else; `overrides` (FIELD=VALUE) hold for those that name a preset too.
    """
    changes = list(overrides)
    candidates = [_parse(text, recipe, changes) for text in texts]
    check_names(candidates)
    if not candidates:
        raise OnPTQError("there is nothing to compare; expected at least one candidate")
    return candidates


def check_names(candidates: Sequence[Candidate]) -> None:
    """Refuse two candidates of one name."""
    names = [one.name for one in candidates]
    for name in names:
        if names.count(name) > 1 or name == DENSE:
            raise OnPTQError(f"{name!r} is the name of more than one model here; give one of them another: NAME={name}")


def with_seeds(one: Candidate, count: int) -> list[Candidate]:
    """The candidate with its own seed and those that follow, `count` in all; alone where no seed changes it."""
    if not isinstance(one, MethodCandidate) or not one.recipe.rounds:
        return [one]
    first = one.recipe.seed
    plain = one.name.removesuffix(f"#{first}")
    further = range(first + 1, first + count)
    return [
        one,
        *(replace(one, name=f"{plain}#{seed}", recipe=one.recipe.with_overrides({"seed": seed})) for seed in further),
    ]


def shown(name: str) -> str:
    """The name as tables have it, with the labels of methods."""
    return re.sub(r"(?:^|(?<=init=))[\w+.-]+(?=[:@,# ]|$)", lambda method: METHODS.label(method[0]), name)


def folder_name(name: str) -> str:
    """The folder of a candidate: its name where that is a plain file name, else the name made plain and a hash of it."""
    plain = re.sub(r"[^\w.+@-]+", "-", name)
    if plain == name and not name.startswith("."):
        return name
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _parse(text: str, recipe: Recipe, changes: Sequence[str]) -> Candidate:
    own_name, body = _named(text)
    if _is_checkpoint(body):
        return CheckpointCandidate(own_name or (body if is_cataloged(body) else Path(body).resolve().name), body)
    method, scheme, listed, seed = _split(text, body)
    if method not in method_names():
        hint = did_you_mean(method, method_names())
        raise OnPTQError(f"candidate {text!r}: unknown method{hint}; expected one of {', '.join(method_names())}")
    number = {} if seed is None else {"seed": _seed(text, method, seed)}
    try:
        base, fields = _settings(listed)
        own = dict(parse_override(f"{field}={value}") for field, value in fields.items())
        start = recipe if base is None else _base(base, recipe, changes)
        resolved = start.with_overrides({"scheme": scheme, "method": method} | number | own)
    except OnPTQError as error:
        raise OnPTQError(f"candidate {text!r}: {error}") from error
    if not Scheme.parse(resolved.scheme).quantizes_weights:
        raise OnPTQError(f"candidate {text!r} leaves the weights in 16 bits; expected W2 to W8")
    settings = [*([] if base is None else [base]), *(f"{field}={value}" for field, value in fields.items())]
    at = f"@{','.join(settings)}" if settings else ""
    return MethodCandidate(own_name or f"{method}:{resolved.scheme}{at}{'#' if number else ''}{seed or ''}", resolved)


def _named(text: str) -> tuple[str, str]:
    """The name before the first =, and the rest. An = behind @ is that of a field, one in a folder's name the folder's."""
    name, _, body = text.partition("=")
    return (name, body) if name and body and "@" not in name and not _is_checkpoint(text) else ("", text)


def _split(text: str, body: str) -> tuple[str, str, str | None, str | None]:
    """Method, scheme, settings and seed of METHOD:SCHEME@SETTINGS#SEED or METHOD@SETTINGS:SCHEME#SEED."""
    unseeded, number, seed = body.partition("#")
    before, at, behind = unseeded.partition("@")
    method, colon, scheme = before.partition(":")
    settings = behind
    if at and not colon:
        settings, colon, scheme = behind.rpartition(":")
    if not colon:
        raise OnPTQError(
            f"candidate {text!r} is no folder here; expected a checkpoint folder, NAME=FOLDER, or METHOD:SCHEME such as "
            f"rtn:W4A8, with one of the methods {', '.join(method_names())}"
        )
    if "@" in scheme:
        raise OnPTQError(f"candidate {text!r} has two lists of settings behind @; expected one")
    return method, scheme, settings if at else None, seed if number else None


def _settings(listed: str | None) -> tuple[str | None, dict[str, str]]:
    """The preset or recipe file in a list of settings, and the values of its fields, as they are written."""
    parts = [] if listed is None else [part.strip() for part in listed.split(",")]
    bases = [part for part in parts if "=" not in part]
    if not all(parts):
        raise OnPTQError("a setting behind @ is empty; expected a preset, a recipe file or FIELD=VALUE")
    if len(bases) > 1:
        raise OnPTQError(f"{' and '.join(bases)} are whole recipes; expected one preset or recipe file behind @")
    fields = dict(part.split("=", 1) for part in parts if "=" in part)
    for field in fields:
        section = field.partition(".")[0].strip()
        if section in ELSEWHERE:
            raise OnPTQError(f"{field} is not set behind @; {ELSEWHERE[section]}")
    return next(iter(bases), None), fields


def _base(name: str, recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """A preset or a recipe file with the comparison's seed and compute settings."""
    shared = {"seed": recipe.seed} | {f"compute.{name}": value for name, value in recipe.compute.model_dump().items()}
    overrides = dict(map(parse_override, changes)) | shared
    if name in PRESETS:
        return Recipe.preset(name, overrides)
    if Path(name).suffix in (".yaml", ".yml"):
        return Recipe.from_yaml(name, overrides)
    raise OnPTQError(
        f"unknown preset {name!r}{did_you_mean(name, PRESETS)}; expected one of {', '.join(PRESETS)}, a recipe file "
        "(.yaml), or FIELD=VALUE such as init=awq"
    )


def _seed(text: str, method: str, seed: str) -> int:
    if method not in CYCLES:
        raise OnPTQError(f"candidate {text!r}: nothing in {method} is random; only {', '.join(CYCLES)} take a seed")
    if not (seed.isascii() and seed.isdigit()):
        raise OnPTQError(f"candidate {text!r}: {seed!r} is no seed; expected a whole number, e.g. {method}:W4A8#1")
    return int(seed)


def _is_checkpoint(text: str) -> bool:
    return is_cataloged(text) or Path(text).is_dir()
