"""A finished comparison: its figures, its paired differences, and the files behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onptq.bank import States, Trajectory, read_trajectories
from onptq.evaluate.answers import Answer, read_answers
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.metrics import AVERAGE
from onptq.evaluate.statistics import Interval, Resampler
from onptq.evaluate.store import ANSWERS, ROLLOUTS, STATES, THETA, path_of
from onptq.evaluate.summary import ModelReport, Report, Results, summarize
from onptq.evaluate.tasks import Scored
from onptq.reproduce.record import guarded, negative
from onptq.run import HOME

MISMATCH = "mismatch"


@dataclass(frozen=True)
class Compared:
    """A comparison's report and the files behind it."""

    report: Report
    folder: Path
    given: Mapping[str, Sequence[Answer]] = field(default_factory=dict)  # answers of other tools

    def __contains__(self, name: str) -> bool:
        return self._row(name) in self.report.models

    def model(self, name: str) -> ModelReport:
        """The candidate's figures; of one with several seeds their means."""
        return self.report.models[self._row(name)]

    def seeds(self, name: str) -> list[str]:
        """The names of a candidate's seeds, its own alone where no seed changes it."""
        return list(self.model(name).seeds) or [name]

    def among(self, items: Sequence[Scored]) -> Compared:
        """The same comparison by some of its items alone."""
        wanted = {item.id for item in items}
        groups = {next(iter(model.seeds)): list(model.seeds) for model in self.report.models.values() if model.seeds}
        results = {
            name: Results([one for one in self.answers(name) if one.item in wanted], scheme=name.partition(":")[2])
            for row in self.report.models
            for name in self.seeds(row)
        }
        resampler = Resampler(self.report.seed, self.report.replicates)
        report = summarize(items, (), results, resampler, self.report.dense, self.report.origin, groups)
        return replace(self, report=report)

    def figure(self, name: str, measure: str) -> Interval:
        return self.model(name).figures.get(measure, Interval(None))

    def difference(self, first: str, second: str, measure: str) -> Interval:
        """second - first, paired."""
        a, b = self._row(first), self._row(second)
        for pair in self.report.pairs:
            if {pair.first, pair.second} == {a, b} and measure in pair.differences:
                change = guarded(pair.differences[measure], pair.differing[measure])
                return change if pair.first == a else negative(change)
        return Interval(None)

    @property
    def measure(self) -> str:
        """What methods are judged by: the average score, or changed decisions where nothing is graded."""
        return AVERAGE if AVERAGE in self.report.labels else MISMATCH

    @property
    def sign(self) -> int:
        """1 where more of that measure is better."""
        return -1 if self.report.labels[self.measure].less_is_better else 1

    def gain(self, first: str, second: str) -> Interval:
        """How much better the second is than the first."""
        change = self.difference(first, second, self.measure)
        return change if self.sign == 1 else negative(change)

    def file(self, name: str, file: str) -> Path:
        parts = (DENSE,) if name == DENSE else path_of(name)
        return self.folder.joinpath(HOME, *parts, file)

    def theta(self, name: str) -> Path:
        return self.file(name, THETA)

    def answers(self, name: str) -> Sequence[Answer]:
        return self.given[name] if self.given else read_answers(self.file(name, ANSWERS))[name]

    def trajectories(self, name: str) -> list[Trajectory]:
        return read_trajectories(self.file(name, ROLLOUTS))

    def states(self, name: str) -> States:
        return States.read(self.file(name, STATES))

    def _row(self, name: str) -> str:
        return next((row for row in self.report.models if row == name or row.startswith(f"{name} (")), name)
