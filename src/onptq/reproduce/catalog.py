"""The results by name, each in a module of its own that is imported when it is run."""

from __future__ import annotations

from collections.abc import Mapping
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


def check_names(names: list[str]) -> list[str]:
    """The names to run, in their order here; `all` is every one."""
    for name in names:
        if name not in (*NAMES, ALL):
            hint = did_you_mean(name, (*NAMES, ALL))
            raise OnPTQError(f"unknown result {name!r}{hint}; expected {ALL}, or some of {', '.join(NAMES)}")
    return [name for name in NAMES if ALL in names or name in names]


def run(name: str, experiment: Experiment) -> Result:
    """Run a result, or read back what of it was run before."""
    found: Result = import_module(f"onptq.reproduce.{name.replace('-', '_')}").run(experiment)
    return found
