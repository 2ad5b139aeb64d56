"""Rounds and first banks that several candidates of a comparison have alike: computed for one, copied for the others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onptq.bank import States
from onptq.cycle.risk import critical_states
from onptq.evaluate.candidates import MethodCandidate
from onptq.evaluate.store import IDENTITY, path_of
from onptq.recipe import Recipe
from onptq.run import Run

Fields = Mapping[str, Any]
TRAJECTORIES, BANK, UPDATED = "trajectories.parquet", "bank.parquet", "theta.safetensors"
BEGINNING = ("scheme", "init", "init_steps", "seed", "data", "follow")  # fields that decide which states come first
OWN = ("name", "method", "recipe", "scheme")  # what may differ in the records of candidates that begin with one theta


def take_shared(one: MethodCandidate, comparison: Run, run: Run) -> None:
    """Copy to `run`, the candidate's own, the rounds that others have finished, or what their first bank says of its states.

    Recipes that differ in `rounds` and `refresh` alone begin with the same rounds. Recipes that differ in what an update does
    visit the same states first, and differ in which of these are critical. The seconds of what is copied are logged as the
    candidate's own, so that its cost does not depend on the others.
    """
    if not comparison.has(*path_of(one.name, IDENTITY)):
        return
    fields = comparison.read_json(*path_of(one.name, IDENTITY))["recipe"]
    others = list(_others(one.name, comparison))
    for other, recipe in others:
        for k in range(common_rounds(fields, recipe)):
            if other.has("rounds", str(k), UPDATED) and not run.has("rounds", str(k), UPDATED):
                _copy_round(k, other, run)
    for other, recipe in others:
        if not run.has("rounds", "0", BANK) and other.has("rounds", "0", BANK) and visits_alike(fields, recipe):
            _copy_bank(one.recipe, fields["branch"] == recipe["branch"], other, run)


def common_rounds(first: Fields, second: Fields) -> int:
    """How many rounds two recipes, as plain data, begin with alike."""
    apart = {name for name in first if first[name] != second[name]}
    both: int = min(first["rounds"], second["rounds"])
    if not apart <= {"rounds", "refresh"}:
        return 0
    return min(both, 1) if "refresh" in apart else both


def visits_alike(first: Fields, second: Fields) -> bool:
    """Whether two recipes, as plain data, have the same states in their first bank and measure the same of them."""
    same = all(first[name] == second[name] for name in BEGINNING)
    divergence = all(first["risk"][name] == second["risk"][name] for name in ("near_miss_tol", "divergence"))
    gammas, everywhere = (
        [each["calibrate"].get(name, 0.0) > 0 for each in (first, second)] for name in ("gamma", "consequence")
    )
    return same and divergence and all(gammas) and everywhere[0] == everywhere[1]


def _others(name: str, comparison: Run) -> Iterator[tuple[Run, Fields]]:
    """Runs and recipes, as plain data, of the other candidates that start from the same theta^(0) and prompts."""
    own = comparison.read_json(*path_of(name, IDENTITY))
    for file in sorted(comparison.file("candidates").glob(f"*/{IDENTITY}")):
        record = comparison.read_json(*file.relative_to(comparison.file()).parts)
        alike = all(record.get(key) == own.get(key) for key in {*record, *own} - set(OWN))
        if record["name"] != name and "recipe" in record and alike:
            yield comparison.arm("/".join(path_of(record["name"], "run"))), record["recipe"]


def _copy_round(k: int, other: Run, run: Run) -> None:
    """All files of a round, the theta that says it is finished last."""
    files = (file.name for file in other.file("rounds", str(k)).iterdir() if not file.name.startswith("."))
    _copy(other, run, k, sorted(files, key=lambda name: (name == UPDATED, name)))
    _log_seconds(other, run, f" {k + 1}")


def _copy_bank(recipe: Recipe, branched_alike: bool, other: Run, run: Run) -> None:
    """The other's first bank, scored and selected as this recipe wants it; none where its consequences are others."""
    states = other.read(f"rounds/0/{BANK}", States.read)
    if not recipe.branches:
        states = states.with_columns(
            consequence=np.zeros_like(states.consequence), horizon=np.zeros_like(states.horizon)
        )
    elif not branched_alike or not states.horizon.any():
        return
    _copy(other, run, 0, [TRAJECTORIES])
    with run.writing("rounds", "0", BANK) as path:
        critical_states(states, recipe, 0).write(path)
    _log_seconds(other, run, "Compare 1", *(["Branch 1"] if recipe.branches else []))


def _copy(other: Run, run: Run, k: int, files: Sequence[str]) -> None:
    for file in files:
        if not run.has("rounds", str(k), file):
            with run.writing("rounds", str(k), file) as path:
                shutil.copyfile(other.file("rounds", str(k), file), path)


def _log_seconds(other: Run, run: Run, *endings: str) -> None:
    """Log the phases whose names end so as if they had been this run's."""
    for phase, seconds in other.seconds().items():
        if phase.endswith(endings):
            run.log("phase", phase=phase, state="end", seconds=seconds, copied=True)
