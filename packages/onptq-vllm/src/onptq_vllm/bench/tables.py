"""The measurements as rows of text, each beside the dense model and, for the paper's model, the paper's number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onptq.checkpoint.serving import SWITCH, VLLM, serving
from onptq.errors import OnPTQError
from onptq.schemes import Scheme
from onptq_vllm.bench.paper import PAPER
from onptq_vllm.bench.variants import DENSE

APART = 2.0  # of a log-probability, by which rounding alone does not set decoding and reading apart

HEADS = ("checkpoint", "batch", "prefill ms", "speedup", "decode ms/token", "speedup", "peak GiB", "less")
PAPER_HEAD = "paper"


def rows(results: Sequence[Mapping[str, Any]], mode: str, paper: bool = False) -> Iterator[tuple[str, ...]]:
    """A row for every checkpoint and batch of a mode that came to an end; `paper` adds the paper's numbers."""
    measured = [one for one in results if one["mode"] == mode and "error" not in one]
    dense = next((one for one in measured if one["name"] == DENSE), None)
    base = {} if dense is None else {row["batch"]: row for row in _with_peak(dense)}
    for one in measured:
        for row in _with_peak(one):
            cells = _row(one["name"], row, None if one is dense else base.get(row["batch"]))
            yield (*cells, paper_cell(one["name"], row["batch"])) if paper else cells


def _with_peak(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The most memory: what the engine has reserved, where it says so, since graphs hold more than their tensors show."""
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
    """Prefills between which something was decoded, a line for each batch: a GPU that is not always busy is faster."""
    key = "prefill_between_seconds"
    found = [
        (one["name"], row)
        for one in results
        if one["mode"] == mode and "error" not in one
        for row in one["batches"]
        if key in row
    ]
    base = {row["batch"]: row for name, row in found if name == DENSE}
    said: dict[int, list[str]] = {}
    for name, row in found:
        times = _times(row, None if name == DENSE else base.get(row["batch"]), key)
        said.setdefault(row["batch"], []).append(f"{name} {1e3 * row[key]:.2f} ms" + f" ({times})" * bool(times))
    for batch, each in said.items():
        yield f"prefill with decoding between, batch {batch}: {', '.join(each)}"


def _times(row: Mapping[str, Any], base: Mapping[str, Any] | None, key: str) -> str:
    if base is None or row[key] <= 0:  # a difference of two noisy times may be anything
        return ""
    return f"{base[key] / row[key]:.2f}x"


def _less(peak: int | None, base: int | None) -> str:
    return "" if not peak or not base else f"{100 * (1 - peak / base):.1f}%"


def paper_cell(name: str, batch: int) -> str:
    """The paper's prefill and peak memory; for the quantized row also what they are of its FP16."""
    of = {(row["name"], row["batch"]): row for row in PAPER["rows"]}
    found = of.get(("FP16" if name == DENSE else name, batch))
    if found is None:
        return ""
    text = f"{1e3 * found['prefill_seconds']:.2f} ms, {found['peak_bytes'] / 1e9:.2f} GB"
    if name == DENSE:
        return text
    base = of["FP16", batch]
    times = base["prefill_seconds"] / found["prefill_seconds"]
    return f"{text}: {times:.2f}x, {100 * (1 - found['peak_bytes'] / base['peak_bytes']):.1f}% less"


def problem(one: Mapping[str, Any]) -> str | None:
    """Why a measurement must not be used."""
    if "error" in one:
        return str(one["error"])
    if one.get("not_finite"):
        return f"{one['not_finite']:,} log-probabilities are not numbers: its kernels compute wrongly"
    if (apart := one.get("decoded_apart", 0.0)) > APART:
        return (
            f"log-probabilities of decoded tokens are up to {apart:.1f} off those of the same tokens in a prompt, expected at "
            f"most {APART:g}: kernels for few rows and for many do not compute the same"
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
    return f" ({'as' if same else 'not what'} `onptq plan` announces: {kernel})"


def announced(name: str, hardware: str | None, backend: str | None) -> str | None:
    """The kernel that a plan names for such a checkpoint on a GPU of that generation; None where it names none."""
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
