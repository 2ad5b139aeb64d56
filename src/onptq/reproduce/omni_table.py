"""Table 2: every method in two schemes on a model that also hears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onptq.errors import OnPTQError
from onptq.evaluate.metrics import AVERAGE
from onptq.reproduce import tables
from onptq.reproduce.answered import read_given
from onptq.reproduce.common import differing_setup
from onptq.reproduce.compared import Compared
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.record import Claim, Picture, Result, as_mark

NAME, TITLE = "omni-table", "Omni-modal models (Table 2)"
SCHEMES = ("W4A8", "W4A6")
MODELS = "Qwen2.5-Omni-3B and 7B"
HEARD = "listen"  # the embedded task with a spoken question about an image, as OmniBench has them
SEEN = "MMMU"  # on which the paper claims a lead in W4A6 alone
LOWEST, LEADING = "the lowest word error rate", "the highest accuracy on OmniBench (three of the paper's four settings)"
CALIBRATED = "OmniBench 0 to 127 for Qwen2.5-Omni-7B (for 3B it does not say)"


@dataclass(frozen=True)
class Judge:
    """What stands for columns of the paper: a measure, and the comparison that has it."""

    columns: Sequence[str]  # of the paper
    leads: str  # what the paper says that OnPTQ has
    compared: Compared
    measure: str
    called: str = ""  # in claims, where the measure's own name says too little


def run(experiment: Experiment) -> Result:
    if experiment.settings.answers:
        return _of_answers(experiment)
    experiment = experiment.of_model(experiment.settings.omni)
    if "audio" not in experiment.source.family.modalities:
        raise OnPTQError(f"{experiment.settings.model} hears nothing; expected --omni with a model that does")
    schemes = SCHEMES if experiment.settings.scheme is None else (experiment.settings.scheme,)
    compared = experiment.compare(f"{NAME}-{'-'.join(schemes)}", tables.candidates(experiment, schemes), schemes[0])
    pictures = [item for item in experiment.items() if item.prompt.images and not item.prompt.audios]
    spoken = [one for one in tables.average_of(compared) if compared.report.labels[one].less_is_better]
    judges = [Judge(("LibriSpeech WER", "WenetSpeech WER"), LOWEST, compared, task) for task in spoken]
    if pictures:
        seen = compared.among(pictures)
        judges.append(
            Judge((SEEN,), "the highest accuracy on pictures", seen, AVERAGE, "average of tasks with pictures")
        )
    if HEARD in compared.report.labels:
        judges.append(Judge(("OmniBench",), LEADING, compared, HEARD))
    settings = experiment.settings.describe()
    data = "LibriSpeech, WenetSpeech, MMMU and OmniBench"
    differs = [
        *differing_setup(settings, MODELS, data, calibrated=CALIBRATED),
        "Calibration prompts here ask for captions of drawn images, without speech.",
        f"Tasks: those embedded for the model, spoken by a synthetic voice. `speech` stands for LibriSpeech and "
        f"WenetSpeech, the average of {', '.join(dict.fromkeys(item.task for item in pictures))} for MMMU, and "
        f"`{HEARD}`, spoken questions about an image, for OmniBench.",
        "MASQuant here is its merged form, which folds.",
    ]
    return result(compared, judges, schemes, differs, settings)


def _of_answers(experiment: Experiment) -> Result:
    columns = {column.removesuffix(" WER"): column for column in paper(NAME)["columns"]}
    given = read_given(experiment.settings, list(columns), SCHEMES)
    leads = {name: f"{LOWEST} on {name}" for name in columns}
    leads |= {SEEN: f"the highest accuracy on {SEEN}", "OmniBench": LEADING}
    judges = [Judge((columns[name],), leads[name], given.compared, name) for name in given.columns]
    differs = [*given.differs(MODELS), "The paper has no average and no row of AWQ."]
    return result(given.compared, judges, given.schemes, differs, given.settings(experiment.settings))


def result(
    compared: Compared,
    judges: Sequence[Judge],
    schemes: Sequence[str],
    differs: Sequence[str],
    settings: Mapping[str, Any],
) -> Result:
    there = paper(NAME)
    claims = [claim for scheme in schemes for claim in _claims(judges, scheme, there)]
    marks = [
        mark
        for scheme in schemes
        for method in tables.methods(compared, scheme)
        for mark in as_mark(method, scheme, compared.figure(tables.name_of(method, scheme), compared.measure))
    ]
    both = [tables.table(compared, schemes, tables.average_of(compared)), tables.paper_table(there)]
    label = compared.report.labels[compared.measure].name
    return Result(NAME, TITLE, claims, both, differs, Picture(TITLE, label, marks), settings)


def _claims(judges: Sequence[Judge], scheme: str, there: Mapping[str, Any]) -> list[Claim]:
    """The lowest word error rates, in W4A6 the highest accuracy on pictures, and the lead on OmniBench."""
    claims = []
    for judge in judges:
        if SEEN in judge.columns and scheme != "W4A6":
            continue
        says = f"OnPTQ has {judge.leads} in {scheme}"
        numbers = "; ".join(_paper(there, scheme, column) for column in judge.columns)
        claims.append(tables.lead_claim(judge.compared, scheme, judge.measure, says, numbers, judge.called))
    return claims


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
