"""The report in words and tables: the same for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onptq.evaluate.candidates import DENSE
from onptq.evaluate.statistics import fewest_differing

ABSENT = "-"
FEW = 50  # clusters below which a percentile bootstrap is too narrow
BEHAVIOUR = ("kl", "js", "mismatch", "erosion", "first_fork", "js_before_fork", "js_after_fork")
CRITICAL = ("critical_flips", "critical_erosion")
CRITICAL_NOTE = (
    "Margin flips and critical erosion: on joint-critical states, the same for all candidates of a scheme. These are decisions "
    "that plain rounding (rtn) changes on its own answers, and whose consequence over 16 tokens is among the largest fifth of "
    "all its states. A margin is flipped where the reference token lies below the competitor of that state; for rtn that is "
    "so by definition."
)
SAID = {"better": "better in", "worse": "worse in", "open": "not distinguishable in", "same": "equal in"}


@dataclass(frozen=True)
class ReportTable:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def tables(report: Mapping[str, Any]) -> list[ReportTable]:
    found = []
    if report["items"]:
        found.append(_scores(report))
    if report["prompts"]:
        found.append(_behaviour(report))
    return [*found, _cost(report)]


def sentences(report: Mapping[str, Any]) -> list[str]:
    """One for every pair of which something was measured: what can be told apart, and what cannot."""
    return [said for pair in report["pairs"] if (said := sentence(pair, report))]


def sentence(pair: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    told: dict[str, list[str]] = {}
    for name, verdict in pair["verdicts"].items():
        if verdict in SAID and name in _told(report, pair):
            told.setdefault(verdict, []).append(_difference(name, verdict, pair, report["labels"][name]))
    claims = [f"{words} {', '.join(told[verdict])}" for verdict, words in SAID.items() if verdict in told]
    start = f"{pair['second']} against {pair['first']}: "
    if set(told) == {"same"}:
        return f"{start}no difference in anything measured."
    claims += _against_dense(pair, report)
    return f"{start}{'; '.join(claims)}." if claims else ""


def notes(report: Mapping[str, Any]) -> list[str]:
    bootstrap, pairs = report["bootstrap"], len(report["pairs"])
    level = f"{100 * bootstrap['confidence']:g}%"
    found = [f"Measured on {report['origin']}."] if report["origin"] else []
    found += [
        f"Brackets: {level} intervals of a paired cluster bootstrap by item and by prompt, {bootstrap['replicates']} "
        f"replicates, seed {bootstrap['seed']}. A difference counts where its interval leaves zero out and at least "
        f"{fewest_differing(bootstrap['confidence'])} items or prompts differ; for flips where McNemar's exact test has "
        f"p < {1 - bootstrap['confidence']:.2g}. Nothing is corrected for the number of comparisons "
        f"({pairs} {'pair' if pairs == 1 else 'pairs'})."
    ]
    if not report["all_paired"]:
        found.append("So many candidates are paired with the dense model and with those of the same scheme alone.")
    tasks = report["models"][DENSE].get("tasks", {})
    return found + caveats({task: score["items"] for task, score in tasks.items()}, report["prompts"])


def caveats(items: Mapping[str, int], prompts: int) -> list[str]:
    """What is to be said where there are too few `items` in a task, or `prompts`."""
    clusters = {"items in a task": min(items.values(), default=0), "prompts": prompts}
    few = [f"{count} {what}" for what, count in clusters.items() if 0 < count < FEW]
    if not few:
        return []
    return [f"Only {' and '.join(few)}: intervals from so few are too narrow, take more before believing them."]


def markdown(report: Mapping[str, Any]) -> str:
    lines = [f"# {report['dense']} and its quantized candidates", ""]
    for table in tables(report):
        lines += [f"## {table.title}", "", row(table.header), "|---" * len(table.header) + "|"]
        lines += [*map(row, table.rows), "", table.note, ""]
    lines += ["## What is and is not distinguishable", "", *(f"- {one}" for one in sentences(report)), ""]
    return "\n".join([*lines, *notes(report)]) + "\n"


def _scores(report: Mapping[str, Any]) -> ReportTable:
    models, known = report["models"], report["labels"]
    tasks = list(models[DENSE]["tasks"])
    average = "average" in models[DENSE]["figures"]
    flips = any(model.get("flips", {}).get("items") for model in models.values())
    header = ["", *(known[task]["name"] for task in tasks), *(["average"] if average else [])]
    header += ["flips", "to wrong", "to right"] if flips else []
    header += ["changed", *(["changed, still wrong"] if flips else [])]
    rows = []
    for name, model in models.items():
        figures, flipped = model["figures"], model.get("flips", {})
        row = [name, *(_estimate(figures, known, task) for task in (*tasks, *(["average"] if average else [])))]
        row += [_estimate(figures, known, "flips"), *(_count(flipped, key) for key in _DIRECTIONS)] if flips else []
        row += [_estimate(figures, known, "changed"), *([_estimate(figures, known, "changed_wrong")] if flips else [])]
        rows.append(row)
    sizes = ", ".join(f"{task} {score['items']}" for task, score in models[DENSE]["tasks"].items())
    word_errors = " WER: lower is better, not in the average." if _any_word_errors(models[DENSE]) else ""
    note = (
        f"Scores in % of items ({sizes}).{word_errors} flips: answers that turned right or wrong against dense; "
        "changed: answers with another text."
    )
    return ReportTable("Answers", header, rows, note)


def _behaviour(report: Mapping[str, Any]) -> ReportTable:
    known = report["labels"]
    critical = any(name in model["figures"] for model in report["models"].values() for name in CRITICAL)
    columns = (*BEHAVIOUR, *(CRITICAL if critical else ()))
    header = ["", *(known[name]["name"] + (" %" if known[name]["percent"] else "") for name in columns)]
    rows = [
        [name, *(_estimate(model["figures"], known, key) for key in columns)]
        for name, model in report["models"].items()
        if name != DENSE
    ]
    note = (
        f"Each candidate on its own greedy answers to {report['prompts']} prompts, against the dense model on the same "
        "token ids. KL, JS in nats and erosion in logits, per token; first fork: tokens until the first decision that differs."
    )
    return ReportTable("Behaviour", header, rows, f"{note} {CRITICAL_NOTE}" if critical else note)


def _cost(report: Mapping[str, Any]) -> ReportTable:
    rows = []
    for name, model in report["models"].items():
        cost = model["cost"]
        seconds = cost.get("seconds")
        shown = ABSENT if seconds is None else f"{seconds:.1f}"
        rows.append([name, shown, _size(cost.get("peak_bytes")), _size(cost.get("checkpoint_bytes"))])
    note = "Seconds and peak memory of calibration, where it was done here; on a CPU the whole process counts."
    return ReportTable("Cost", ["", "seconds", "peak memory", "checkpoint"], rows, note)


_DIRECTIONS = ("right_to_wrong", "wrong_to_right")


def _told(report: Mapping[str, Any], pair: Mapping[str, Any]) -> set[str]:
    scores = {*report["models"][DENSE].get("tasks", {}), "average"}
    return scores if pair["first"] == DENSE else {*scores, "flips", "changed", *BEHAVIOUR, *CRITICAL}


def _difference(name: str, verdict: str, pair: Mapping[str, Any], label: Mapping[str, Any]) -> str:
    if verdict == "same":
        return str(label["name"])
    found, digits = pair["differences"][name], 2 if label["percent"] else label["digits"]
    value, low, high = (f"{found[key]:+.{digits}f}" for key in ("value", "low", "high"))
    points = " points" if label["percent"] else ""
    test = f", McNemar p = {_p(pair['mcnemar']['flips']['p'])}" if name == "flips" else ""
    return f"{label['name']} ({value}{points} [{low}, {high}]{test})"


def _against_dense(pair: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    if pair["first"] != DENSE or "right" not in pair["mcnemar"]:
        return
    flips = report["models"][pair["second"]]["flips"]
    count = flips["right_to_wrong"] + flips["wrong_to_right"]
    yield (
        f"{count} of {flips['items']} answers flipped, {flips['right_to_wrong']} to wrong and {flips['wrong_to_right']} to "
        f"right (McNemar p = {_p(pair['mcnemar']['right']['p'])})"
    )


def _estimate(figures: Mapping[str, Any], known: Mapping[str, Any], name: str) -> str:
    found = figures.get(name)
    if found is None or found["value"] is None:
        return ABSENT
    digits = known[name]["digits"]
    shown = f"{found['value']:.{digits}f}"
    return shown if found["low"] is None else f"{shown} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"


def _any_word_errors(model: Mapping[str, Any]) -> bool:
    return any(score["measure"] == "word errors" for score in model["tasks"].values())


def _count(flips: Mapping[str, Any], key: str) -> str:
    return str(flips[key]) if key in flips else ABSENT


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 0.001 else "less than 0.001"


def _size(size: int | None) -> str:
    if size is None:
        return ABSENT
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def header(name: str, labels: Mapping[str, Any]) -> str:
    """Of a measure's column in a suite's tables."""
    short = "average" if name == "average" else labels[name]["name"]
    return f"{short} %" if name in ("flips", "mismatch", "critical_flips") else str(short)


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
