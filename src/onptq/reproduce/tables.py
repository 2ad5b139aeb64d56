"""Tables of methods by schemes, as Tables 1 and 2 of the paper have them, ours beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onptq.evaluate.candidates import DENSE, MethodCandidate
from onptq.evaluate.metrics import AVERAGE
from onptq.evaluate.statistics import Interval
from onptq.reproduce.compared import Compared
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.record import Cell, Claim, Table, above, negative, shown

METHODS = {
    "RTN": "rtn",
    "AWQ": "awq",
    "SmoothQuant": "smoothquant",
    "MBQ": "mbq",
    "QIG": "qig",
    "MASQuant": "masquant",
    "OnPTQ": "onptq",
}
OURS = "OnPTQ"


def candidates(experiment: Experiment, schemes: Sequence[str]) -> list[MethodCandidate]:
    """Every method in every scheme; OnPTQ by the paper's recipe from the init."""
    return [
        experiment.cycle(name, scheme) if method == OURS else experiment.base(name, scheme)
        for scheme in schemes
        for method, name in METHODS.items()
    ]


def name_of(method: str, scheme: str) -> str:
    return f"{METHODS[method]}:{scheme}"


def methods(compared: Compared, scheme: str) -> list[str]:
    """The methods that were compared in a scheme, in the paper's order."""
    return [method for method in METHODS if name_of(method, scheme) in compared]


def table(compared: Compared, schemes: Sequence[str], measures: Sequence[str]) -> Table:
    """Our rows in the paper's layout: the dense model, then every scheme's methods, the best of a scheme in bold.

    Behind them is how far each is from the dense model, on prompts where there are any, else in its answers.
    """
    labels = compared.report.labels
    apart = {"mismatch": "changed decisions %", "kl": "KL"}
    if not compared.report.prompts and compared.given:
        apart = {"flips": "flips %", "changed": "answers changed %"}
    heads = ["method", "bits", *(labels[one].name for one in measures), *apart.values()]
    columns = [*measures, *apart]
    rows: list[list[Cell]] = [["Dense", "FP16", *(_cell(compared.figure(DENSE, one), one) for one in measures), "", ""]]
    best: set[tuple[int, int]] = set()
    for scheme in schemes:
        first = len(rows)
        figures = {
            method: [compared.figure(name_of(method, scheme), one) for one in columns]
            for method in methods(compared, scheme)
        }
        for method, of in figures.items():
            rows.append([method, scheme, *(_cell(one, name) for one, name in zip(of, columns, strict=True))])
        for place, column in enumerate(columns):
            sign = -1 if labels[column].less_is_better else 1
            values = [of[place].value for of in figures.values()]
            top = max((sign * value for value in values if value is not None), default=None)
            best |= {
                (first + row, place + 2)
                for row, value in enumerate(values)
                if value is not None and sign * value == top
            }
    title = "Here: percent; 95% intervals of the differences are in the report of the comparison"
    return Table(title, heads, rows, frozenset(best))


def _cell(interval: Interval, column: str) -> str:
    if interval.value is None:
        return "-"
    return f"{interval.value:.4f}" if column == "kl" else f"{interval.value:.1f}"


def paper_table(there: Mapping[str, Any]) -> Table:
    """The paper's own rows."""
    heads = ["method", "bits", *(f"{model}: {column}" for model in there["models"] for column in there["columns"])]
    rows = [
        [row["method"], row["scheme"], *(value for model in there["models"] for value in row[model])]
        for row in there["rows"]
    ]
    best: set[tuple[int, int]] = set()
    for scheme in dict.fromkeys(row["scheme"] for row in there["rows"] if row["method"] != "Dense"):
        of_scheme = [place for place, row in enumerate(rows) if row[1] == scheme]
        for column in range(2, len(heads)):
            choose = min if heads[column].endswith("WER") else max
            top = choose(rows[place][column] for place in of_scheme)
            best |= {(place, column) for place in of_scheme if rows[place][column] == top}
    return Table("The paper", heads, rows, frozenset(best))


def lead(compared: Compared, scheme: str, measure: str) -> tuple[str, Interval]:
    """The best other method of a scheme by a measure, and how much better than it OnPTQ is."""
    sign = -1 if compared.report.labels[measure].less_is_better else 1
    others = [method for method in methods(compared, scheme) if method != OURS]
    values = {method: compared.figure(name_of(method, scheme), measure).value for method in others}
    known = {method: sign * value for method, value in values.items() if value is not None}
    if not known:
        return "-", Interval(None)
    best = max(known, key=lambda method: known[method])
    change = compared.difference(name_of(best, scheme), name_of(OURS, scheme), measure)
    return best, change if sign == 1 else negative(change)


def lead_claim(compared: Compared, scheme: str, measure: str, says: str, paper: str, called: str = "") -> Claim:
    """A claim that OnPTQ is the best of a scheme, by its paired difference from the best other method.

    `called` names the measure where its own name says too little.
    """
    if OURS not in methods(compared, scheme):
        return Claim(says, paper, f"no answers of {OURS} in {scheme}", "not measured")
    best, ahead = lead(compared, scheme, measure)
    ours = compared.figure(name_of(OURS, scheme), measure)
    label = compared.report.labels[measure]
    here = f"{called or label.name} {shown(ours, 1)}; better than {best} by {shown(ahead, 2, True)}"
    return Claim(says, paper, here, above(ahead))


def average_of(compared: Compared) -> list[str]:
    """The tasks and their average, as far as they are measured."""
    scored = compared.model(DENSE).scores
    tasks = list(scored.tasks) if scored is not None else []
    return [*tasks, *([AVERAGE] if AVERAGE in compared.report.labels else [])]
