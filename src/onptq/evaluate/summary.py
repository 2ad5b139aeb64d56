"""All results of a comparison as one report: every model's figures with intervals, and every pair's differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, Literal

from onptq.bank import States, Trajectory
from onptq.evaluate.answers import Answer
from onptq.evaluate.candidates import DENSE, shown
from onptq.evaluate.critical import Margins
from onptq.evaluate.damage import content_measures, damage_measures
from onptq.evaluate.metrics import (
    Label,
    behaviour_measures,
    change_measures,
    critical_measures,
    judged,
    labels,
    noise_of_answers,
    score_measures,
)
from onptq.evaluate.scores import Change, Scores, compare_answers, score
from onptq.evaluate.statistics import (
    Column,
    Discordance,
    Interval,
    Resampler,
    Seeded,
    Single,
    differing,
    fewest_differing,
    mcnemar,
    spread,
)
from onptq.evaluate.tasks import Scored

PAIRED = 16  # candidates of which every two are compared; a report on more would be mostly about unlike things
Verdict = Literal["better", "worse", "different", "same", "open", "unknown"]


@dataclass(frozen=True)
class Results:
    """One model's results: its answers, and on-policy states where it is a candidate and prompts were given."""

    answers: Sequence[Answer] = ()
    states: States | None = None
    cost: Mapping[str, Any] = field(default_factory=dict)
    scheme: str | None = None  # of a candidate that was made here
    margins: Margins | None = None  # on the joint-critical states that all candidates of its scheme share
    mismatches: States | None = None  # those of its states, branched
    dense_path: States | None = None  # on the dense model's responses
    responses: Sequence[Trajectory] | None = None  # to the prompts


@dataclass(frozen=True)
class ModelReport:
    """One model: its figures with intervals, its scores, and how its answers differ from the dense model's.

    Of a model with several seeds, figures are means over them; `seeds` has each seed's own report, with its scores.
    """

    cost: Mapping[str, Any]
    figures: Mapping[str, Interval]
    scores: Scores | None = None
    change: Change | None = None
    seeds: Mapping[str, ModelReport] = field(default_factory=dict)  # by the name of the candidate
    spread: Mapping[str, float] = field(default_factory=dict)  # by measure, the standard deviation over the seeds

    def to_dict(self) -> dict[str, Any]:
        figures = {name: interval.to_dict() for name, interval in self.figures.items()}
        parts = [one.to_dict() for one in (self.scores, self.change) if one is not None]
        if self.seeds:
            seeds = {name: one.to_dict() for name, one in self.seeds.items()}
            parts.append({"spread": dict(self.spread), "seeds": seeds})
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
    shown: Mapping[str, str] = field(
        default_factory=dict
    )  # names of models as tables have them, where these are others

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
    items: Sequence[Scored],
    prompts: Sequence[int],
    results: Mapping[str, Results],
    resampler: Resampler,
    dense: str = DENSE,
    origin: str = "",
    seeds: Mapping[str, Sequence[str]] | None = None,
) -> Report:
    """The report on `results` by name, the dense model's under DENSE; `prompts` are the ordinals of the prompts.

    `seeds` has the names of the candidates that differ in their seed alone, by the name of the first: they are one model.
    """
    of_items = labels(items)
    alone = {name: _measures(items, prompts, results[DENSE], one) for name, one in results.items()}
    models = {
        name: ModelReport(
            one.cost,
            {key: resampler.estimate(measure) for key, measure in alone[name].items()},
            score(items, one.answers) if items else None,
            compare_answers(items, results[DENSE].answers, one.answers) if items and name != DENSE else None,
        )
        for name, one in results.items()
    }
    groups = {f"{name} ({len(members)} seeds)": members for name, members in (seeds or {}).items()}
    means = {name: _over_seeds([alone[one] for one in members]) for name, members in groups.items()}
    for name, members in groups.items():
        models[name] = _seeded_model({one: models[one] for one in members}, means[name], resampler)
    rows = _rows(results, groups)
    rights = _rights(items, results)
    schemes = {name: results[first].scheme for name, first in rows.items()}
    pairs = [_pair(a, b, rights, {**alone, **means}, of_items, resampler) for a, b in _paired_names(schemes)]
    return Report(
        dense,
        origin,
        len(items),
        len(prompts),
        resampler.replicates,
        resampler.confidence,
        resampler.seed,
        len(pairs) == math.comb(len(rows), 2),
        of_items,
        {name: models[name] for name in rows},
        pairs,
        {name: shown(name) for name, scheme in schemes.items() if scheme is not None},
    )


