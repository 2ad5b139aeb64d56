"""All results of a comparison as one report: every model's figures with intervals, and every pair's differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, Literal

from onptq.bank import States
from onptq.evaluate.answers import Answer
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.critical import Margins
from onptq.evaluate.metrics import (
    Label,
    behaviour_measures,
    change_measures,
    critical_measures,
    judged,
    labels,
    score_measures,
)
from onptq.evaluate.scores import Change, Scores, compare_answers, score
from onptq.evaluate.statistics import (
    Column,
    Discordance,
    Interval,
    Measure,
    Resampler,
    differing,
    fewest_differing,
    mcnemar,
)
from onptq.evaluate.tasks import Item

PAIRED = 16  # candidates of which every two are compared; a report on more would be mostly about unlike things
Verdict = Literal["better", "worse", "same", "open", "unknown"]


@dataclass(frozen=True)
class Results:
    """One model's results: its answers, and on-policy states where it is a candidate and prompts were given."""

    answers: Sequence[Answer] = ()
    states: States | None = None
    cost: Mapping[str, Any] = field(default_factory=dict)
    scheme: str | None = None  # of a candidate that was made here
    margins: Margins | None = None  # on the joint-critical states that all candidates of its scheme share


@dataclass(frozen=True)
class ModelReport:
    """One model: its figures with intervals, its scores, and how its answers differ from the dense model's."""

    cost: Mapping[str, Any]
    figures: Mapping[str, Interval]
    scores: Scores | None = None
    change: Change | None = None

    def to_dict(self) -> dict[str, Any]:
        figures = {name: interval.to_dict() for name, interval in self.figures.items()}
        parts = [one.to_dict() for one in (self.scores, self.change) if one is not None]
        return {"cost": dict(self.cost), "figures": figures} | {
            key: value for part in parts for key, value in part.items()
        }


@dataclass(frozen=True)
class Pair:
    """The second model against the first."""

    first: str
    second: str
    differences: Mapping[str, Interval]
    differing: Mapping[str, int]  # by measure, the clusters whose own ratios differ
    verdicts: Mapping[str, Verdict]
    mcnemar: Mapping[str, Discordance]

    def to_dict(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "second": self.second,
            "differences": {
                name: interval.to_dict() | {"differing": self.differing[name]}
                for name, interval in self.differences.items()
            },
            "verdicts": dict(self.verdicts),
            "mcnemar": {name: test.to_dict() for name, test in self.mcnemar.items()},
        }


@dataclass(frozen=True)
class Report:
    """A whole comparison."""

    dense: str  # the dense model as the user named it
    origin: str  # of items and prompts, in words
    items: int
    prompts: int
    replicates: int
    confidence: float
    seed: int
    all_paired: bool
    labels: Mapping[str, Label]
    models: Mapping[str, ModelReport]
    pairs: Sequence[Pair]

    def to_dict(self) -> dict[str, Any]:
        """The report as `report.json` has it."""
        return {
            "dense": self.dense,
            "origin": self.origin,
            "items": self.items,
            "prompts": self.prompts,
            "bootstrap": {
                "replicates": self.replicates,
                "confidence": self.confidence,
                "seed": self.seed,
                "method": "percentile, clusters are items and prompts",
            },
            "all_paired": self.all_paired,
            "labels": {name: asdict(label) for name, label in self.labels.items()},
            "models": {name: model.to_dict() for name, model in self.models.items()},
            "pairs": [pair.to_dict() for pair in self.pairs],
        }


