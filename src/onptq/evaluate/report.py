"""A comparison in words and tables: the same for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onptq.evaluate.candidates import DENSE
from onptq.evaluate.metrics import Label
from onptq.evaluate.scores import Flips, Scores
from onptq.evaluate.statistics import Interval, fewest_differing
from onptq.evaluate.summary import ModelReport, Pair, Report

ABSENT = "-"
FEW = 50  # clusters below which a percentile bootstrap is too narrow
BEHAVIOUR = ("kl", "js", "mismatch", "erosion", "first_fork", "js_before_fork", "js_after_fork")
CRITICAL = ("critical_flips", "critical_erosion")
SUMMARY = {"flips": "flips %", "changed": "changed %", "mismatch": "mismatch %", "kl": "KL"}
CRITICAL_NOTE = (
    "Margin flips and critical erosion: on joint-critical states, the same for all candidates of a scheme. These are decisions "
    "that plain rounding (rtn) changes on its own answers, and whose consequence over 16 tokens is among the largest fifth of "
    "all its states. A margin is flipped where the reference token lies below the competitor of that state; for rtn that is "
    "so by definition."
)
WORDS = {"better": "better in", "worse": "worse in", "open": "not distinguishable in", "same": "equal in"}


@dataclass(frozen=True)
class ReportTable:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def tables(report: Report) -> list[ReportTable]:
    parts = [_scores(report)] if report.items else []
    parts += [_behaviour(report)] if report.prompts else []
    return [*parts, _cost(report)]


def summary_table(report: Report) -> ReportTable:
    """One row per model: its scores, and how it departs from the dense model. No intervals."""
    names = report.labels
    shown = [
        name
        for name in (*_tasks(report).tasks, "average", *SUMMARY)
        if any(name in m.figures for m in report.models.values())
    ]
    heads = {task: names[task].name for task in _tasks(report).tasks} | {"average": "average"} | SUMMARY
    header = ["", *(heads[name] for name in shown)]
    rows = [
        [name, *(_estimate(model, names, key).partition(" [")[0] for key in shown)]
        for name, model in report.models.items()
    ]
    notes = [f"Scores in % on {_sizes(report)} items per task."] if report.items else []
    if report.items:
        notes.append("flips: answers that turned right or wrong against dense; changed: answers worded differently.")
    if report.prompts:
        notes.append(
            f"mismatch, KL: next-token decisions and distributions, on own answers to {report.prompts} prompts."
        )
    return ReportTable("", header, rows, " ".join(notes))


def _sizes(report: Report) -> str:
    sizes = sorted({one.items for one in _tasks(report).tasks.values()})
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def sentences(report: Report) -> list[str]:
    """One for every pair of which something was measured: what differs, and what may be chance."""
    return [text for pair in report.pairs if (text := sentence(pair, report))]


def sentence(pair: Pair, report: Report) -> str:
    by_verdict: dict[str, list[str]] = {}
    for name, verdict in pair.verdicts.items():
        if verdict in WORDS and name in _mentioned(report, pair):
            by_verdict.setdefault(verdict, []).append(_difference(name, verdict, pair, report.labels[name]))
    claims = [f"{words} {', '.join(by_verdict[verdict])}" for verdict, words in WORDS.items() if verdict in by_verdict]
    subject = f"{pair.second} against {pair.first}: "
    if set(by_verdict) == {"same"}:
        return f"{subject}no difference in anything measured."
    claims += _against_dense(pair, report)
    return f"{subject}{'; '.join(claims)}." if claims else ""


def notes(report: Report) -> list[str]:
    pairs = len(report.pairs)
    level = f"{100 * report.confidence:g}%"
    texts = [f"Measured on {report.origin}."] if report.origin else []
    texts += [
        f"Brackets: {level} intervals of a paired cluster bootstrap by item and by prompt, {report.replicates} "
        f"replicates, seed {report.seed}. A difference counts where its interval leaves zero out and at least "
        f"{fewest_differing(report.confidence)} items or prompts differ; for flips where McNemar's exact test has "
        f"p < {1 - report.confidence:.2g}. Nothing is corrected for the number of comparisons "
        f"({pairs} {'pair' if pairs == 1 else 'pairs'})."
    ]
    if not report.all_paired:
        texts.append("So many candidates are paired with the dense model and with those of the same scheme alone.")
    return texts + caveats({task: one.items for task, one in _tasks(report).tasks.items()}, report.prompts)


def caveats(items: Mapping[str, int], prompts: int) -> list[str]:
    """What is to be said where there are too few `items` in a task, or `prompts`."""
    clusters = {"items in a task": min(items.values(), default=0), "prompts": prompts}
    few = [f"{count} {what}" for what, count in clusters.items() if 0 < count < FEW]
    if not few:
        return []
    return [f"Only {' and '.join(few)}: intervals from so few are too narrow, take more before believing them."]


def markdown(report: Report) -> str:
    lines = [f"# {report.dense} and its quantized candidates", ""]
    for table in tables(report):
        lines += [f"## {table.title}", "", row(table.header), "|---" * len(table.header) + "|"]
        lines += [*map(row, table.rows), "", table.note, ""]
    lines += ["## What is and is not distinguishable", "", *(f"- {one}" for one in sentences(report)), ""]
    return "\n".join([*lines, *notes(report)]) + "\n"


def _tasks(report: Report) -> Scores:
    """The dense model's scores; without tasks where there are no items."""
    return report.models[DENSE].scores or Scores({})