def _rows(results: Mapping[str, Results], groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The models of a report, in its order: each one's name, and that of its results or of those of its first seed."""
    group_of = {member: name for name, members in groups.items() for member in members}
    rows: dict[str, str] = {}
    for name in results:
        rows.setdefault(group_of.get(name, name), name)
    return rows


def _over_seeds(members: Sequence[Mapping[str, Single]]) -> dict[str, Seeded]:
    """The measures that every seed has."""
    shared = [key for key in members[0] if all(key in each for each in members)]
    return {key: Seeded(tuple(each[key] for each in members)) for key in shared}


def _seeded_model(
    members: Mapping[str, ModelReport], measures: Mapping[str, Seeded], resampler: Resampler
) -> ModelReport:
    """The report on a model with several seeds: what one of them costs, means, and how far the seeds lie apart."""
    costs = [one.cost for one in members.values()]
    seconds = [cost["seconds"] for cost in costs if cost.get("seconds") is not None]
    peaks = [cost["peak_bytes"] for cost in costs if cost.get("peak_bytes") is not None]
    cost = dict(costs[0]) | {
        "seconds": sum(seconds) / len(seconds) if seconds else None,
        "peak_bytes": max(peaks, default=None),
    }
    figures = {key: resampler.estimate(measure) for key, measure in measures.items()}
    spreads = {key: value for key, measure in measures.items() if (value := spread(measure)) is not None}
    return ModelReport(cost, figures, seeds=members, spread=spreads)


def _measures(items: Sequence[Scored], prompts: Sequence[int], dense: Results, one: Results) -> dict[str, Single]:
    measures: dict[str, Single] = {}
    if items:
        measures |= score_measures(items, one.answers) | noise_of_answers(items, one.answers)
        if one is not dense:
            measures |= change_measures(items, dense.answers, one.answers)
            measures |= content_measures(items, dense.answers, one.answers)
    if one.states is not None:
        measures |= behaviour_measures(one.states, prompts)
    if one.margins is not None and one.margins.critical.any():
        measures |= critical_measures(one.margins, prompts)
    return measures | damage_measures(
        prompts,
        states=one.states,
        mismatches=one.mismatches,
        dense_path=one.dense_path,
        responses=one.responses,
        dense_responses=None if one is dense else dense.responses,
    )


def _pair(
    a: str,
    b: str,
    rights: Mapping[str, Column],
    measures: Mapping[str, Mapping[str, Single | Seeded]],
    of_items: Mapping[str, Label],
    resampler: Resampler,
) -> Pair:
    """b against a. Flips are judged by McNemar's test where each model has one seed, everything else by whether its interval
    leaves zero out and enough clusters differ for that to mean anything."""
    shared = [name for name in of_items if name in measures[a] and name in measures[b]]
    differences = {name: resampler.difference(measures[a][name], measures[b][name]) for name in shared}
    apart = {name: differing(measures[a][name], measures[b][name]) for name in shared}
    enough = fewest_differing(resampler.confidence)
    distinguishable = {name: differences[name].excludes_zero and apart[name] >= enough for name in shared}
    tests = _tests(a, b, rights)
    if "flips" in distinguishable and "flips" in tests:
        distinguishable["flips"] = tests["flips"].p < 1 - resampler.confidence
    verdicts = {name: verdict(differences[name], of_items[name], distinguishable[name]) for name in shared}
    return Pair(a, b, differences, apart, verdicts, tests)


def verdict(difference: Interval, label: Label, distinguishable: bool) -> Verdict:
    """The verdict on the second model: better, worse, different (neither is better), same (no difference at all) or open (a
    difference that may be chance)."""
    if difference.value is None or difference.low is None:
        return "unknown"
    if difference.value == difference.low == difference.high == 0:
        return "same"
    if not distinguishable:
        return "open"
    if label.less_is_better is None:
        return "different"
    return "better" if (difference.value < 0) == label.less_is_better else "worse"


def _paired_names(schemes: Mapping[str, str | None]) -> list[tuple[str, str]]:
    """Every candidate with the dense model and with every other; of many, those of different schemes are not paired."""
    names = [name for name in schemes if name != DENSE]
    pairs = list(combinations(names, 2))
    if len(names) > PAIRED:
        pairs = [(a, b) for a, b in pairs if None in (schemes[a], schemes[b]) or schemes[a] == schemes[b]]
    return [(DENSE, name) for name in names] + pairs


def _rights(items: Sequence[Scored], results: Mapping[str, Results]) -> dict[str, Column]:
    if not any(item.measure == "accuracy" for item in items):
        return {}
    return {name: judged(items, one.answers) for name, one in results.items()}


def _tests(a: str, b: str, rights: Mapping[str, Column]) -> dict[str, Discordance]:
    """Exact tests over items that are right or wrong: who is right more often, and whose correctness flipped more often.

    None of models with several seeds: an item has one answer of each seed.
    """
    if a not in rights or b not in rights:
        return {}
    dense, first, second = (rights[name] for name in (DENSE, a, b))
    tests = {"right": mcnemar(first, second)}
    if a != DENSE:
        tests["flips"] = mcnemar(first != dense, second != dense)
    return tests
