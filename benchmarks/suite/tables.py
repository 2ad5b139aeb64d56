"""The tables of a suite, in the paper's layout, made from the reports of its benchmarks alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite.cells import difference, figure, title, value_of
from benchmarks.suite.goals import OURS, Standing
from benchmarks.suite.overview import at_a_glance
from onptq.errors import OnPTQError
from onptq.evaluate.candidates import DENSE, shown
from onptq.evaluate.comparison import REPORT_JSON, REPORT_TEXT
from onptq.evaluate.report import ABSENT, CRITICAL_NOTE, row
from onptq.evaluate.statistics import fewest_differing
from onptq.schemes import Scheme

BEHAVIOUR = ("mismatch", "noise", "erosion", "kl", "first_fork", "critical_flips", "critical_erosion")
DIFFERENCES = ("mismatch", "erosion", "kl", "flips", "average", "critical_flips")
MARKS = {"better": " ✓", "worse": " ✗"}
OPPOSITE = {"better": "worse", "worse": "better"}


def collect(
    out: Path, suite: str, models: Sequence[str], schemes: Sequence[str], methods: Sequence[str]
) -> dict[str, Any]:
    """Every benchmark in `out`, its candidates by scheme, OnPTQ's differences to all others, and its goals."""
    reports = {}
    for path in sorted(out.glob(f"*/{REPORT_JSON}")):
        report = json.loads(path.read_text(encoding="utf-8"))
        reports[report["dense"]] = (path.parent.name, report)
    order = [*(model for model in models if model in reports), *(name for name in reports if name not in models)]
    benchmarks = [_benchmark(name, *reports[name], schemes, methods) for name in order]
    goals = [goal for benchmark in benchmarks for scheme in benchmark["schemes"] for goal in scheme["goals"]]
    return {
        "suite": suite,
        "benchmarks": benchmarks,
        "missing": [model for model in models if model not in reports],
        "goals": {outcome: sum(goal["outcome"] == outcome for goal in goals) for outcome in ("met", "missed", "open")},
    }


def _benchmark(
    model: str, folder: str, report: Mapping[str, Any], schemes: Sequence[str], methods: Sequence[str]
) -> dict[str, Any]:
    by_scheme: dict[str, list[str]] = {}
    for name in report["models"]:
        if name != DENSE and (scheme := _scheme_of(name)) is not None:
            by_scheme.setdefault(scheme, []).append(name)
    order = [*(one for one in schemes if one in by_scheme), *(one for one in by_scheme if one not in schemes)]
    tasks = report["models"][DENSE].get("tasks", {})
    return {
        "model": model,
        "folder": folder,
        "items": {task: score["items"] for task, score in tasks.items()},
        "prompts": report["prompts"],
        "bootstrap": report["bootstrap"],
        "labels": report["labels"],
        "dense": report["models"][DENSE],
        "schemes": [_scheme(scheme, by_scheme[scheme], report, methods) for scheme in order],
        "missing": [scheme for scheme in schemes if scheme not in by_scheme],
    }


