"""All kept results as one plain report: every model's figures with intervals, and every pair's differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from onptq.bank import States
from onptq.evaluate.answers import Answer
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.items import Item
from onptq.evaluate.margins import Margins
from onptq.evaluate.measures import (
    Label,
    behaviour_measures,
    change_measures,
    critical_measures,
    judged,
    labels,
    score_measures,
)
from onptq.evaluate.scores import compare_answers, score
from onptq.evaluate.statistics import Column, Interval, Measure, Resampler, differing, fewest_differing, mcnemar

PAIRED = 16  # candidates of which every two are compared; a report on more would be mostly about unlike things


@dataclass(frozen=True)
class Results:
    """What was kept of one model: its answers, and on-policy states where it is a candidate and prompts were given."""

    answers: Sequence[Answer] = ()
    states: States | None = None
    cost: Mapping[str, Any] = field(default_factory=dict)
    scheme: str | None = None  # of a candidate that was built here
    margins: Margins | None = None  # on the joint-critical states that all candidates of its scheme share


def summarize(
    items: Sequence[Item], prompts: Sequence[int], results: Mapping[str, Results], resampler: Resampler
) -> dict[str, Any]:
    """`results` by name, the dense model's under DENSE; `prompts` are the ordinals of the held-out prompts."""
    known = labels(items)
    measures = {name: _measures(items, prompts, results[DENSE], one) for name, one in results.items()}
    models: dict[str, Any] = {}
    for name, one in results.items():
        models[name] = {"cost": dict(one.cost)}
        models[name]["figures"] = {key: resampler.estimate(m).to_dict() for key, m in measures[name].items()}
        if items:
            models[name] |= score(items, one.answers).to_dict()
            if name != DENSE:
                models[name] |= compare_answers(items, results[DENSE].answers, one.answers).to_dict()
    rights = _rights(items, results)
    pairs = [_pair(a, b, rights, measures, known, resampler) for a, b in _paired_names(results)]
    return {
        "items": len(items),
        "prompts": len(prompts),
        "bootstrap": {
            "replicates": resampler.replicates,
            "confidence": resampler.confidence,
            "seed": resampler.seed,
            "method": "percentile, clusters are items and prompts",
        },
        "all_paired": len(pairs) == math.comb(len(results), 2),
        "labels": {name: vars(label) for name, label in known.items()},
        "models": models,
        "pairs": pairs,
    }


def _measures(items: Sequence[Item], prompts: Sequence[int], dense: Results, one: Results) -> dict[str, Measure]:
    found: dict[str, Measure] = {}
    if items:
        found |= score_measures(items, one.answers)
        if one is not dense:
            found |= change_measures(items, dense.answers, one.answers)
    if one.states is not None:
        found |= behaviour_measures(one.states, prompts)
    if one.margins is not None and one.margins.critical.any():
        found |= critical_measures(one.margins, prompts)
    return found


def _pair(
    a: str,
    b: str,
    rights: Mapping[str, Column],
    measures: Mapping[str, Mapping[str, Measure]],
    known: Mapping[str, Label],
    resampler: Resampler,
) -> dict[str, Any]:
    """b against a. Flips are judged by McNemar's test, everything else by whether its interval leaves zero out and enough
    clusters differ for that to mean anything."""
    shared = [name for name in known if name in measures[a] and name in measures[b]]
    differences = {name: resampler.difference(measures[a][name], measures[b][name]) for name in shared}
    apart = {name: differing(measures[a][name], measures[b][name]) for name in shared}
    enough = fewest_differing(resampler.confidence)
    told = {name: differences[name].excludes_zero and apart[name] >= enough for name in shared}
    tests = _tests(a, b, rights)
    if "flips" in told:
        told["flips"] = tests["flips"]["p"] < 1 - resampler.confidence
    return {
        "first": a,
        "second": b,
        "differences": {name: differences[name].to_dict() | {"differing": apart[name]} for name in shared},
        "verdicts": {name: verdict(differences[name], known[name], told[name]) for name in shared},
        "mcnemar": tests,
    }


def verdict(difference: Interval, label: Label, distinguishable: bool) -> str:
    """Of the second model: better, worse, same (no difference at all) or open (none that can be told from chance)."""
    if difference.value is None or difference.low is None:
        return "unknown"
    if difference.value == difference.low == difference.high == 0:
        return "same"
    if not distinguishable:
        return "open"
    return "better" if (difference.value < 0) == label.less_is_better else "worse"


def _paired_names(results: Mapping[str, Results]) -> list[tuple[str, str]]:
    """Everybody with the dense model and with everybody else; of many, those built for different schemes are left apart."""
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


def _tests(a: str, b: str, rights: Mapping[str, Column]) -> dict[str, Any]:
    """Exact tests over items that are right or wrong: who is right more often, and whose correctness flipped more often."""
    if not rights:
        return {}
    dense, first, second = (rights[name] for name in (DENSE, a, b))
    tests = {"right": mcnemar(first, second).to_dict()}
    if a != DENSE:
        tests["flips"] = mcnemar(first != dense, second != dense).to_dict()
    return tests
