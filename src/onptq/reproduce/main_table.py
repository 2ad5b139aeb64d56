"""Table 1: every method in four schemes on a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.evaluate.candidates import DENSE
from onptq.reproduce import tables
from onptq.reproduce.common import differing_setup
from onptq.reproduce.experiment import Compared, Experiment
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.record import Picture, Result, as_mark

NAME, TITLE = "main-table", "Accuracy across precision settings (Table 1)"
SCHEMES = ("W4A16", "W8A8", "W4A8", "W4A6")


def compare(experiment: Experiment) -> Compared:
    """The comparison behind this table, which the flip rates are taken from as well."""
    schemes = _schemes(experiment)
    return experiment.compare(f"methods-{'-'.join(schemes)}", tables.candidates(experiment, schemes), schemes[0])


def _schemes(experiment: Experiment) -> tuple[str, ...]:
    return SCHEMES if experiment.settings.scheme is None else (experiment.settings.scheme,)


def run(experiment: Experiment) -> Result:
    compared, there, schemes = compare(experiment), paper(NAME), _schemes(experiment)
    claims = []
    for scheme in schemes:
        averages = [
            f"{model}: {ours} against {other} ({method})"
            for model in there["models"]
            for ours, (other, method) in [_averages(there, scheme, model)]
        ]
        says = f"OnPTQ has the highest average of all methods in {scheme}"
        claims.append(
            tables.lead_claim(compared, scheme, compared.measure, says, "; ".join(averages) or "not in the paper")
        )
    marks = [
        mark
        for scheme in schemes
        for method in tables.METHODS
        for mark in as_mark(method, scheme, compared.figure(tables.name_of(method, scheme), compared.measure))
    ] + as_mark("Dense", "FP16", compared.figure(DENSE, compared.measure))
    label = compared.report.labels[compared.measure].name
    differs = [
        *differing_setup(
            experiment.settings.describe(), "Qwen2.5-VL-7B and Qwen3-VL-8B-Instruct", "five public benchmarks"
        ),
        "Tasks: those embedded for the model, drawn by us; not MMMU, OCRBench, VizWiz, ScienceQA and TextVQA.",
        "The paper claims the lead in six of its eight settings, not in all. AWQ has no row there. "
        "MASQuant here is its merged form, which folds.",
    ]
    found = [tables.table(compared, schemes, tables.average_of(compared)), tables.paper_table(there)]
    return Result(NAME, TITLE, claims, found, differs, Picture(TITLE, label, marks), experiment.settings.describe())


def _averages(there: Mapping[str, Any], scheme: str, model: str) -> tuple[float, tuple[float, str]]:
    rows = {row["method"]: row[model][-1] for row in there["rows"] if row["scheme"] == scheme}
    if tables.OURS not in rows:
        return float("nan"), (float("nan"), "-")
    ours = rows.pop(tables.OURS)
    best = max(rows, key=lambda method: rows[method])
    return ours, (rows[best], best)
