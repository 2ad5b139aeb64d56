"""The goals of OnPTQ on every benchmark, and whether the measured differences show that it reaches them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.suite.cells import difference
from onptq.schemes import Scheme

OURS, CONTROL = "onptq", "static"
MILD = ("W4A16", "W8A8")  # schemes that lose little: here nothing may be worse
LOWEST = ("mismatch", "erosion", "flips", "critical_flips")
GUARD = "kl"
NO_WORSE = ("mismatch", "erosion", "flips", "critical_flips", "kl", "average")
POINTS = 1.0  # that a task may lie below the best other method

Outcome = Literal["met", "missed", "open"]


@dataclass(frozen=True)
class Goal:
    scheme: str
    goal: str
    outcome: Outcome
    evidence: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Standing:
    """OnPTQ among the methods of one benchmark, scheme and seed."""

    scheme: str
    seed: str  # "" where there is one
    ours: Mapping[str, Any]  # measure to its figure
    others: Mapping[str, Mapping[str, Any]]  # method, measure to its figure
    differences: Mapping[str, Mapping[str, Any]]  # method, measure to ours - theirs with its verdict
    missing: Sequence[str]  # methods that are not measured yet
    labels: Mapping[str, Any]
    tasks: Sequence[str]

    def goals(self) -> Iterator[Goal]:
        if str(Scheme.parse(self.scheme)) in MILD:
            for measure in self._measured(NO_WORSE):
                yield self._no_worse(measure, self.differences)
            return
        for measure in self._measured(LOWEST):
            yield self._lowest(measure)
        if self._measured((GUARD,)) and CONTROL in (*self.differences, *self.missing):
            control = {name: by_measure for name, by_measure in self.differences.items() if name == CONTROL}
            yield self._no_worse(GUARD, control)
        if self.tasks:
            yield self._no_task_behind()

    def _lowest(self, measure: str) -> Goal:
        name = self.labels[measure]["name"]
        measured, missing = self._differences_in(measure, self.differences)
        short = {method: one for method, one in measured.items() if one["verdict"] != "better"}
        if short:
            evidence = f"{self._value(measure)}; not shown against {self._listed(measure, short)}"
        else:
            methods = ", ".join(measured) or "no other method"
            evidence = f"{self._value(measure)}; every interval against {methods} excludes zero"
        return self._goal(f"lowest {name}", not short, evidence, [*self.missing, *missing])

    def _no_worse(self, measure: str, rivals: Mapping[str, Any]) -> Goal:
        name = self.labels[measure]["name"]
        measured, missing = self._differences_in(measure, rivals)
        worse = {method: one for method, one in measured.items() if one["verdict"] == "worse"}
        who = CONTROL if measure == GUARD and set(rivals) <= {CONTROL} else "any other method"
        evidence = f"{self._value(measure)}; no interval on the wrong side of zero"
        if worse:
            evidence = f"{self._value(measure)}; worse than {self._listed(measure, worse)}"
        missing += [method for method in self.missing if who != CONTROL or method == CONTROL]
        return self._goal(f"{name} no worse than {who}", not worse, evidence, missing)

    def _no_task_behind(self) -> Goal:
        below = [text for task in self.tasks if (text := self._behind(task))]
        evidence = "; ".join(below) or "every task is within that"
        goal = f"no task more than {POINTS:g} point behind the best other method"
        return self._goal(goal, not below, evidence, self.missing)

    def _behind(self, task: str) -> str:
        """How far a task is behind the best other method; empty where that is little."""
        sign = -1 if self.labels[task]["less_is_better"] else 1
        scores = {method: one[task]["value"] for method, one in self.others.items() if one.get(task)}
        scores = {method: sign * value for method, value in scores.items() if value is not None}
        ours = self.ours[task]["value"]
        if not scores or ours is None:
            return ""
        best = max(scores, key=lambda method: scores[method])
        behind = scores[best] - sign * ours
        if behind <= POINTS:
            return ""
        name, digits = self.labels[task]["name"], self.labels[task]["digits"]
        values = f"{ours:.{digits}f} against {sign * scores[best]:.{digits}f} of {best}"
        return f"{name} is {behind:.1f} points behind ({values})"

    def _goal(self, goal: str, reached: bool, evidence: str, missing: Sequence[str]) -> Goal:
        outcome: Outcome = "missed" if not reached else "open" if missing or not self.differences else "met"
        if outcome == "open":
            evidence += f"; not measured yet: {', '.join(missing) or 'any other method'}"
        return Goal(self.scheme, f"{goal}{self.seed}", outcome, evidence)

    def _measured(self, measures: Sequence[str]) -> list[str]:
        return [name for name in measures if self.ours.get(name, {}).get("value") is not None]

    def _differences_in(self, measure: str, rivals: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """By method, the difference in that measure; and the methods that have none."""
        measured = {method: one[measure] for method, one in rivals.items() if measure in one}
        return measured, [method for method in rivals if method not in measured]

    def _value(self, measure: str) -> str:
        label = self.labels[measure]
        return f"{self.ours[measure]['value']:.{label['digits']}f}{'%' if label['percent'] else ''}"

    def _listed(self, measure: str, differences: Mapping[str, Any]) -> str:
        label = self.labels[measure]
        return ", ".join(f"{method} ({difference(one, label)})" for method, one in differences.items())
