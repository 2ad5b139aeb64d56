"""Figure 4: answers whose correctness differs from the dense model's, both directions apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onptq.errors import OnPTQError
from onptq.evaluate.answers import Answer
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.metrics import judged
from onptq.evaluate.statistics import Column, Interval, Measure, Part, Resampler, differing
from onptq.evaluate.store import ANSWERS
from onptq.evaluate.tasks import Item
from onptq.reproduce import main_table, tables
from onptq.reproduce.common import differing_setup
from onptq.reproduce.experiment import Compared, Experiment
from onptq.reproduce.record import Claim, Mark, Picture, Result, Table, as_mark, below, guarded, shown

NAME, TITLE = "flip-rate", "Flips of correctness against the dense model (Figure 4)"
SCHEMES = ("W8A8", "W4A8", "W4A6")


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


def _share(found: Column) -> Measure:
    return Measure((Part("items", found.astype(np.float64), np.ones(len(found))),), 100)


def run(experiment: Experiment) -> Result:
    schemes = SCHEMES if experiment.settings.scheme is None else (experiment.settings.scheme,)
    compared, items = main_table.compare(experiment), experiment.items()
    if not any(item.measure == "accuracy" for item in items):
        raise OnPTQError(f"{experiment.settings.model} has no tasks whose answers are right or wrong")
    dense = judged(items, _answers(compared, DENSE))
    rights = {
        (scheme, method): judged(items, _answers(compared, tables.name_of(method, scheme)))
        for scheme in schemes
        for method in tables.METHODS
    }
    return result(dense, rights, items, experiment)


def _answers(compared: Compared, name: str) -> list[Answer]:
    from onptq.evaluate.answers import read_answers

    return read_answers(compared.file(name, ANSWERS))[name]


def result(
    dense: Column, rights: Mapping[tuple[str, str], Column], items: Sequence[Item], experiment: Experiment
) -> Result:
    resampler = Resampler(experiment.settings.seed)
    found = {key: flips(dense, right, resampler) for key, right in rights.items()}
    claims = []
    for scheme in dict.fromkeys(scheme for scheme, _ in rights):
        others = {method: found[scheme, method].both.value or 0.0 for _, method in rights if method != tables.OURS}
        best = min(others, key=lambda method: others[method])
        less = change(dense, rights[scheme, best], rights[scheme, tables.OURS], resampler)
        claims.append(
            Claim(
                f"OnPTQ flips fewer answers than every compared method in {scheme}",
                "so in all three settings of the figure, whose numbers the text does not give",
                f"{shown(found[scheme, tables.OURS].both, 1)}%; {shown(less, 2, True)} points from {best}",
                below(less),
            )
        )
    rows = [
        [scheme, method, shown(one.both, 1), shown(one.lost, 1), shown(one.gained, 1)]
        for (scheme, method), one in found.items()
    ]
    marks: list[Mark] = [
        mark
        for (scheme, method), one in found.items()
        for direction, part in (("right to wrong", one.lost), ("wrong to right", one.gained))
        for mark in as_mark(f"{method} {scheme}", direction, part)
    ]
    settings = experiment.settings.describe()
    differs = [
        *differing_setup(settings, "Qwen3-VL-8B-Instruct", "900 items of MMMU and 2,017 of ScienceQA-IMG"),
        f"{len(dense)} items of the embedded tasks whose answers are right or wrong.",
        "The paper's text does not name the three settings of its figure; here they are those with quantized activations. "
        "With several seeds these are the flips of the first.",
    ]
    heads = ("bits", "method", "flips %", "right to wrong %", "wrong to right %")
    table = Table("Answers that flipped, 95% intervals over items", heads, rows)
    return Result(NAME, TITLE, claims, [table], differs, Picture(TITLE, "% of answers", marks, bars=True), settings)
