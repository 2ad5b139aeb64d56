"""Table 4: the method with one design choice changed at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.reproduce.common import differing_setup
from onptq.reproduce.compared import Compared
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.record import Cell, Claim, Picture, Result, Table, above, as_mark, shown

NAME, TITLE, SCHEME = "ablations", "Core ablations (Table 4)", "W4A6"
FULL = "onptq"


def compare(experiment: Experiment, scheme: str, changes: Mapping[str, Mapping[str, Any]]) -> Compared:
    """The full method beside itself with other fields, a candidate for every name."""
    candidates = [experiment.cycle(FULL, scheme)]
    candidates += [experiment.cycle(name, scheme, fields) for name, fields in changes.items()]
    return experiment.compare(f"ablations-{scheme}", candidates, scheme)


def run(experiment: Experiment) -> Result:
    scheme, there = experiment.settings.scheme or SCHEME, paper(NAME)
    compared = compare(experiment, scheme, {row["name"]: row["changes"] for row in there["rows"]})
    return result(compared, scheme, there, experiment.settings.describe())


def result(compared: Compared, scheme: str, there: dict[str, Any], settings: dict[str, Any]) -> Result:
    full, main = f"{FULL}:{scheme}", there["full"]["paper"]
    claims, rows, marks = [], [], []
    label = compared.report.labels[compared.measure].name
    for row in [*there["rows"], there["full"]]:
        name = f"{row['name']}:{scheme}"
        figure = compared.figure(name, compared.measure)
        gain = compared.gain(name, full)
        of_paper = [main[place] - row["paper"][place] for place in range(2)]
        cells: list[Cell] = [row.get("group", ""), row["name"], *row["paper"], shown(figure, 2)]
        cells += ["" if name == full else shown(gain, 2, True)]
        cells += [shown(compared.figure(name, measure), digits) for measure, digits in (("mismatch", 1), ("kl", 4))]
        rows.append(cells)
        marks += as_mark(row["name"], row.get("group", "full method"), figure)
        if name != full:
            claims.append(
                Claim(
                    f"The full method is better than: {row['name']}",
                    f"by {of_paper[0]:.1f} on MMMU, {of_paper[1]:.1f} on ScienceQA",
                    f"by {shown(gain, 2, True)} ({label})",
                    above(gain),
                )
            )
    differs = [
        *differing_setup(settings, "Qwen3-VL-8B-Instruct", "MMMU and ScienceQA"),
        f"Judged by: {label}, paired by item or prompt.",
        "All on-policy states have equal weights here; the paper does not say which weights they have there.",
        "KL is that of D from Q.",
    ]
    heads = ("", "setting", "MMMU, paper", "ScienceQA, paper", f"{label} here", "full method is better by")
    table = Table("One change at a time", (*heads, "changed decisions %", "KL"), rows)
    return Result(NAME, TITLE, claims, [table], differs, Picture(TITLE, label, marks), settings)
