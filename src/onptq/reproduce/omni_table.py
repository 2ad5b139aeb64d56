"""Table 2: every method in two schemes on a model that also hears."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.errors import OnPTQError
from onptq.evaluate.metrics import AVERAGE
from onptq.reproduce import tables
from onptq.reproduce.common import differing_setup
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.record import Picture, Result, as_mark

NAME, TITLE = "omni-table", "Omni-modal models (Table 2)"
SCHEMES = ("W4A8", "W4A6")


def run(experiment: Experiment) -> Result:
    experiment = experiment.of_model(experiment.settings.omni)
    if "audio" not in experiment.source.family.modalities:
        raise OnPTQError(f"{experiment.settings.model} hears nothing; expected --omni with a model that does")
    schemes = SCHEMES if experiment.settings.scheme is None else (experiment.settings.scheme,)
    compared = experiment.compare(f"methods-{'-'.join(schemes)}", tables.candidates(experiment, schemes), schemes[0])
    there, labels = paper(NAME), compared.report.labels
    measures = tables.average_of(compared)
    spoken = [one for one in measures if one != AVERAGE and labels[one].less_is_better]
    claims = []
    for scheme in schemes:
        of_paper = "; ".join(_paper(there, scheme, column) for column in there["columns"] if column.endswith("WER"))
        for task in spoken:
            says = f"OnPTQ has the lowest word error rate of all methods in {scheme}"
            claims.append(tables.lead_claim(compared, scheme, task, says, of_paper))
        if scheme == "W4A6":
            says = f"OnPTQ has the highest accuracy on pictures in {scheme}"
            claims.append(tables.lead_claim(compared, scheme, compared.measure, says, _paper(there, scheme, "MMMU")))
    marks = [
        mark
        for scheme in schemes
        for method in tables.METHODS
        for mark in as_mark(method, scheme, compared.figure(tables.name_of(method, scheme), compared.measure))
    ]
    settings = experiment.settings.describe()
    differs = [
        *differing_setup(settings, "Qwen2.5-Omni-3B and 7B", "LibriSpeech, WenetSpeech, MMMU and OmniBench"),
        "Tasks: those embedded for the model, spoken by a synthetic voice; accuracy is the average of those without "
        "word errors.",
        "Nothing here stands for OmniBench, on which the paper leads in three of its four settings.",
    ]
    found = [tables.table(compared, schemes, measures), tables.paper_table(there)]
    label = labels[compared.measure].name
    return Result(NAME, TITLE, claims, found, differs, Picture(TITLE, label, marks), settings)


def _paper(there: Mapping[str, Any], scheme: str, column: str) -> str:
    """Both models' numbers of OnPTQ and of the best other method."""
    place, parts = there["columns"].index(column), []
    choose = min if column.endswith("WER") else max
    for model in there["models"]:
        rows = {row["method"]: row[model][place] for row in there["rows"] if row["scheme"] == scheme}
        if tables.OURS in rows:
            ours = rows.pop(tables.OURS)
            best = choose(rows, key=lambda method: rows[method])
            parts.append(f"{model} {column}: {ours} against {rows[best]} ({best})")
    return "; ".join(parts) or "not in the paper"
