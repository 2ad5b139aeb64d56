"""A comparison in words and tables: the same for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from onptq.evaluate.candidates import DENSE
from onptq.evaluate.critical import HORIZON
from onptq.evaluate.damage import NEAR_TIE
from onptq.evaluate.metrics import Label
from onptq.evaluate.scores import Scores
from onptq.evaluate.statistics import Interval, fewest_differing
from onptq.evaluate.summary import ModelReport, Pair, Report
from onptq.files import size

ABSENT = "-"
FEW = 50  # clusters below which a percentile bootstrap is too narrow
FEW_SEEDS = 10
BEHAVIOUR = ("kl", "js", "mismatch", "noise", "erosion", "first_fork", "js_before_fork", "js_after_fork")
CRITICAL = ("critical_flips", "critical_erosion")
ON_PROMPTS = ("near_tie", "clear", "cwm", "dense_path_mismatch", "dense_path_kl", "reworded", "length", "loops")
ON_ITEMS = ("content_worse", "content_better")
PERCENTILES = ("kl_p50", "kl_p95", "kl_p99")
SUMMARY = {"flips": "flips %", "changed": "changed %", "mismatch": "mismatch %", "kl": "KL"}
CRITICAL_NOTE = (
    "Margin flips and critical erosion: on joint-critical states, the same for all candidates of a scheme. These are decisions "
    "that plain rounding (rtn) changes on its own answers, and whose consequence over 16 tokens is among the largest fifth of "
    "all its states. A margin is flipped where the reference token lies below the competitor of that state; for rtn that is "
    "so by definition."
)
PROMPTS_NOTE = (
    f"Near ties: mismatches where the dense model's margin between the two tokens is below {NEAR_TIE} logits; clear: all others. "
    f"CWM: mismatches weighted by how far the dense model's next {HORIZON} tokens part behind the two tokens. Dense path: on the "
    "dense model's responses, the same states for all. Reworded: responses in other tokens than the dense model's; length: mean "
    "tokens of a response, the dense model's being 100; loops: responses that repeat themselves until they are cut off."
)
ITEMS_NOTE = "Content: answers that score worse or better than the dense model's."
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
    parts += [table for table in (_damage(report), _percentiles(report)) if table.rows]
    parts += [_cost(report)] if any(model.cost for model in report.models.values()) else []
    return [_with_labels(table, report) for table in parts]


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
    return _with_labels(ReportTable("", header, rows, " ".join(notes)), report)


def _with_labels(table: ReportTable, report: Report) -> ReportTable:
    return replace(table, rows=[[report.shown.get(name, name), *cells] for name, *cells in table.rows])


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
    second, first = (report.shown.get(name, name) for name in (pair.second, pair.first))
    subject = f"{second} against {first}: "
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
    texts += _on_seeds(report)
    return texts + caveats({task: one.items for task, one in _tasks(report).tasks.items()}, report.prompts)


def _on_seeds(report: Report) -> Iterator[str]:
    counts = [len(model.seeds) for model in report.models.values() if model.seeds]
    if not counts:
        return
    yield (
        "Several seeds: figures are means over seeds, ± is their standard deviation, and intervals resample seeds as well as "
        "items and prompts. Candidates with as many seeds are paired seed by seed. Their flips count by the interval alone."
    )
    if min(counts) < FEW_SEEDS:
        yield f"Only {min(counts)} seeds: intervals from so few are too narrow."


def caveats(items: Mapping[str, int], prompts: int) -> list[str]:
    """Sentences on tasks with too few `items`, and on too few `prompts`."""
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
    flips = any("flips" in model.figures for model in report.models.values())
    header = ["", *("average" if task == "average" else names[task].name for task in shown)]
    header += ["flips", "to wrong", "to right"] if flips else []
    header += ["changed", *(["changed, still wrong"] if flips else [])]
    rows = []
    for name, model in report.models.items():
        cells = [name, *(_estimate(model, names, task) for task in shown)]
        if flips:
            cells += [_estimate(model, names, "flips"), *_directions(model)]
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
        "token ids. KL, JS in nats and erosion in logits, per token; first fork: tokens until the first decision that differs. "
        "Noise floor: states where the quantized model disagrees with itself, cached decoding having written another token than "
        "the forward of the whole answer chooses; a mismatch of that size says nothing."
    )
    return ReportTable("Behaviour", header, rows, f"{note} {CRITICAL_NOTE}" if critical else note)


def _damage(report: Report) -> ReportTable:
    notes = [*([PROMPTS_NOTE] if report.prompts else []), *([ITEMS_NOTE] if report.items else [])]
    return _figures(report, "Damage", (*ON_PROMPTS, *ON_ITEMS), " ".join(notes))


def _percentiles(report: Report) -> ReportTable:
    note = "KL of single states, in nats, on own responses: half of them are below p50, one in a hundred is above p99."
    return _figures(report, "Percentiles", PERCENTILES, note)


def _figures(report: Report, title: str, columns: Sequence[str], note: str) -> ReportTable:
    """The columns in which something was measured, with the models that have such a figure."""
    shown = [name for name in columns if any(name in model.figures for model in report.models.values())]
    names = report.labels
    header = ["", *(names[name].name + (" %" if names[name].percent else "") for name in shown)]
    rows = [
        [name, *(_estimate(model, names, key) for key in shown)]
        for name, model in report.models.items()
        if any(key in model.figures for key in shown)
    ]
    return ReportTable(title, header, rows, note)


def _cost(report: Report) -> ReportTable:
    rows = []
    for name, model in report.models.items():
        seconds = model.cost.get("seconds")
        shown = ABSENT if seconds is None else f"{seconds:.1f}"
        rows.append([name, shown, _bytes(model.cost.get("peak_bytes")), _bytes(model.cost.get("checkpoint_bytes"))])
    note = "Seconds and peak memory of calibration, where it was done here; on a CPU the whole process counts."
    if any(model.seeds for model in report.models.values()):
        note += " Of several seeds: the mean of the seconds, the most memory."
    return ReportTable("Cost", ["", "seconds", "peak memory", "checkpoint"], rows, note)


def _mentioned(report: Report, pair: Pair) -> set[str]:
    scores = {*_tasks(report).tasks, "average"}
    if pair.first == DENSE:
        return scores
    return {*scores, "flips", "changed", *BEHAVIOUR, "clear", "cwm", *CRITICAL} - {"noise"}


def _difference(name: str, verdict: str, pair: Pair, label: Label) -> str:
    if verdict == "same":
        return label.name
    interval, digits = pair.differences[name], 2 if label.percent else label.digits
    value, low, high = (f"{number:+.{digits}f}" for number in (interval.value, interval.low, interval.high))
    points = " points" if label.percent else ""
    tested = name == "flips" and name in pair.mcnemar
    test = f", McNemar p = {_p(pair.mcnemar['flips'].p)}" if tested else ""
    few = ", too few differ" if verdict == "open" and interval.excludes_zero and not tested else ""
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
    if name in model.spread:
        shown += f" ± {model.spread[name]:.{digits + 1}f}" if model.spread[name] else " ± 0"
    return shown if interval.low is None else f"{shown} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def _directions(model: ModelReport) -> tuple[str, str]:
    """Answers that turned wrong and right; of several seeds, their means."""
    if model.change is not None:
        return str(model.change.total.right_to_wrong), str(model.change.total.wrong_to_right)
    flips = [one.change.total for one in model.seeds.values() if one.change is not None]
    if not flips:
        return ABSENT, ABSENT
    return f"{fmean(one.right_to_wrong for one in flips):.1f}", f"{fmean(one.wrong_to_right for one in flips):.1f}"


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 0.001 else "less than 0.001"


def _bytes(count: int | None) -> str:
    return ABSENT if count is None else size(count)


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
