"""The GEMM of a low-bit linear, `quantizer.integers.scaled_product`: exact integer sums, then scaled."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

from functools import cache

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from onptq.kernels import launching_on

# Most rows for a tile, and the tile: its rows, outputs and columns, warps, and stages of the pipeline from memory.
TILES = (
    (32, (32, 32, 256, 4, 5)),
    (128, (64, 64, 128, 4, 5)),
    (1024, (64, 128, 128, 4, 4)),
)
LARGEST = 128, 256, 128, 8, 3
NARROWER = 128, 128, 128, 8, 3
LARGEST_BYTES = 160 * 2**10  # of shared memory that the largest tile takes
ABREAST = 8  # tiles of rows that are computed side by side, so that weights are read once for all of them


def scaled_rows(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Codes int8 [T, I] and scales [T, 1] times codes int8 [O, I] and scales [O], plus bias [O]: [T, O] in `dtype`."""
    (rows, columns), outputs = codes.shape, len(weight)
    out = torch.empty(rows, outputs, dtype=dtype, device=codes.device)
    height, across, depth, warps, stages = _tile(rows, codes.device)
    with launching_on(codes):
        product_kernel[(triton.cdiv(rows, height) * triton.cdiv(outputs, across),)](
            codes,
            scale,
            weight,
            weight_scale,
            bias,
            out,
            rows,
            outputs,
            columns,
            BIAS=bias is not None,
            WHOLE=columns % depth == 0,
            ROWS=height,
            OUTPUTS=across,
            DEPTH=depth,
            ABREAST=ABREAST,
            num_warps=warps,
            num_stages=stages,
        )
    return out


def _tile(rows: int, device: torch.device) -> tuple[int, int, int, int, int]:
    for most, tile in TILES:
        if rows <= most:
            return tile
    return NARROWER if device.type == "cuda" and _shared_memory(device) < LARGEST_BYTES else LARGEST


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may have."""
    size: int = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return size


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    columns,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    ABREAST: tl.constexpr,
):
    """Rows and outputs beyond the last repeat the first, which spares every load a mask."""
    across = tl.cdiv(outputs, OUTPUTS)
    band = tl.program_id(0) // (ABREAST * across)
    held = tl.minimum(tl.cdiv(rows, ROWS) - band * ABREAST, ABREAST)
    place = tl.program_id(0) % (ABREAST * across)
    row = (band * ABREAST + place % held) * ROWS + tl.arange(0, ROWS)
    output = place // held * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, DEPTH)
    x_at = x_ptr + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * columns + column[None, :]
    weight_at = weight_ptr + tl.where(output < outputs, output, 0).to(tl.int64)[None, :] * columns + column[:, None]
    total = tl.zeros([ROWS, OUTPUTS], tl.int32)
    for first in range(0, columns, DEPTH):
        if WHOLE:
            x, weight = tl.load(x_at), tl.load(weight_at)
        else:
            inside = first + column < columns
            x = tl.load(x_at, mask=inside[None, :], other=0)
            weight = tl.load(weight_at, mask=inside[:, None], other=0)
        total = tl.dot(x, weight, total, out_dtype=tl.int32)
        x_at += DEPTH
        weight_at += DEPTH
    row_in, output_in = row < rows, output < outputs
    x_scale = tl.load(x_scale_ptr + row, mask=row_in, other=0.0).to(tl.float32)
    weight_scale = tl.load(weight_scale_ptr + output, mask=output_in, other=0.0).to(tl.float32)
    value = total.to(tl.float32) * x_scale[:, None] * weight_scale[None, :]
    if BIAS:
        value += tl.load(bias_ptr + output, mask=output_in, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=row_in[:, None] & output_in[None, :])
