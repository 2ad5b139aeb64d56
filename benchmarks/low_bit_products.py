"""Products of W4A8 linears at published shapes: are they right, and how fast beside 16-bit ones?

    python benchmarks/low_bit_products.py --model qwen2.5-vl-7b --out result.json
    python benchmarks/low_bit_products.py --tiny --out result.json                       # on a CPU, without humming

Random codes and steps for every linear, random inputs for every row of the table. Right is what exact integers give: reported
are values that are not finite, and the largest difference of the others as a share of the largest value. Activations are
quantized beforehand, and launches are not counted; the weights of one row's product may lie in the GPU's cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from floors import median_seconds
from gpu_calibration import environment, save, tiny_shape
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from onptq.checkpoint.source import choose_device
from onptq.quantizer.integers import LowBitLinear, integer_product, scaled_product
from onptq.quantizer.numerics import code_range
from onptq.zoo.published import PUBLISHED, find_published
from onptq_vllm.linears.humming import HummingLinear, rows_with_room
from onptq_vllm.schedules.captured import captured_seconds
from onptq_vllm.schedules.shapes import joined

ROWS, TINY_ROWS = (1, 8, 2048, 16384), (1, 20)
CHECKED = 2048  # rows that are compared, from the first and from the last; the exact product takes memory
WEIGHT_BITS, ACTIVATION_BITS = 4, 8
CALLS, REPLAY, RATE = (
    32,
    2e-3,
    1e15,
)  # at most so many in a captured graph of about so many seconds, at that many operations each

Multiply = Callable[[Tensor, Tensor], Tensor]  # of activations' codes and steps


def random_linear(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> LowBitLinear:
    low, high = code_range(WEIGHT_BITS)
    codes = torch.randint(low, high + 1, (outputs, inputs), device=device, dtype=torch.int8)
    step = (torch.rand(outputs, device=device) * 1e-3 + 1e-4).to(dtype)
    return LowBitLinear(codes, step, None, ACTIVATION_BITS)


def errors(found: Tensor, codes: Tensor, step: Tensor, linear: LowBitLinear) -> dict[str, float]:
    """Of the first and the last rows, in float64."""
    bad, largest, most = 0, 0.0, 0.0
    for begin in {0, max(0, len(found) - CHECKED)}:
        rows = slice(begin, begin + CHECKED)
        exact = integer_product(codes[rows], linear.codes).double() * step[rows].double() * linear.step.double()
        finite = found[rows].isfinite()
        bad += int((~finite).sum())
        largest = max(largest, float((found[rows].double() - exact).abs().where(finite, 0).max()))
        most = max(most, float(exact.abs().max()))
    return {"not_finite": bad, "largest_difference": largest / most}


def multiplier(linear: LowBitLinear, by: str) -> Multiply:
    if by == "humming":
        humming = HummingLinear(linear).layer
        return lambda codes, step: humming(codes, input_scale=step)
    return lambda codes, step: scaled_product(codes, step, linear.codes, linear.step, None, linear.step.dtype)


def measure(linear: LowBitLinear, multiply: Multiply, rows: int) -> dict[str, Any]:
    dtype, device = linear.step.dtype, linear.step.device
    x = torch.randn(rows, linear.in_features, device=device).to(dtype)
    weight = torch.randn(linear.out_features, linear.in_features, device=device).to(dtype)
    codes, step = rows_with_room(x, ACTIVATION_BITS)
    operations = 2 * rows * linear.out_features * linear.in_features

    def timed(operation: Callable[[], object]) -> float:
        if device.type != "cuda":
            return median_seconds(operation, device)
        return captured_seconds(lambda call: operation(), max(1, min(CALLS, int(REPLAY * RATE / operations))))

    seconds = {
        "dense": timed(partial(F.linear, x, weight)),
        "low-bit": timed(partial(multiply, codes, step)),
    }
    wrong = errors(multiply(codes, step), codes, step, linear)
    return {"rows": rows, "seconds": seconds, "operations": operations} | wrong


def show(console: Console, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    table = Table("linear", box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("rows", "dense ms", "low-bit ms", "times", "TOP/s", "not finite", "largest difference"):
        table.add_column(head, justify="right")
    for name, rows in found.items():
        for row in rows:
            dense, low = row["seconds"]["dense"], row["seconds"]["low-bit"]
            rate, times = f"{row['operations'] / low / 1e12:,.1f}", f"{dense / low:.2f}x"
            wrong = str(row["not_finite"]), f"{row['largest_difference']:.1e}"
            table.add_row(name, f"{row['rows']:,}", f"{1e3 * dense:.4f}", f"{1e3 * low:.4f}", times, rate, *wrong)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-vl-7b", choices=PUBLISHED)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--by", choices=("humming", "onptq"), help="whose product; humming's unless there is no GPU")
    parser.add_argument("--rows", type=int, nargs="+", help="tokens of a product")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU multiplies in a moment")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every number to FILE")
    arguments = parser.parse_args(argv)
    device, dtype = choose_device("auto"), getattr(torch, arguments.dtype)
    shape = find_published(arguments.model)
    dims = (tiny_shape(shape) if arguments.tiny else shape).dims
    torch.manual_seed(0)
    found: dict[str, list[dict[str, Any]]] = {}
    by = arguments.by or ("humming" if device.type == "cuda" else "onptq")
    report = {"model": arguments.model, "tiny": arguments.tiny, "dtype": arguments.dtype, "by": by}
    report |= environment(device)
    try:
        report["versions"]["humming-kernels"] = version("humming-kernels")
    except PackageNotFoundError:
        report["versions"]["humming-kernels"] = None
    shapes = joined(dims.hidden, dims.ffn, dims.heads, dims.kv_heads, dims.head_dim)
    for name, (outputs, inputs) in shapes.items():
        linear = random_linear(outputs, inputs, dtype, device)
        multiply = multiplier(linear, by)
        for rows in arguments.rows or (TINY_ROWS if arguments.tiny else ROWS):
            found.setdefault(name, []).append({"shape": [outputs, inputs]} | measure(linear, multiply, rows))
            save(arguments.out, report | {"products": found})
    show(Console(width=110 if not sys.stdout.isatty() else None, highlight=False), found)
    return int(any(row["not_finite"] for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
