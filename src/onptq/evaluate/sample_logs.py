"""Per-sample logs of lmms-eval and lm-evaluation-harness as answers to items, whoever made them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onptq.data.chat import kind_of
from onptq.data.manifest import records
from onptq.errors import OnPTQError
from onptq.evaluate.answers import Answer
from onptq.evaluate.tasks import Grade, Scoring
from onptq.harness.logs import task_of

# Fields of a log that are no metric.
FIELDS = {
    *("doc_id", "doc", "target", "arguments", "input", "input_media", "resps", "filtered_resps", "filter", "metrics"),
    *("token_counts", "doc_hash", "prompt_hash", "target_hash", "submission", "per_sample_scores"),
}
ERROR_RATES = ("wer", "cer", "mer", "ter")  # less is better
PERCENT = ("mer",)  # lmms-eval logs it as a percentage
EXPECTED = "expected a log of lmms-eval or lm-evaluation-harness, written with --log_samples"


@dataclass(frozen=True)
class Sample:
    """One line of a log."""

    number: str  # of the item in its task
    question: str  # and the expected answer: what two arms must share
    text: str
    grade: Grade


@dataclass(frozen=True)
class Question:
    """An item that was answered elsewhere."""

    id: str
    task: str
    measure: Scoring


@dataclass(frozen=True)
class Log:
    """One arm's answers to one task."""

    task: str
    file: Path
    metric: str
    samples: Mapping[str, Sample]


def read_arm(place: Path, metric: str | None = None) -> dict[str, Log]:
    """The logs of one arm by task: a file, or a folder with one log or more, of each task the newest."""
    if not place.is_dir():
        return {task_of(place): read_log(place, metric)}
    files = {task_of(file): file for file in sorted(place.rglob("*.jsonl"), key=lambda file: file.stat().st_mtime_ns)}
    if not files:
        raise OnPTQError(f"{place} has no .jsonl; {EXPECTED}")
    return {task: read_log(file, metric) for task, file in sorted(files.items())}


def read_log(file: Path, metric: str | None = None) -> Log:
    """A log with one of its metrics: the one that is named, or the first that says something about every item."""
    lines = [(place, _line(file, place, raw)) for place, raw in records(file)]
    first = lines[0][1].get("filter") if lines else None
    lines = [(place, line) for place, line in lines if line.get("filter") == first]  # others repeat the items
    if not lines:
        raise OnPTQError(f"{file} has no samples; {EXPECTED}")
    name = _metric(file, [line for _, line in lines], metric)
    samples: dict[str, Sample] = {}
    for place, line in lines:
        number, grade = str(line["doc_id"]), _grade(line, name)
        assert grade is not None
        if number in samples:
            raise OnPTQError(f"{file} {place}: item {number} is there already; expected one line for each")
        samples[number] = Sample(number, _question(line), _answer(line), grade)
    return Log(task_of(file), file, name, samples)


def paired_arms(arms: Mapping[str, Mapping[str, Log]]) -> tuple[list[Question], dict[str, list[Answer]]]:
    """The items that all arms answered, and each arm's answers. Raises where arms have other items, or other questions."""
    names = list(arms)
    if all(len(logs) == 1 for logs in arms.values()):  # single files: the first one's name counts
        task = next(iter(arms[names[0]]))
        arms = {name: {task: next(iter(logs.values()))} for name, logs in arms.items()}
    first = arms[names[0]]
    for name in names[1:]:
        if apart := sorted(set(first) ^ set(arms[name])):
            raise OnPTQError(f"{names[0]} and {name} have other tasks: {', '.join(apart)} in one alone")
    questions: list[Question] = []
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    for task in first:
        logs = {name: arms[name][task] for name in names}
        _check_same(logs)
        measure = _measure(list(logs.values()))
        for number in first[task].samples:
            identity = f"{task}/{number}"
            questions.append(Question(identity, task, measure))
            for name, log in logs.items():
                one = log.samples[number]
                answers[name].append(Answer(identity, task, one.text, one.grade.points, one.grade.total))
    return questions, answers


def changed_answers(answers: Mapping[str, Sequence[Answer]]) -> Iterator[dict[str, Any]]:
    """A record for each answer that differs from the first arm's in text or points."""
    (dense, *_), others = list(answers), list(answers)[1:]
    for name in others:
        for before, after in zip(answers[dense], answers[name], strict=True):
            if (before.text, before.points) != (after.text, after.points):
                yield {
                    "arm": name,
                    "task": before.task,
                    "item": before.item,
                    "dense": before.text,
                    "answer": after.text,
                    "dense_points": before.points,
                    "points": after.points,
                    "total": after.total,
                }


def _line(file: Path, place: str, raw: bytes | dict[str, Any]) -> dict[str, Any]:
    """The record as it is: unlike a manifest's, its nulls mean something."""
    try:
        line = json.loads(raw) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError) as error:
        raise OnPTQError(f"{file} {place} is not usable JSON ({str(error)[:80]}); {EXPECTED}") from None
    if not isinstance(line, dict) or "doc_id" not in line:
        what = "a record without `doc_id`" if isinstance(line, dict) else kind_of(line)
        raise OnPTQError(f"{file} {place} is {what}; {EXPECTED}")
    return line


