"""Figure 4: answers whose correctness differs from the dense model's, both directions apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onptq.errors import OnPTQError
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.metrics import judged
from onptq.evaluate.statistics import Column, Interval, Measure, Part, Resampler, differing
from onptq.evaluate.tasks import Scored
from onptq.reproduce import main_table, tables
from onptq.reproduce.answered import read_given
from onptq.reproduce.common import differing_setup
from onptq.reproduce.compared import Compared
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.record import Claim, Mark, Picture, Result, Table, as_mark, below, guarded, shown

NAME, TITLE = "flip-rate", "Flips of correctness against the dense model (Figure 4)"
SCHEMES = ("W8A8", "W4A8", "W4A6")
COLUMNS = ("MMMU", "ScienceQA")  # whose answers the paper's figure is of
MODEL = "Qwen3-VL-8B-Instruct"
SETTINGS = "The paper's text does not name the three settings of its figure;"
Key = tuple[str, str]  # scheme and method


@dataclass(frozen=True)
class Flips:
    """Shares in percent, over items that are either right or wrong."""

    items: int
    both: Interval
    lost: Interval  # right to wrong
    gained: Interval  # wrong to right


def flips(dense: Column, quantized: Column, resampler: Resampler) -> Flips:
    """Flip Rate and its two parts, from whether each answer was right; bool [items] each."""
    return Flips(
        len(dense),
        *(resampler.estimate(_share(each)) for each in (dense != quantized, dense & ~quantized, ~dense & quantized)),
    )


def change(dense: Column, first: Column, second: Column, resampler: Resampler) -> Interval:
    """The second model's flip rate minus the first's, paired by item."""
    before, after = _share(dense != first), _share(dense != second)
    return guarded(resampler.difference(before, after), differing(before, after))


def _share(flipped: Column) -> Measure:
    return Measure((Part("items", flipped.astype(np.float64), np.ones(len(flipped))),), 100)


def run(experiment: Experiment) -> Result:
    if experiment.settings.answers:
        return _of_answers(experiment)
    schemes = SCHEMES if experiment.settings.scheme is None else (experiment.settings.scheme,)
    compared, items = main_table.compare(experiment), experiment.items()
    if not any(item.measure == "accuracy" for item in items):
        raise OnPTQError(f"{experiment.settings.model} has no tasks whose answers are right or wrong")
    settings = experiment.settings.describe()
    differs = [
        *differing_setup(settings, MODEL, "900 items of MMMU and 2,017 of ScienceQA-IMG"),
        "The items are those of the embedded tasks whose answers are right or wrong.",
        f"{SETTINGS} here they are those with quantized activations.",
        "With several seeds these are the flips of the first.",
    ]
    return result(compared, schemes, items, differs, settings, experiment.settings.seed)


def _of_answers(experiment: Experiment) -> Result:
    given = read_given(experiment.settings, COLUMNS, SCHEMES)
    differs = [*given.differs(MODEL), f"{SETTINGS} here they are those of the answers."]
    settings = given.settings(experiment.settings)
    return result(given.compared, given.schemes, given.questions, differs, settings, experiment.settings.seed)


def result(
    compared: Compared,
    schemes: Sequence[str],
    items: Sequence[Scored],
    differs: Sequence[str],
    settings: Mapping[str, Any],
    seed: int = 0,
) -> Result:
    resampler = Resampler(seed)
    dense = judged(items, compared.answers(DENSE))
    rights = {
        (scheme, method): judged(items, compared.answers(tables.name_of(method, scheme)))
        for scheme in schemes
        for method in tables.methods(compared, scheme)
    }
    measured = {key: flips(dense, right, resampler) for key, right in rights.items()}
    claims = [_claim(scheme, dense, rights, measured, resampler) for scheme in schemes]
    task_of = np.array([item.task for item in items if item.measure == "accuracy"])
    tasks = list(dict.fromkeys(task_of.tolist()))
    rows = [
        [
            *(scheme, method, shown(one.both, 1), shown(one.lost, 1), shown(one.gained, 1)),
            *(f"{100 * np.mean((dense != rights[scheme, method])[task_of == task]):.1f}" for task in tasks),
        ]
        for (scheme, method), one in measured.items()
    ]
    marks: list[Mark] = [
        mark
        for (scheme, method), one in measured.items()
        for direction, part in (("right to wrong", one.lost), ("wrong to right", one.gained))
        for mark in as_mark(f"{method} {scheme}", direction, part)
    ]
    heads = (
        "bits",
        "method",
        "flips %",
        "right to wrong %",
        "wrong to right %",
        *(f"{task} flips %" for task in tasks),
    )
    table = Table(f"Answers that flipped, of {len(dense)}; 95% intervals over items", heads, rows)
    return Result(NAME, TITLE, claims, [table], differs, Picture(TITLE, "% of answers", marks, bars=True), settings)


def _claim(
    scheme: str, dense: Column, rights: Mapping[Key, Column], measured: Mapping[Key, Flips], resampler: Resampler
) -> Claim:
    says = f"OnPTQ flips fewer answers than every compared method in {scheme}"
    paper = "so in all three settings of the figure, whose numbers the text does not give"
    ours = (scheme, tables.OURS)
    others = {key: measured[key].both.value or 0.0 for key in rights if key[0] == scheme and key != ours}
    if ours not in rights or not others:
        return Claim(says, paper, f"no answers of {tables.OURS} and another method in {scheme}", "not measured")
    best = min(others, key=lambda key: others[key])
    less = change(dense, rights[best], rights[ours], resampler)
    here = f"{shown(measured[ours].both, 1)}%; {shown(less, 2, True)} points from {best[1]}"
    return Claim(says, paper, here, below(less))
