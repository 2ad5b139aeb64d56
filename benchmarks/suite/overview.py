"""A suite at a glance: how often OnPTQ is better than every other method, all pairs as one, and the means of all methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.suite.cells import title, value_of
from benchmarks.suite.pooled import NOTE, pooled_rows
from onptq.evaluate.report import ABSENT, row

MEASURES = ("mismatch", "erosion", "kl", "flips", "average", "critical_flips")
OUTCOMES = ("better", "open", "worse")


def at_a_glance(tables: Mapping[str, Any]) -> Iterator[str]:
    units = [
        (benchmark, scheme)
        for benchmark in tables["benchmarks"]
        for scheme in benchmark["schemes"]
        if scheme["differences"]
    ]
    if len(units) < 2:
        return
    yield from ("## At a glance", "")
    yield (
        f"Over {len(units)} pairs of a model and a scheme: in how many OnPTQ is better than the other method / not "
        "distinguishable or equal / worse, as marked below."
    )
    yield from ("", *_standings(units), "", NOTE)
    for measure in MEASURES:
        yield from pooled_rows(units, measure, units[0][0]["labels"])
    yield ""
    yield (
        "Means over the models, scheme by scheme, of methods that were measured on every model of the scheme. "
        "The best is bold."
    )
    for measure in MEASURES:
        yield from _means(units, measure)


def _standings(units: Sequence[tuple[Any, Any]]) -> Iterator[str]:
    counts: dict[str, dict[str, list[int]]] = {}
    for _, scheme in units:
        for ours, others in scheme["differences"].items():
            if "#" in ours:
                continue  # of a further seed
            for other, by_measure in others.items():
                label = scheme["rows"][other]["label"]
                for name in MEASURES:
                    if name in by_measure:
                        verdict = by_measure[name]["verdict"]
                        place = OUTCOMES.index(verdict) if verdict in OUTCOMES else 1
                        counts.setdefault(label, {}).setdefault(name, [0, 0, 0])[place] += 1
    shown = [name for name in MEASURES if any(name in by_measure for by_measure in counts.values())]
    labels = units[0][0]["labels"]
    yield row(["onptq against", *(title(name, labels) for name in shown)])
    yield "|---" * (len(shown) + 1) + "|"
    for label, by_measure in counts.items():
        yield row(
            [label, *(" / ".join(map(str, by_measure[name])) if name in by_measure else ABSENT for name in shown)]
        )


def _means(units: Sequence[tuple[Any, Any]], measure: str) -> Iterator[str]:
    """One table: methods by schemes."""
    values: dict[str, dict[str, list[float]]] = {}  # label -> scheme -> over the counts
    counts: dict[str, int] = {}
    for _, scheme in units:
        rows = [one for one in scheme["rows"].values() if one["of_the_suite"] and "#" not in one["label"]]
        by_label = {one["label"]: value_of(one, measure) for one in rows}
        if all(value is None for value in by_label.values()):
            continue
        counts[scheme["scheme"]] = counts.get(scheme["scheme"], 0) + 1
        for label, value in by_label.items():
            if value is not None:
                values.setdefault(label, {}).setdefault(scheme["scheme"], []).append(value)
    if not counts:
        return
    labels = units[0][0]["labels"]
    label = labels[measure]
    means = {
        method: {scheme: fmean(each) for scheme, each in by.items() if len(each) == counts[scheme]}
        for method, by in values.items()
    }
    choose = min if label["less_is_better"] else max
    best = {scheme: choose(by[scheme] for by in means.values() if scheme in by) for scheme in counts}
    digits = label["digits"]
    yield ""
    yield row([title(measure, labels), *(f"{scheme} ({count})" for scheme, count in counts.items())])
    yield "|---" * (len(counts) + 1) + "|"
    for method, by in means.items():
        cells = []
        for scheme in counts:
            cell = f"{by[scheme]:.{digits}f}" if scheme in by else ABSENT
            cells.append(f"**{cell}**" if cell == f"{best[scheme]:.{digits}f}" else cell)
        yield row([method, *cells])