def _scheme(scheme: str, names: Sequence[str], report: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    of_suite = [name for method in methods for name in names if _method_of(name, scheme) == method]
    rows = {
        name: report["models"][name]
        | {"label": shown(name).replace(f":{scheme}", ""), "of_the_suite": name in of_suite}
        for name in (*of_suite, *(name for name in names if name not in of_suite))
    }
    differences = {
        ours: {other: _differences(ours, other, report) for other in _rivals(ours, scheme, of_suite, methods)}
        for ours in of_suite
        if _method_of(ours, scheme) == OURS
    }
    missing = [method for method in methods if f"{method}:{scheme}" not in names]
    goals = [
        goal.to_dict()
        for ours, others in differences.items()
        for goal in Standing(
            scheme,
            f", seed {ours.partition('#')[2]}" if "#" in ours else "",
            rows[ours]["figures"],
            {rows[name]["label"]: rows[name]["figures"] for name in others},
            {rows[name]["label"]: by_measure for name, by_measure in others.items()},
            missing,
            report["labels"],
            list(report["models"][DENSE].get("tasks", {})),
        ).goals()
    ]
    return {"scheme": scheme, "rows": rows, "differences": differences, "missing": missing, "goals": goals}


def _rivals(ours: str, scheme: str, names: Sequence[str], methods: Sequence[str]) -> Iterator[str]:
    """The candidates of all other methods; those with the same seed, where a method has one."""
    mark = ours.removeprefix(f"{OURS}:{scheme}")
    for method in methods:
        plain = f"{method}:{scheme}"
        if method != OURS and (same := f"{plain}{mark}" if f"{plain}{mark}" in names else plain) in names:
            yield same


def _differences(ours: str, other: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """ours - other of every measure, with its verdict: for flips, by the interval and McNemar's test alike."""
    for pair in report["pairs"]:
        if {pair["first"], pair["second"]} == {ours, other}:
            forward = pair["second"] == ours
            return {name: _oriented(one, pair["verdicts"][name], forward) for name, one in pair["differences"].items()}
    raise OnPTQError(
        f"the report has no pair of {ours} and {other}; run the same command again to write the report anew"
    )


def _oriented(one: Mapping[str, Any], verdict: str, forward: bool) -> dict[str, Any]:
    """A pair's difference, with its sign and verdict turned around unless `forward`."""
    value, low, high = one["value"], one["low"], one["high"]
    if verdict in OPPOSITE and (low is None or low <= 0 <= high):
        verdict = "open"
    if forward or value is None:
        return {"value": value, "low": low, "high": high, "verdict": verdict}
    return {
        "value": -value,
        "low": None if high is None else -high,
        "high": None if low is None else -low,
        "verdict": OPPOSITE.get(verdict, verdict),
    }


def _scheme_of(name: str) -> str | None:
    """The scheme in a name such as onptq:W4A8, onptq:W4A8@paper, onptq:W4A8#1; None of names without one."""
    text = name.rpartition(":")[2].partition("#")[0].partition("@")[0]
    try:
        return str(Scheme.parse(text))
    except OnPTQError:
        return None


def _method_of(name: str, scheme: str) -> str | None:
    """The method of a candidate that a suite builds; None of other candidates."""
    method, _, rest = name.partition(":")
    return method if rest == scheme or rest.startswith(f"{scheme}#") else None


# --- text ----------------------------------------------------------------------------------------------------------------


def markdown(tables: Mapping[str, Any]) -> str:
    lines = [f"# Suite {tables['suite']}", "", *_preface(tables), "", *at_a_glance(tables), ""]
    for benchmark in tables["benchmarks"]:
        lines += [f"## {benchmark['model']}", "", _sizes(benchmark), ""]
        for scheme in benchmark["schemes"]:
            lines += [f"### {benchmark['model']}, {scheme['scheme']}", "", *_figures(benchmark, scheme), ""]
            for ours, others in scheme["differences"].items():
                lines += [*_difference_rows(benchmark, scheme, ours, others), ""]
    return "\n".join([*lines, "## Goals", "", *goal_lines(tables)]) + "\n"


def _preface(tables: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Scores, flips and mismatch in %, erosion in logits and KL in nats per token, first fork in tokens, calibration in "
        "seconds. WER is not in the average. The best method of a column is bold; dense does not count."
    )
    if tables["benchmarks"]:
        bootstrap = tables["benchmarks"][0]["bootstrap"]
        enough = fewest_differing(bootstrap["confidence"])
        yield ""
        yield (
            f"Differences are OnPTQ minus the other, with {100 * bootstrap['confidence']:g}% intervals of a paired cluster "
            f"bootstrap by item and by prompt ({bootstrap['replicates']} replicates). ✓: the interval excludes zero and OnPTQ "
            f"is better. ✗: it excludes zero and OnPTQ is worse. Both need at least {enough} items or prompts that differ, and "
            "for flips McNemar's exact test. Nothing is corrected for the number of comparisons. Only candidates of one scheme "
            "are compared with each other."
        )
    schemes = [scheme for benchmark in tables["benchmarks"] for scheme in benchmark["schemes"]]
    if any("critical_flips" in model["figures"] for scheme in schemes for model in scheme["rows"].values()):
        yield ""
        yield CRITICAL_NOTE
    missing = [*tables["missing"]]
    for benchmark in tables["benchmarks"]:
        missing += [f"{benchmark['model']} {scheme}" for scheme in benchmark["missing"]]
        missing += [
            f"{benchmark['model']} {one['scheme']} ({', '.join(one['missing'])})"
            for one in benchmark["schemes"]
            if one["missing"]
        ]
    if missing:
        yield ""
        yield f"Not measured yet: {', '.join(missing)}."


def _sizes(benchmark: Mapping[str, Any]) -> str:
    items = ", ".join(f"{task} {count:,}" for task, count in benchmark["items"].items())
    prompts = f"behaviour on {benchmark['prompts']} prompts" if benchmark["prompts"] else ""
    sizes = "; ".join(part for part in (f"Items: {items}" if items else "", prompts) if part)
    return f"{sizes[:1].upper()}{sizes[1:]}. All figures with intervals: `{benchmark['folder']}/{REPORT_TEXT}`."


def _columns(benchmark: Mapping[str, Any], scheme: Mapping[str, Any]) -> list[str]:
    """The measures that any model here has: scores, their average, word errors, flips, behaviour."""
    labels = benchmark["labels"]
    scores = sorted(benchmark["items"], key=lambda task: labels[task]["less_is_better"])
    place = sum(not labels[task]["less_is_better"] for task in scores)
    wanted = [*scores[:place], "average", *scores[place:], "flips", *BEHAVIOUR]
    rows = [benchmark["dense"], *scheme["rows"].values()]
    return [name for name in wanted if any(name in model["figures"] for model in rows)]


def _figures(benchmark: Mapping[str, Any], scheme: Mapping[str, Any]) -> Iterator[str]:
    labels, columns = benchmark["labels"], _columns(benchmark, scheme)
    yield row([scheme["scheme"], *(title(name, labels) for name in columns), "seconds"])
    yield "|---" * (len(columns) + 2) + "|"
    yield row(["dense", *(figure(benchmark["dense"], name, labels) for name in columns), ABSENT])
    best = {name: _best(scheme["rows"].values(), name, labels) for name in columns if name != "noise"}
    for model in scheme["rows"].values():
        seconds = model["cost"].get("seconds")
        cells = [figure(model, name, labels) for name in columns]
        bold = [
            f"**{cell}**" if model["of_the_suite"] and cell == best.get(name) else cell
            for name, cell in zip(columns, cells, strict=True)
        ]
        yield row([model["label"], *bold, ABSENT if seconds is None else f"{seconds:.1f}"])


def _best(rows: Any, name: str, labels: Mapping[str, Any]) -> str | None:
    """The best cell of a column as text, so that equal cells are all bold."""
    measured = [model for model in rows if model["of_the_suite"] and value_of(model, name) is not None]
    if not measured:
        return None
    choose = min if labels[name]["less_is_better"] else max
    return figure(choose(measured, key=lambda model: model["figures"][name]["value"]), name, labels)


def _difference_rows(
    benchmark: Mapping[str, Any], scheme: Mapping[str, Any], ours: str, others: Mapping[str, Any]
) -> Iterator[str]:
    labels = benchmark["labels"]
    columns = [name for name in DIFFERENCES if any(name in by_measure for by_measure in others.values())]
    if not columns:
        return
    yield row([f"{scheme['rows'][ours]['label']} minus", *(title(name, labels) for name in columns)])
    yield "|---" * (len(columns) + 1) + "|"
    for other, by_measure in others.items():
        cells = [
            difference(by_measure[name], labels[name]) + MARKS.get(by_measure[name]["verdict"], "")
            if name in by_measure
            else ABSENT
            for name in columns
        ]
        yield row([scheme["rows"][other]["label"], *cells])


def goal_lines(tables: Mapping[str, Any]) -> Iterator[str]:
    counts = tables["goals"]
    yield f"{counts['met']} met, {counts['missed']} missed, {counts['open']} open because something is not measured yet."
    for outcome in ("missed", "open", "met"):
        lines = [
            f"- {benchmark['model']}, {goal['scheme']}: {goal['goal']} ({goal['evidence']})"
            for benchmark in tables["benchmarks"]
            for scheme in benchmark["schemes"]
            for goal in scheme["goals"]
            if goal["outcome"] == outcome
        ]
        if lines:
            yield from ("", f"### {outcome.capitalize()}", "", *lines)
