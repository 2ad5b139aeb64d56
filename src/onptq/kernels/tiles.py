"""Parts of kernels over rows: how rows become tiles, and rounding that equals PyTorch's bit for bit."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from onptq.kernels.grid import code_range

TILE = 2048  # elements of a program's tile
WIDEST = 1024  # columns of a tile
WARPS = 8
MOST_WARPS = 16  # of a program that holds a row


def tiles(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """One program per few whole rows of [..., width]; a row longer than a tile is walked along."""
    width = x.shape[-1]
    rows = x.numel() // width
    columns = min(WIDEST, triton.next_power_of_2(width))
    held = min(TILE // columns, triton.next_power_of_2(rows))
    return (triton.cdiv(rows, held),), {"rows": rows, "width": width, "ROWS": held, "COLUMNS": columns}


def whole_rows(width: int, per_warp: int) -> dict[str, int]:
    """The shape of a program that holds a row in registers, about `per_warp` elements a warp."""
    whole = triton.next_power_of_2(width)
    return {"width": width, "WIDTH": whole, "num_warps": min(MOST_WARPS, max(1, whole // per_warp))}


def token_grid(x: Tensor, bits: int) -> dict[str, float]:
    """The constants of a grid with one scale per token."""
    low, high = code_range(bits)
    return {"LOW": low, "HIGH": high, "HALF": (2**bits - 1) / 2, "EPS": torch.finfo(x.dtype).eps}


@triton.jit
def saturated(v, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Comparisons, so that a NaN stays one."""
    v = tl.where(v < LOW, LOW * 1.0, v)
    return tl.where(v > HIGH, HIGH * 1.0, v)


@triton.jit
def rounded(v):
    """Half to even: at 1.5 * 2^23 the spacing of fp32 is 1, so the sum rounds to an integer. Exact below 2^22."""
    return (v + 12582912.0) - 12582912.0


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def divided(x, by):
    """A tile over what its rows or elements are divided by, with a division that is one."""
    return tl.div_rn(x, tl.broadcast_to(by, x.shape))


@triton.jit
def rows_here(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's rows, which of them exist, where they start in memory, and the columns of its first tile."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return row, row < rows, row.to(tl.int64)[:, None] * width, tl.arange(0, COLUMNS)[None, :]
