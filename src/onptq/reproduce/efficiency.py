"""Table 5: prefill time and memory, from the reports of `onptq bench`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onptq.errors import OnPTQError
from onptq.evaluate.statistics import Interval
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.record import Cell, Claim, Picture, Result, Table, Verdict, above, all_of, as_mark, shown
from onptq.reproduce.resampling import resampled

NAME, TITLE = "efficiency", "Prefill time and memory (Table 5)"
DENSE, OURS = "dense", "W4A8"
TOKENS = 2048
COMMAND = "onptq bench prefill"


@dataclass(frozen=True)
class Measured:
    """One engine at one batch size: the prefill times of its repeats in milliseconds, and its memory in GB."""

    name: str
    batch: int
    milliseconds: Sequence[float]
    gigabytes: float  # the most that tensors held, weights included, without the key-value cache
    source: str
    device: str


def read_reports(files: Sequence[Path]) -> list[Measured]:
    """Every engine and batch size in the reports."""
    measured = []
    for file in files:
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
            tokens = report["settings"]["prompt_tokens"]
            for one in report["results"]:
                for batch in one.get("batches", ()):
                    if tokens == TOKENS:
                        measured.append(_measured(file, report, one, batch))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OnPTQError(f"{file} is no report of `onptq bench`: {error!r}") from error
    return measured


def _measured(file: Path, report: Mapping[str, Any], one: Mapping[str, Any], batch: Mapping[str, Any]) -> Measured:
    times = [1000 * seconds for seconds in batch.get("prefill_all") or [batch["prefill_seconds"]]]
    peak = batch.get("peak_bytes") or one["weight_bytes"]
    return Measured(one["name"], batch["batch"], times, peak / 1e9, file.name, report.get("device", ""))


@dataclass(frozen=True)
class Speedup:
    """How many times faster and by which share smaller an engine is than the dense one of the same report."""

    engine: Measured
    dense: Measured
    times: Interval
    less: float  # of the memory, percent


def speedups(measured: Sequence[Measured], seed: int = 0) -> list[Speedup]:
    """Every engine against the dense one of its report and batch size; the interval is over repeats."""
    ratios = []
    for one in measured:
        dense = next(
            (other for other in measured if _place(other) == _place(one) and other.name == DENSE),
            None,
        )
        if dense is None or one is dense:
            continue
        values = np.concatenate((np.array(dense.milliseconds), np.array(one.milliseconds)))
        first = np.arange(len(values)) < len(dense.milliseconds)
        ratio = lambda rows, values=values, first=first: _ratio(values[rows], first[rows])  # noqa: E731
        [times] = resampled([ratio], np.arange(len(values)), seed)
        ratios.append(Speedup(one, dense, times, 100 * (1 - one.gigabytes / dense.gigabytes)))
    return ratios


def _place(one: Measured) -> tuple[str, int]:
    return one.source, one.batch


def _ratio(values: Any, first: Any) -> float:
    if not first.any() or first.all():
        return float("nan")
    return float(np.median(values[first]) / np.median(values[~first]))


def run(experiment: Experiment) -> Result:
    return result(speedups(read_reports(experiment.settings.bench), experiment.settings.seed), experiment)


def result(measured: Sequence[Speedup], experiment: Experiment) -> Result:
    there = paper(NAME)
    claims = []
    for row in there["rows"]:
        ratio, less = row["fp16"]["ms"] / row["w4a8"]["ms"], 100 * (1 - row["w4a8"]["gb"] / row["fp16"]["gb"])
        ours = [one for one in measured if one.engine.batch == row["batch"] and one.engine.name == OURS]
        faster: Verdict = all_of([above(one.times, 1.0) for one in ours])
        smaller: Verdict = all_of(["holds" if one.less > 0 else "does not hold" for one in ours])
        claims.append(
            Claim(
                f"W4A8 prefills faster than FP16 at batch size {row['batch']}",
                f"{ratio:.2f} times",
                ", ".join(f"{shown(one.times)} times" for one in ours) or f"not measured: give a report of `{COMMAND}`",
                faster,
            )
        )
        claims.append(
            Claim(
                f"W4A8 needs less memory than FP16 at batch size {row['batch']}",
                f"{less:.1f}% less",
                ", ".join(f"{one.less:.1f}% less" for one in ours) or "not measured",
                smaller,
            )
        )
    rows: list[list[Cell]] = [
        [
            f"paper: {there['device']}",
            row["batch"],
            OURS,
            row["fp16"]["ms"],
            row["w4a8"]["ms"],
            f"{row['fp16']['ms'] / row['w4a8']['ms']:.2f}",
            row["fp16"]["gb"],
            row["w4a8"]["gb"],
        ]
        for row in there["rows"]
    ]
    rows += [
        [
            f"{one.engine.device} ({one.engine.source})",
            one.engine.batch,
            one.engine.name,
            round(_median(one.dense), 2),
            round(_median(one.engine), 2),
            shown(one.times),
            round(one.dense.gigabytes, 2),
            round(one.engine.gigabytes, 2),
        ]
        for one in measured
    ]
    heads = ("device", "batch", "scheme", "FP16 ms", "ms", "times faster", "FP16 GB", "GB")
    marks = [
        mark
        for one in measured
        for mark in as_mark(f"{one.engine.name}, batch {one.engine.batch}, {one.engine.source}", "here", one.times)
    ]
    devices = ", ".join(dict.fromkeys(one.engine.device for one in measured)) or "none"
    fp8 = [one for one in measured if "8" in one.engine.name and "FP" in one.engine.name.upper()]
    differs = [
        f"Device: {devices}; the paper's is {there['device']}. Random weights of the same shapes: time does not depend on them.",
        "Memory here is the most that tensors held, without the key-value cache; the paper does not say what it counts.",
        *([] if fp8 else ["No report has FP8, so that it is not beside the others."]),
    ]
    table = Table(f"Prefill of {TOKENS} tokens, medians; 95% intervals over repeats", heads, rows)
    settings = {"reports": [file.name for file in experiment.settings.bench]}
    picture = Picture("Prefill speedup over FP16", "times", marks) if marks else None
    return Result(NAME, TITLE, claims, [table], differs, picture, settings)


def _median(one: Measured) -> float:
    return float(np.median(one.milliseconds))
