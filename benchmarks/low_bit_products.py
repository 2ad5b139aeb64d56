"""GEMMs of W4A8 linears at published shapes: their errors, and their speed beside 16-bit ones.

    python benchmarks/low_bit_products.py --model qwen2.5-vl-7b --out result.json
    python benchmarks/low_bit_products.py --tiny --out result.json                       # on a CPU, without humming

Codes, scales and inputs are random. Errors are against exact integers: the number of values that are not finite, and
the largest difference of the others as a share of the largest value. Activations are quantized before, and launches do
not count. The weights of a GEMM may lie in the GPU's cache.
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
from onptq.kernels.grid import code_range
from onptq.quantizer.integers import LowBitLinear, integer_product, scaled_product
from onptq_vllm.bench.published import PUBLISHED, find_published
from onptq_vllm.linears.humming import HummingLinear, codes_with_padded_scales
from onptq_vllm.schedules.captured import captured_seconds
from onptq_vllm.schedules.shapes import joined

ROWS, TINY_ROWS = (1, 8, 2048, 16384), (1, 20)
CHECKED = 2048  # rows at the beginning and at the end that are compared; the exact GEMM takes memory
WEIGHT_BITS, ACTIVATION_BITS = 4, 8
CALLS = 32  # of a captured graph, at most
REPLAY, RATE = 2e-3, 1e15  # seconds of a captured graph, about, at so many operations per second

Multiply = Callable[[Tensor, Tensor], Tensor]  # from codes and scales of activations


def random_linear(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> LowBitLinear:
    low, high = code_range(WEIGHT_BITS)
    codes = torch.randint(low, high + 1, (outputs, inputs), device=device, dtype=torch.int8)
    scale = (torch.rand(outputs, device=device) * 1e-3 + 1e-4).to(dtype)
    return LowBitLinear(codes, scale, None, ACTIVATION_BITS)


def errors(result: Tensor, codes: Tensor, scale: Tensor, linear: LowBitLinear) -> dict[str, float]:
    """Errors of the first and the last rows, in float64."""
    bad, largest, most = 0, 0.0, 0.0
    for begin in {0, max(0, len(result) - CHECKED)}:
        rows = slice(begin, begin + CHECKED)
        exact = integer_product(codes[rows], linear.codes).double() * scale[rows].double() * linear.scale.double()
        finite = result[rows].isfinite()
        bad += int((~finite).sum())
        largest = max(largest, float((result[rows].double() - exact).abs().where(finite, 0).max()))
        most = max(most, float(exact.abs().max()))
    return {"not_finite": bad, "largest_difference": largest / most}


def multiplier(linear: LowBitLinear, by: str) -> Multiply:
    if by == "humming":
        humming = HummingLinear(linear).layer
        return lambda codes, scale: humming(codes, input_scale=scale)
    return lambda codes, scale: scaled_product(codes, scale, linear.codes, linear.scale, None, linear.scale.dtype)


def measure(linear: LowBitLinear, multiply: Multiply, rows: int) -> dict[str, Any]:
    dtype, device = linear.scale.dtype, linear.scale.device
    x = torch.randn(rows, linear.in_features, device=device).to(dtype)
    weight = torch.randn(linear.out_features, linear.in_features, device=device).to(dtype)
    codes, scale = codes_with_padded_scales(x, ACTIVATION_BITS)
    operations = 2 * rows * linear.out_features * linear.in_features

    def timed(operation: Callable[[], object]) -> float:
        if device.type != "cuda":
            return median_seconds(operation, device)
        return captured_seconds(lambda call: operation(), max(1, min(CALLS, int(REPLAY * RATE / operations))))

    seconds = {
        "dense": timed(partial(F.linear, x, weight)),
        "low-bit": timed(partial(multiply, codes, scale)),
    }
    wrong = errors(multiply(codes, scale), codes, scale, linear)
    return {"rows": rows, "seconds": seconds, "operations": operations} | wrong


def show(console: Console, products: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    table = Table("linear", box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("rows", "dense ms", "low-bit ms", "times", "TOP/s", "not finite", "largest difference"):
        table.add_column(head, justify="right")
    for name, rows in products.items():
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
    parser.add_argument("--by", choices=("humming", "onptq"), help="whose GEMM; default: humming's on a GPU")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of a GEMM")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU multiplies in a moment")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every number to FILE")
    arguments = parser.parse_args(argv)
    device, dtype = choose_device("auto"), getattr(torch, arguments.dtype)
    shape = find_published(arguments.model)
    dims = (tiny_shape(shape) if arguments.tiny else shape).dims
    torch.manual_seed(0)
    products: dict[str, list[dict[str, Any]]] = {}
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
            products.setdefault(name, []).append({"shape": [outputs, inputs]} | measure(linear, multiply, rows))
            save(arguments.out, report | {"products": products})
    show(Console(width=110 if not sys.stdout.isatty() else None, highlight=False), products)
    return int(any(row["not_finite"] for rows in products.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