def summarize(
    items: Sequence[Item],
    prompts: Sequence[int],
    results: Mapping[str, Results],
    resampler: Resampler,
    dense: str = DENSE,
    origin: str = "",
) -> Report:
    """The report on `results` by name, the dense model's under DENSE; `prompts` are the ordinals of the prompts."""
    of_items = labels(items)
    measures = {name: _measures(items, prompts, results[DENSE], one) for name, one in results.items()}
    models = {
        name: ModelReport(
            one.cost,
            {key: resampler.estimate(measure) for key, measure in measures[name].items()},
            score(items, one.answers) if items else None,
            compare_answers(items, results[DENSE].answers, one.answers) if items and name != DENSE else None,
        )
        for name, one in results.items()
    }
    rights = _rights(items, results)
    pairs = [_pair(a, b, rights, measures, of_items, resampler) for a, b in _paired_names(results)]
    return Report(
        dense,
        origin,
        len(items),
        len(prompts),
        resampler.replicates,
        resampler.confidence,
        resampler.seed,
        len(pairs) == math.comb(len(results), 2),
        of_items,
        models,
        pairs,
    )


def _measures(items: Sequence[Item], prompts: Sequence[int], dense: Results, one: Results) -> dict[str, Measure]:
    measures: dict[str, Measure] = {}
    if items:
        measures |= score_measures(items, one.answers)
        if one is not dense:
            measures |= change_measures(items, dense.answers, one.answers)
    if one.states is not None:
        measures |= behaviour_measures(one.states, prompts)
    if one.margins is not None and one.margins.critical.any():
        measures |= critical_measures(one.margins, prompts)
    return measures


def _pair(
    a: str,
    b: str,
    rights: Mapping[str, Column],
    measures: Mapping[str, Mapping[str, Measure]],
    of_items: Mapping[str, Label],
    resampler: Resampler,
) -> Pair:
    """b against a. Flips are judged by McNemar's test, everything else by whether its interval leaves zero out and enough
    clusters differ for that to mean anything."""
    shared = [name for name in of_items if name in measures[a] and name in measures[b]]
    differences = {name: resampler.difference(measures[a][name], measures[b][name]) for name in shared}
    apart = {name: differing(measures[a][name], measures[b][name]) for name in shared}
    enough = fewest_differing(resampler.confidence)
    distinguishable = {name: differences[name].excludes_zero and apart[name] >= enough for name in shared}
    tests = _tests(a, b, rights)
    if "flips" in distinguishable:
        distinguishable["flips"] = tests["flips"].p < 1 - resampler.confidence
    verdicts = {name: verdict(differences[name], of_items[name], distinguishable[name]) for name in shared}
    return Pair(a, b, differences, apart, verdicts, tests)


def verdict(difference: Interval, label: Label, distinguishable: bool) -> Verdict:
    """Of the second model: better, worse, same (no difference at all) or open (a difference that may be chance)."""
    if difference.value is None or difference.low is None:
        return "unknown"
    if difference.value == difference.low == difference.high == 0:
        return "same"
    if not distinguishable:
        return "open"
    return "better" if (difference.value < 0) == label.less_is_better else "worse"


def _paired_names(results: Mapping[str, Results]) -> list[tuple[str, str]]:
    """Every candidate with the dense model and with every other; of many, those of different schemes are not paired."""
    names = [name for name in results if name != DENSE]
    pairs = list(combinations(names, 2))
    if len(names) > PAIRED:
        schemes = {name: results[name].scheme for name in names}
        pairs = [(a, b) for a, b in pairs if None in (schemes[a], schemes[b]) or schemes[a] == schemes[b]]
    return [(DENSE, name) for name in names] + pairs


def _rights(items: Sequence[Item], results: Mapping[str, Results]) -> dict[str, Column]:
    if not any(item.measure == "accuracy" for item in items):
        return {}
    return {name: judged(items, one.answers) for name, one in results.items()}


def _tests(a: str, b: str, rights: Mapping[str, Column]) -> dict[str, Discordance]:
    """Exact tests over items that are right or wrong: who is right more often, and whose correctness flipped more often."""
    if not rights:
        return {}
    dense, first, second = (rights[name] for name in (DENSE, a, b))
    tests = {"right": mcnemar(first, second)}
    if a != DENSE:
        tests["flips"] = mcnemar(first != dense, second != dense)
    return tests
