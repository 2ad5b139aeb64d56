"""Table 1: every method in four schemes on a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onptq.evaluate.candidates import DENSE
from onptq.reproduce import tables
from onptq.reproduce.answered import read_given
from onptq.reproduce.common import differing_setup
from onptq.reproduce.compared import Compared
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.record import Picture, Result, as_mark

NAME, TITLE = "main-table", "Accuracy across precision settings (Table 1)"
SCHEMES = ("W4A16", "W8A8", "W4A8", "W4A6")
MODELS = "Qwen2.5-VL-7B and Qwen3-VL-8B-Instruct"
PROVENANCE = (
    "The paper's Dense and baseline rows for Qwen2.5-VL-7B are transcribed from the MASQuant paper, OnPTQ's were measured "
    "apart. Those for Qwen3-VL-8B-Instruct are from one pipeline."
)


def compare(experiment: Experiment) -> Compared:
    """The comparison behind this table, which the flip rates are taken from as well."""
    schemes = _schemes(experiment)
    return experiment.compare(f"{NAME}-{'-'.join(schemes)}", tables.candidates(experiment, schemes), schemes[0])


def _schemes(experiment: Experiment) -> tuple[str, ...]:
    return SCHEMES if experiment.settings.scheme is None else (experiment.settings.scheme,)


def run(experiment: Experiment) -> Result:
    settings, differs = experiment.settings.describe(), [PROVENANCE, "AWQ has no row in the paper."]
    if experiment.settings.answers:
        *benchmarks, _ = paper(NAME)["columns"]
        given = read_given(experiment.settings, benchmarks, SCHEMES)
        differs = [*given.differs(MODELS), *differs]
        return result(given.compared, given.schemes, differs, given.settings(experiment.settings))
    differs = [
        *differing_setup(settings, MODELS, "five public benchmarks"),
        "Tasks: those embedded for the model, drawn by us; not MMMU, OCRBench, VizWiz, ScienceQA and TextVQA.",
        *differs,
        "MASQuant here is its merged form, which folds.",
    ]
    return result(compare(experiment), _schemes(experiment), differs, settings)


def result(compared: Compared, schemes: Sequence[str], differs: Sequence[str], settings: Mapping[str, Any]) -> Result:
    there, claims = paper(NAME), []
    for scheme in schemes:
        averages = [
            f"{model}: {ours} against {other} ({method})"
            for model in there["models"]
            for ours, (other, method) in [_averages(there, scheme, model)]
        ]
        says = f"OnPTQ has the highest average of all methods in {scheme}"
        numbers = "; ".join(averages) if scheme in SCHEMES else "not in the paper"
        claims.append(tables.lead_claim(compared, scheme, compared.measure, says, numbers))
    marks = [
        mark
        for scheme in schemes
        for method in tables.methods(compared, scheme)
        for mark in as_mark(method, scheme, compared.figure(tables.name_of(method, scheme), compared.measure))
    ] + as_mark("Dense", "FP16", compared.figure(DENSE, compared.measure))
    label = compared.report.labels[compared.measure].name
    both = [tables.table(compared, schemes, tables.average_of(compared)), tables.paper_table(there)]
    every = [*differs, "The paper claims the lead in six of its eight settings, not in all."]
    return Result(NAME, TITLE, claims, both, every, Picture(TITLE, label, marks), settings)


def _averages(there: Mapping[str, Any], scheme: str, model: str) -> tuple[float, tuple[float, str]]:
    rows = {row["method"]: row[model][-1] for row in there["rows"] if row["scheme"] == scheme}
    if tables.OURS not in rows:
        return float("nan"), (float("nan"), "-")
    ours = rows.pop(tables.OURS)
    best = max(rows, key=lambda method: rows[method])
    return ours, (rows[best], best)
