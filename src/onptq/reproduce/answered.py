"""Answers to the real benchmarks that are there already, the logs of `onptq eval`, as a comparison in the paper's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError, did_you_mean
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.sample_logs import Log, Question, paired_arms, read_arm
from onptq.evaluate.statistics import Resampler
from onptq.evaluate.summary import Results, summarize
from onptq.harness.benchmarks import BENCHMARKS
from onptq.reproduce.compared import Compared
from onptq.reproduce.settings import Settings
from onptq.reproduce.tables import METHODS, name_of
from onptq.schemes import Scheme

# The paper's columns, as benchmarks of `onptq eval`.
COLUMNS = {
    "MMMU": "mmmu",
    "OCRBench": "ocrbench",
    "VizWiz": "vizwiz",
    "ScienceQA": "scienceqa",
    "TextVQA": "textvqa",
    "LibriSpeech": "librispeech",
    "WenetSpeech": "wenetspeech",
    "OmniBench": "omnibench",
}
EXPECTED = "expected dense=FOLDER, or METHOD:SCHEME=FOLDER with one of"


@dataclass(frozen=True)
class Answered:
    """A comparison by answers that were given: the items by column, and which tasks of the logs they are."""

    compared: Compared
    questions: Sequence[Question]
    schemes: Sequence[str]
    columns: Mapping[str, Sequence[str]]  # the tasks of each column that all arms have
    left_out: Sequence[str]  # tasks of the logs that are in no column of the paper
    wanted: Sequence[str]  # the paper's columns

    def settings(self, given: Settings) -> dict[str, Any]:
        """What decides the numbers, for the page and its JSON."""
        return {"answers": [f"{name}={folder}" for name, folder in given.answers], "items": len(self.questions)}

    def differs(self, models: str) -> list[str]:
        """What differs from the paper where answers are given."""
        counts = {name: sum(one.task == name for one in self.questions) for name in self.columns}
        columns = "; ".join(
            f"{name}: {counts[name]} items of {', '.join(tasks)}" for name, tasks in self.columns.items()
        )
        absent = [name for name in self.wanted if name not in self.columns]
        return [
            f"Answers that were given, of benchmarks as `onptq eval` poses them. {columns}.",
            f"Which model gave them, and how it was calibrated, is not in the logs; the paper's is {models}.",
            *([f"Not answered: {', '.join(absent)}. The average is over the others."] if absent else []),
            *([f"In no column of the paper: {', '.join(self.left_out)}."] if self.left_out else []),
            "docs/benchmarks.md says what is pinned, and in what the metrics are not the paper's.",
        ]


def parse_arm(text: str) -> tuple[str, Path]:
    """The name of an arm, as tables have it, and the folder of its logs."""
    name, given, place = text.partition("=")
    expected = f"{EXPECTED} {', '.join(METHODS)}, e.g. OnPTQ:W4A8=evals/onptq-w4a8"
    if not given or not place:
        raise OnPTQError(f"--answers {text}: {expected}")
    if name == DENSE:
        return name, Path(place)
    method, parted, scheme = name.partition(":")
    known = {one.lower(): one for one in METHODS}
    if not parted or method.lower() not in known:
        raise OnPTQError(f"--answers {text}: unknown method {method!r}{did_you_mean(method, known)}; {expected}")
    return name_of(known[method.lower()], str(Scheme.parse(scheme))), Path(place)


def read_given(settings: Settings, wanted: Sequence[str], schemes: Sequence[str]) -> Answered:
    """The given answers to the benchmarks of the wanted columns; `schemes` is the order of the paper."""
    folders = dict(settings.answers)
    if len(folders) < len(settings.answers):
        raise OnPTQError("--answers names an arm twice; expected one folder for each")
    if DENSE not in folders or len(folders) < 2:
        raise OnPTQError("--answers compares quantized models with the dense one; expected dense=FOLDER and others")
    arms = {name: read_arm(folders[name]) for name in sorted(folders, key=lambda name: name != DENSE)}
    column_of = {task.name: name for name in wanted for task in BENCHMARKS[COLUMNS[name]]}
    left_out = sorted({task for logs in arms.values() for task in logs} - set(column_of))
    arms = {name: _of_columns(logs, column_of, folders[name]) for name, logs in arms.items()}
    items, answers = paired_arms(arms)
    columns = {name: [task for task in arms[DENSE] if column_of[task] == name] for name in wanted}
    questions = [replace(one, task=column_of[one.task]) for one in items]
    given = {name: [replace(one, task=column_of[one.task]) for one in of] for name, of in answers.items()}
    results = {name: Results(of, scheme=name.partition(":")[2] or None) for name, of in given.items()}
    report = summarize(questions, (), results, Resampler(settings.seed), str(folders[DENSE]), "given answers")
    there = list(dict.fromkeys(name.partition(":")[2] for name in given if name != DENSE))
    order = [one for one in schemes if one in there] + [one for one in there if one not in schemes]
    of = {name: tasks for name, tasks in columns.items() if tasks}
    return Answered(Compared(report, Path(settings.out), given), questions, order, of, left_out, wanted)


def _of_columns(logs: Mapping[str, Log], column_of: Mapping[str, str], folder: Path) -> dict[str, Log]:
    """The logs of benchmarks that have a column."""
    chosen = {task: log for task, log in logs.items() if task in column_of}
    if not chosen:
        raise OnPTQError(
            f"{folder} has answers to {', '.join(logs)} alone; expected some of {', '.join(column_of)}, as `onptq eval` "
            "names them"
        )
    return chosen