def _scores(report: Report) -> ReportTable:
    names = report.labels
    dense = _tasks(report)
    shown = [*dense.tasks, *(["average"] if "average" in report.models[DENSE].figures else [])]
    flips = any(model.change is not None and model.change.total.items for model in report.models.values())
    header = ["", *("average" if task == "average" else names[task].name for task in shown)]
    header += ["flips", "to wrong", "to right"] if flips else []
    header += ["changed", *(["changed, still wrong"] if flips else [])]
    rows = []
    for name, model in report.models.items():
        cells = [name, *(_estimate(model, names, task) for task in shown)]
        if flips:
            total = None if model.change is None else model.change.total
            cells += [_estimate(model, names, "flips"), *_directions(total)]
        cells.append(_estimate(model, names, "changed"))
        cells += [_estimate(model, names, "changed_wrong")] if flips else []
        rows.append(cells)
    sizes = ", ".join(f"{task} {one.items}" for task, one in dense.tasks.items())
    has_word_errors = any(one.less_is_better for one in dense.tasks.values())
    word_errors = " WER: lower is better, not in the average." if has_word_errors else ""
    note = (
        f"Scores in % of items ({sizes}).{word_errors} flips: answers that turned right or wrong against dense; "
        "changed: answers with another text."
    )
    return ReportTable("Answers", header, rows, note)


def _behaviour(report: Report) -> ReportTable:
    names = report.labels
    critical = any(name in model.figures for model in report.models.values() for name in CRITICAL)
    columns = (*BEHAVIOUR, *(CRITICAL if critical else ()))
    header = ["", *(names[name].name + (" %" if names[name].percent else "") for name in columns)]
    rows = [
        [name, *(_estimate(model, names, key) for key in columns)]
        for name, model in report.models.items()
        if name != DENSE
    ]
    note = (
        f"Each candidate on its own greedy answers to {report.prompts} prompts, against the dense model on the same "
        "token ids. KL, JS in nats and erosion in logits, per token; first fork: tokens until the first decision that differs."
    )
    return ReportTable("Behaviour", header, rows, f"{note} {CRITICAL_NOTE}" if critical else note)


def _cost(report: Report) -> ReportTable:
    rows = []
    for name, model in report.models.items():
        seconds = model.cost.get("seconds")
        shown = ABSENT if seconds is None else f"{seconds:.1f}"
        rows.append([name, shown, _size(model.cost.get("peak_bytes")), _size(model.cost.get("checkpoint_bytes"))])
    note = "Seconds and peak memory of calibration, where it was done here; on a CPU the whole process counts."
    return ReportTable("Cost", ["", "seconds", "peak memory", "checkpoint"], rows, note)


def _mentioned(report: Report, pair: Pair) -> set[str]:
    scores = {*_tasks(report).tasks, "average"}
    return scores if pair.first == DENSE else {*scores, "flips", "changed", *BEHAVIOUR, *CRITICAL}


def _difference(name: str, verdict: str, pair: Pair, label: Label) -> str:
    if verdict == "same":
        return label.name
    interval, digits = pair.differences[name], 2 if label.percent else label.digits
    value, low, high = (f"{number:+.{digits}f}" for number in (interval.value, interval.low, interval.high))
    points = " points" if label.percent else ""
    test = f", McNemar p = {_p(pair.mcnemar['flips'].p)}" if name == "flips" else ""
    few = ", too few differ" if verdict == "open" and interval.excludes_zero and name != "flips" else ""
    return f"{label.name} ({value}{points} [{low}, {high}]{test}{few})"


def _against_dense(pair: Pair, report: Report) -> Iterator[str]:
    change = report.models[pair.second].change
    if pair.first != DENSE or "right" not in pair.mcnemar or change is None:
        return
    flips = change.total
    yield (
        f"{flips.right_to_wrong + flips.wrong_to_right} of {flips.items} answers flipped, {flips.right_to_wrong} to wrong and "
        f"{flips.wrong_to_right} to right (McNemar p = {_p(pair.mcnemar['right'].p)})"
    )


def _estimate(model: ModelReport, names: Mapping[str, Label], name: str) -> str:
    interval: Interval | None = model.figures.get(name)
    if interval is None or interval.value is None:
        return ABSENT
    digits = names[name].digits
    shown = f"{interval.value:.{digits}f}"
    return shown if interval.low is None else f"{shown} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def _directions(flips: Flips | None) -> tuple[str, str]:
    return (ABSENT, ABSENT) if flips is None else (str(flips.right_to_wrong), str(flips.wrong_to_right))


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 0.001 else "less than 0.001"


def _size(size: int | None) -> str:
    if size is None:
        return ABSENT
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
