"""What OnPTQ is meant to reach on every benchmark, and whether the measured differences say that it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from onptq.schemes import Scheme

OURS, CONTROL = "onptq", "static"
MILD = ("W4A16", "W8A8")  # where there is little to win: nothing may be lost
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
    said: str

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
            control = {name: found for name, found in self.differences.items() if name == CONTROL}
            yield self._no_worse(GUARD, control)
        if self.tasks:
            yield self._tasks_kept()

    def _lowest(self, measure: str) -> Goal:
        name = self.labels[measure]["name"]
        known, missing = self._known(measure, self.differences)
        short = {method: found for method, found in known.items() if found["verdict"] != "better"}
        said = f"{self._value(measure)}; every interval against {', '.join(known) or 'nobody'} excludes zero"
        if short:
            said = f"{self._value(measure)}; not shown against {self._listed(measure, short)}"
        return self._goal(f"lowest {name}", not short, said, [*self.missing, *missing])

    def _no_worse(self, measure: str, rivals: Mapping[str, Any]) -> Goal:
        name = self.labels[measure]["name"]
        known, missing = self._known(measure, rivals)
        worse = {method: found for method, found in known.items() if found["verdict"] == "worse"}
        who = CONTROL if measure == GUARD and set(rivals) <= {CONTROL} else "any other method"
        said = f"{self._value(measure)}; no interval on the wrong side of zero"
        if worse:
            said = f"{self._value(measure)}; worse than {self._listed(measure, worse)}"
        missing += [method for method in self.missing if who != CONTROL or method == CONTROL]
        return self._goal(f"{name} no worse than {who}", not worse, said, missing)

    def _tasks_kept(self) -> Goal:
        below = []
        for task in self.tasks:
            sign = -1 if self.labels[task]["less_is_better"] else 1
            known = {method: one[task]["value"] for method, one in self.others.items() if one.get(task)}
            known = {method: sign * value for method, value in known.items() if value is not None}
            if known and self.ours[task]["value"] is not None:
                best = max(known, key=lambda method: known[method])
                behind = known[best] - sign * self.ours[task]["value"]
                if behind > POINTS:
                    name, digits = self.labels[task]["name"], self.labels[task]["digits"]
                    values = f"{self.ours[task]['value']:.{digits}f} against {sign * known[best]:.{digits}f} of {best}"
                    below.append(f"{name} is {behind:.1f} points behind ({values})")
        said = "; ".join(below) or "every task is within that"
        goal = f"no task more than {POINTS:g} point behind the best other method"
        return self._goal(goal, not below, said, self.missing)

    def _goal(self, goal: str, reached: bool, said: str, missing: Sequence[str]) -> Goal:
        outcome: Outcome = "missed" if not reached else "open" if missing or not self.differences else "met"
        if outcome == "open":
            said += f"; not measured yet: {', '.join(missing) or 'any other method'}"
        return Goal(self.scheme, f"{goal}{self.seed}", outcome, said)

    def _measured(self, measures: Sequence[str]) -> list[str]:
        return [name for name in measures if self.ours.get(name, {}).get("value") is not None]

    def _known(self, measure: str, rivals: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Differences in that measure, and those of whom it was not taken."""
        known = {method: found[measure] for method, found in rivals.items() if measure in found}
        return known, [method for method in rivals if method not in known]

    def _value(self, measure: str) -> str:
        label = self.labels[measure]
        return f"{self.ours[measure]['value']:.{label['digits']}f}{'%' if label['percent'] else ''}"

    def _listed(self, measure: str, found: Mapping[str, Any]) -> str:
        return ", ".join(f"{method} ({shown_difference(one, self.labels[measure])})" for method, one in found.items())


def shown_difference(found: Mapping[str, Any], label: Mapping[str, Any]) -> str:
    if found["value"] is None:
        return "unknown"
    digits = 2 if label["percent"] else label["digits"]
    if found["low"] is None:
        return f"{found['value']:+.{digits}f}"
    return f"{found['value']:+.{digits}f} [{found['low']:+.{digits}f}, {found['high']:+.{digits}f}]"
