"""Table 8: one hyper-parameter at a time."""

from __future__ import annotations

from typing import Any

from onptq.reproduce.common import differing_setup
from onptq.reproduce.compared import Compared
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.record import Cell, Claim, Picture, Result, Table, above, all_of, as_mark, shown, within

NAME, TITLE, SCHEME = "hyperparameters", "One hyper-parameter at a time (Table 8)", "W4A6"
MAIN, BUDGET = "onptq", "select.budget"


def run(experiment: Experiment) -> Result:
    scheme, there = experiment.settings.scheme or SCHEME, paper(NAME)
    candidates = [experiment.cycle(MAIN, scheme)]
    for group in there["groups"]:
        for value in group["settings"]:
            here = experiment.settings.scale.budget(value) if group["field"] == BUDGET else value
            candidates.append(experiment.cycle(f"{group['name']} {value:g}", scheme, {group["field"]: here}))
    compared = experiment.compare(f"hyperparameters-{scheme}", candidates, scheme)
    return result(compared, scheme, there, experiment.settings.describe())


def result(compared: Compared, scheme: str, there: dict[str, Any], settings: dict[str, Any]) -> Result:
    main, of_main = f"{MAIN}:{scheme}", there["main"]
    label = compared.report.labels[compared.measure].name
    claims, rows, marks, moved = [], [], [], []
    for group in there["groups"]:
        gains = {}
        for value in sorted((*group["settings"], group["main"])):
            name = main if value == group["main"] else f"{group['name']} {value:g}:{scheme}"
            figure, of_paper = compared.figure(name, compared.measure), group["settings"].get(value, of_main)
            cells: list[Cell] = [f"{group['name']} = {value:g}", *of_paper, shown(figure, 2)]
            if name != main:
                gains[value] = compared.gain(name, main)
            cells.append(shown(gains[value], 2, True) if value in gains else "main setting")
            cells += [shown(compared.figure(name, measure), digits) for measure, digits in (("mismatch", 1), ("kl", 4))]
            rows.append(cells)
            marks += as_mark(f"{group['name']} = {value:g}", group["name"], figure)
        best = ", ".join(f"{value:g}: {pair[0]} and {pair[1]}" for value, pair in group["settings"].items())
        changes = ", ".join(f"{shown(gain, 2, True)} over {value:g}" for value, gain in gains.items())
        claims.append(
            Claim(
                f"{group['name']} = {group['main']:g} is the best of its settings",
                f"{of_main[0]} and {of_main[1]}; {best}",
                f"better by {changes}",
                all_of([above(gain) for gain in gains.values()]),
            )
        )
        moved += list(gains.values())
    bound = max(there["within"])
    widest = max(moved, key=lambda gain: abs(gain.value or 0.0))
    claims.append(
        Claim(
            f"Sensitivity is moderate: every setting is within {bound} points of the main one",
            f"within {there['within'][0]} and {there['within'][1]} points",
            f"the farthest is {shown(widest, 2, True)} ({label})",
            all_of([within(gain, bound) for gain in moved]),
        )
    )
    differs = [
        *differing_setup(settings, "Qwen3-VL-8B-Instruct", "MMMU and ScienceQA"),
        f"Judged by: {label}, paired by item or prompt.",
        f"K_c is in proportion to the prompts: the paper's 256 are {settings['calibration prompts'] * 2} here.",
        "The table has 15 rows, of which five are the main setting: eleven different runs.",
    ]
    heads = ("setting", "MMMU, paper", "ScienceQA, paper", f"{label} here", "main setting is better by")
    table = Table("One field changes at a time", (*heads, "changed decisions %", "KL"), rows)
    return Result(NAME, TITLE, claims, [table], differs, Picture(TITLE, label, marks), settings)
