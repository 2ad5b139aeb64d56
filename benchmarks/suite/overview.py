"""A suite at a glance: how often OnPTQ is ahead of every other method, and all methods' means over the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from onptq.evaluate.report import ABSENT, header, row

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
    yield from ("", *_standings(units), "")
    yield (
        "Means over the models, scheme by scheme; a method has one where it was measured on every model the scheme was. "
        "In bold the best."
    )
    for measure in MEASURES:
        yield from _means(units, measure)


def _standings(units: Sequence[tuple[Any, Any]]) -> Iterator[str]:
    counts: dict[str, dict[str, list[int]]] = {}
    for _, scheme in units:
        for ours, others in scheme["differences"].items():
            if "#" in ours:
                continue  # further seeds are told apart below
            for other, found in others.items():
                label = scheme["rows"][other]["label"]
                for name in MEASURES:
                    if name in found:
                        verdict = found[name]["verdict"]
                        place = OUTCOMES.index(verdict) if verdict in OUTCOMES else 1
                        counts.setdefault(label, {}).setdefault(name, [0, 0, 0])[place] += 1
    shown = [name for name in MEASURES if any(name in found for found in counts.values())]
    labels = units[0][0]["labels"]
    yield row(["onptq against", *(header(name, labels) for name in shown)])
    yield "|---" * (len(shown) + 1) + "|"
    for label, found in counts.items():
        yield row([label, *(" / ".join(map(str, found[name])) if name in found else ABSENT for name in shown)])


def _means(units: Sequence[tuple[Any, Any]], measure: str) -> Iterator[str]:
    """One table: methods by schemes."""
    values: dict[str, dict[str, list[float]]] = {}  # label -> scheme -> over the counts
    counts: dict[str, int] = {}
    for _, scheme in units:
        rows = [one for one in scheme["rows"].values() if one["of_the_suite"] and "#" not in one["label"]]
        found = {one["label"]: one["figures"].get(measure, {}).get("value") for one in rows}
        if all(value is None for value in found.values()):
            continue
        counts[scheme["scheme"]] = counts.get(scheme["scheme"], 0) + 1
        for label, value in found.items():
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
    yield row([header(measure, labels), *(f"{scheme} ({count})" for scheme, count in counts.items())])
    yield "|---" * (len(counts) + 1) + "|"
    for method, by in means.items():
        cells = []
        for scheme in counts:
            cell = f"{by[scheme]:.{digits}f}" if scheme in by else ABSENT
            cells.append(f"**{cell}**" if cell == f"{best[scheme]:.{digits}f}" else cell)
        yield row([method, *cells])
