"""Measurements as rows of text beside the dense model and, for the paper's model, beside its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onptq.checkpoint.served_by_vllm import SWITCH, VLLM
from onptq.checkpoint.serving import serving
from onptq.errors import OnPTQError
from onptq.schemes import Scheme
from onptq_vllm.bench.paper import PAPER
from onptq_vllm.bench.variants import DENSE

APART = 2.0  # largest difference of log-probabilities between decoding and prefill that rounding explains

HEADS = ("checkpoint", "batch", "prefill ms", "speedup", "decode ms/token", "speedup", "peak GiB", "less")
PAPER_HEAD = "paper"


def rows(results: Sequence[Mapping[str, Any]], mode: str, paper: bool = False) -> Iterator[tuple[str, ...]]:
    """A row for every measured checkpoint and batch of a mode; `paper` adds the paper's numbers."""
    measured = [one for one in results if one["mode"] == mode and "error" not in one]
    dense = next((one for one in measured if one["name"] == DENSE), None)
    base = {} if dense is None else {row["batch"]: row for row in _with_peak(dense)}
    for one in measured:
        for row in _with_peak(one):
            cells = _row(one["name"], row, None if one is dense else base.get(row["batch"]))
            yield (*cells, paper_cell(one["name"], row["batch"])) if paper else cells


def _with_peak(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The batches with their peak memory: the reserved memory where an engine reports it, since CUDA graphs hold
    some."""
    return [{**row, "peak": one.get("reserved_bytes") or row["prefill_peak_bytes"]} for row in one["batches"]]


def _row(name: str, row: Mapping[str, Any], base: Mapping[str, Any] | None) -> tuple[str, ...]:
    peak = row["peak"]
    return (
        name,
        str(row["batch"]),
        f"{1e3 * row['prefill_seconds']:.2f}",
        _times(row, base, "prefill_seconds"),
        f"{1e3 * row['decode_seconds']:.2f}",
        _times(row, base, "decode_seconds"),
        "" if peak is None else f"{peak / 2**30:.2f}",
        _less(peak, None if base is None else base["peak"]),
    )


def between_lines(results: Sequence[Mapping[str, Any]], mode: str) -> Iterator[str]:
    """A line per batch about prefill with decoding in between: a GPU that is not always busy is faster."""
    key = "prefill_between_seconds"
    timed = [
        (one["name"], row)
        for one in results
        if one["mode"] == mode and "error" not in one
        for row in one["batches"]
        if key in row
    ]
    base = {row["batch"]: row for name, row in timed if name == DENSE}
    texts: dict[int, list[str]] = {}
    for name, row in timed:
        times = _times(row, None if name == DENSE else base.get(row["batch"]), key)
        texts.setdefault(row["batch"], []).append(f"{name} {1e3 * row[key]:.2f} ms" + f" ({times})" * bool(times))
    for batch, each in texts.items():
        yield f"prefill with decoding between, batch {batch}: {', '.join(each)}"


def _times(row: Mapping[str, Any], base: Mapping[str, Any] | None, key: str) -> str:
    if base is None or row[key] <= 0:  # a difference of two noisy times may be anything
        return ""
    return f"{base[key] / row[key]:.2f}x"


def _less(peak: int | None, base: int | None) -> str:
    return "" if not peak or not base else f"{100 * (1 - peak / base):.1f}%"


def paper_cell(name: str, batch: int) -> str:
    """The paper's prefill and peak memory; for a quantized row also its gain over FP16."""
    of = {(one["name"], one["batch"]): one for one in PAPER["rows"]}
    row = of.get(("FP16" if name == DENSE else name, batch))
    if row is None:
        return ""
    text = f"{1e3 * row['prefill_seconds']:.2f} ms, {row['peak_bytes'] / 1e9:.2f} GB"
    if name == DENSE:
        return text
    base = of["FP16", batch]
    times = base["prefill_seconds"] / row["prefill_seconds"]
    return f"{text}: {times:.2f}x, {100 * (1 - row['peak_bytes'] / base['peak_bytes']):.1f}% less"


def problem(one: Mapping[str, Any]) -> str | None:
    """Why a measurement must not be used; None if it may be."""
    if "error" in one:
        return str(one["error"])
    if one.get("not_finite"):
        return f"{one['not_finite']:,} log-probabilities are not finite: its kernels compute wrongly"
    if (apart := one.get("decoded_apart", 0.0)) > APART:
        return (
            f"log-probabilities of decoded tokens and of the same tokens in a prompt differ by up to {apart:.1f}; expected "
            f"at most {APART:g}: kernels for few rows and for many rows disagree"
        )
    return None


def kernel_lines(results: Sequence[Mapping[str, Any]], mode: str) -> Iterator[str]:
    for one in results:
        if one["mode"] == mode and "error" not in one:
            kernels = "; ".join(f"{count} linears by {kernel}" for kernel, count in one["kernels"].items())
            yield f"{one['name']}: {one['dtype']}, weights {one['weight_bytes'] / 2**30:.2f} GiB, {kernels}{_judged(one)}"


def _judged(one: Mapping[str, Any]) -> str:
    kernel = announced(one["name"], one.get("hardware"), one["linear_backend"])
    if kernel is None:
        return ""
    same = all(kernel.lower() in ran.lower() for ran in one["kernels"])
    return f" ({'as' if same else 'not as'} `onptq plan` says: {kernel})"


def announced(name: str, hardware: str | None, backend: str | None) -> str | None:
    """The kernel that `onptq plan` names for such a checkpoint on a GPU of that generation; None if it names none."""
    try:
        scheme = Scheme.parse(name.split()[0])
    except OnPTQError:
        return None
    number, switch = (hardware or "").removeprefix("sm"), f"{SWITCH} {backend}" if backend else None
    for row in serving(scheme):
        generations = row.hardware.rpartition("sm")[2].split("/")
        if row.server == VLLM and number in generations and row.switch == switch:
            return row.kernel
    return None
