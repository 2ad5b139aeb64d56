"""The results by name, each in a module of its own that is imported when it is run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from onptq.errors import OnPTQError, did_you_mean

if TYPE_CHECKING:
    from onptq.reproduce.experiment import Experiment
    from onptq.reproduce.record import Result

# What each is, in the order in which `all` runs them: analyses of single states first, whole tables last.
RESULTS: Mapping[str, str] = {
    "risk-properties": "Figure 3: mismatch and consequence, concentration and migration of risk",
    "signals": "Table 10: what each signal says of mismatch and of future consequence",
    "theory": "Theorem 1 and the pair identity on real states",
    "selection-value": "Tables 3 and 9: six rules choose states from the same pool",
    "motivation": "Figure 1: amplification, coverage, anchor, and the correlation of JS with consequence",
    "ablations": "Table 4: thirteen changes of the method, one at a time",
    "hyperparameters": "Table 8: H, K_c, lambda_b, eta, gamma, one at a time",
    "main-table": "Table 1: all methods in four schemes",
    "flip-rate": "Figure 4: correctness flips, both directions, from the runs of main-table",
    "omni-table": "Table 2: all methods in two schemes on a model that hears",
    "efficiency": "Table 5: prefill time and memory, from reports of `onptq bench`",
}
NAMES = tuple(RESULTS)
ALL = "all"
ANSWERED = ("main-table", "flip-rate", "omni-table")  # that can be of answers to real benchmarks
# About how many models each makes and measures, by which what is left of a run is estimated.
WORK: Mapping[str, int] = {
    "risk-properties": 2,
    "signals": 1,
    "theory": 2,
    "selection-value": 6,
    "motivation": 8,
    "ablations": 14,
    "hyperparameters": 11,
    "main-table": 28,
    "flip-rate": 1,
    "omni-table": 14,
    "efficiency": 1,
}


def check_names(names: list[str]) -> list[str]:
    """The names to run, in their order here; `all` is every one."""
    for name in names:
        if name not in (*NAMES, ALL):
            hint = did_you_mean(name, (*NAMES, ALL))
            raise OnPTQError(f"unknown result {name!r}{hint}; expected {ALL}, or some of {', '.join(NAMES)}")
    return [name for name in NAMES if ALL in names or name in names]


def check_answered(names: Sequence[str]) -> None:
    """Refuse to take given answers for results that are of a model's states or of times."""
    others = [name for name in names if name not in ANSWERED]
    if others:
        raise OnPTQError(f"--answers is for {', '.join(ANSWERED)}; expected no other results, not {', '.join(others)}")


class Clock:
    """How far a run of several results is, and how long the rest may take."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._began, self._used = list(names), time.monotonic(), time.process_time()

    def begin(self, name: str) -> str:
        """The sentence at the beginning of a result."""
        place = self._names.index(name)
        done, left = (sum(WORK[one] for one in of) for of in (self._names[:place], self._names[place:]))
        seconds = time.monotonic() - self._began
        rest = f"; {seconds:.0f} s so far, eta {seconds * left / done:.0f} s" if place else ""
        return f"{name}, {place + 1} of {len(self._names)}{rest}"

    def end(self) -> str:
        """The sentence behind the last result."""
        seconds, used = time.monotonic() - self._began, time.process_time() - self._used
        return f"Elapsed: {seconds:.0f} s, {used:.0f} s of processor time"


def run(name: str, experiment: Experiment) -> Result:
    """Run a result, or read back what of it was run before."""
    result: Result = import_module(f"onptq.reproduce.{name.replace('-', '_')}").run(experiment)
    return result