def _metric(file: Path, lines: Sequence[Mapping[str, Any]], wanted: str | None) -> str:
    """The metric that is graded."""
    given = lines[0].get("metrics")
    listed = [name for name in given if isinstance(name, str)] if isinstance(given, list) else None
    names = listed if listed is not None else [name for name in lines[0] if name not in FIELDS]
    names = sorted(names, key=lambda name: name != "word_errors")  # what `onptq eval` counts exactly
    usable = [name for name in names if all(_grade(line, name) is not None for line in lines)]
    if wanted is not None and wanted not in usable:
        raise OnPTQError(
            f"--metric {wanted}: {file} has no such grade of every item; it has {', '.join(usable) or 'none'}"
        )
    if not usable:
        raise OnPTQError(f"{file} grades no item: of {', '.join(map(str, names)) or 'no metric'}; {EXPECTED}")
    return wanted or usable[0]


def _grade(line: Mapping[str, Any], name: str) -> Grade | None:
    """What a metric says about one item; None where that is nothing that can be summed over items."""
    try:
        return _graded(line.get(name), name)
    except (LookupError, TypeError, ValueError, OverflowError):  # a mapping that only looks like one of these
        return None


def _graded(value: Any, name: str) -> Grade | None:
    if isinstance(value, bool | int | float):
        points = float(value) / (100 if name in PERCENT else 1)
        within = points >= 0 and (points <= 1 or name in ERROR_RATES)
        return Grade(points) if within else None
    if not isinstance(value, dict):
        return None
    if "points" in value and "total" in value:  # word errors
        return Grade(float(value["points"]), float(value["total"]))
    if "parsed_pred" in value:  # MMMU
        return Grade(float(_mmmu_right(value)))
    for key in ("score", "overall"):  # OCRBench, OmniBench
        if isinstance(value.get(key), bool | int | float) and 0 <= value[key] <= 1:
            return Grade(float(value[key]))
    if isinstance(value.get("gt"), str) and isinstance(value.get("pred"), str):  # LibriSpeech
        return _word_errors(value["gt"], value["pred"])
    return None


def _mmmu_right(value: Mapping[str, Any]) -> bool:
    """Whether MMMU counts a parsed prediction: the same letter, or for open questions an answer within a candidate."""
    gold = value["answer"] if isinstance(value["answer"], list) else [value["answer"]]
    if value.get("question_type") == "multiple-choice":
        return any(prediction in gold for prediction in value["parsed_pred"])
    expected = [form for answer in gold for form in _mmmu_forms(str(answer))]
    return any(
        any(form in candidate if isinstance(form, str) else False for form in expected)
        if isinstance(candidate, str)
        else candidate in expected
        for candidates in value["parsed_pred"]
        for candidate in (candidates if isinstance(candidates, list) else [candidates])
    )


def _mmmu_forms(answer: str) -> list[str | float]:
    """An expected answer as MMMU compares it: a rounded number, or lower case, with a blank beside a single letter."""
    text = answer.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
    return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def _word_errors(spoken: str, heard: str) -> Grade:
    """Word errors by Whisper's English normalizer, without its table of British spellings, which transformers lacks."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

    english, basic = EnglishTextNormalizer({}), BasicTextNormalizer()
    reference, given = (basic(english(text)).split() for text in (spoken, heard))
    return Grade(edits(reference, given), len(reference))


def edits(reference: Sequence[str], given: Sequence[str]) -> int:
    """Insertions, deletions and substitutions that turn one sequence into the other."""
    row = list(range(len(given) + 1))
    for number, expected in enumerate(reference, 1):
        previous, row = row, [number]
        for place, one in enumerate(given):
            row.append(min(previous[place] + (one != expected), previous[place + 1] + 1, row[place] + 1))
    return row[-1]


def _answer(line: Mapping[str, Any]) -> str:
    """The answer in words; of a choice by likelihood, the choice."""
    value = line.get("filtered_resps", line.get("resps"))
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list) and value and all(isinstance(one, list) and len(one) == 2 for one in value):
        likelihoods = [float(one[0]) for one in value]
        return f"choice {likelihoods.index(max(likelihoods))}"
    return value if isinstance(value, str) else json.dumps(value)


def _question(line: Mapping[str, Any]) -> str:
    given = line.get("input", line.get("prompt_hash", line.get("arguments")))
    return json.dumps([given, str(line.get("target"))], sort_keys=True)


def _measure(logs: Sequence[Log]) -> Scoring:
    name = logs[0].metric
    if name in (*ERROR_RATES, "word_errors"):
        return "word errors"
    binary = all(one.grade.points in (0, 1) for log in logs for one in log.samples.values())
    return "accuracy" if binary else "facts"


def _check_same(logs: Mapping[str, Log]) -> None:
    """Refuse arms with other items, other prompts or another metric."""
    (first, dense), *others = logs.items()
    for name, log in others:
        if log.metric != dense.metric:
            raise OnPTQError(
                f"{dense.file} is graded by {dense.metric}, {log.file} by {log.metric}; expected one --metric"
            )
        missing = [number for number in dense.samples if number not in log.samples]
        added = [number for number in log.samples if number not in dense.samples]
        if missing or added:
            example = f"item {(missing or added)[0]} is in one alone"
            raise OnPTQError(
                f"{first} answers {len(dense.samples)} items of {dense.task}, {name} {len(log.samples)}: {example}; expected "
                "the same items"
            )
        other = [number for number, one in dense.samples.items() if one.question != log.samples[number].question]
        if other:
            raise OnPTQError(
                f"{first} and {name} were asked other questions in {len(other)} of {len(dense.samples)} items of {dense.task}, "
                f"e.g. item {other[0]}; expected the same prompts and data"
            )
