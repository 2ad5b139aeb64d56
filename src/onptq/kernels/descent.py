"""A step of signed gradient descent in one pass over memory, equal to the plain one in `methods.signround`."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from onptq.kernels import launching_on
from onptq.kernels.tiles import TILE, WARPS, saturated, sign


def signed_step(parameter: Tensor, gradient: Tensor, rate: float, low: float, high: float) -> None:
    """Move the parameter in place; both tensors are contiguous."""
    count = parameter.numel()
    with launching_on(parameter):
        launch = _signed_step[(triton.cdiv(count, TILE),)]
        launch(parameter, gradient, rate, count, LOW=low, HIGH=high, TILE=TILE, num_warps=WARPS)


@triton.jit
def _signed_step(parameter_ptr, gradient_ptr, rate, count, LOW: tl.constexpr, HIGH: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    direction = sign(tl.load(gradient_ptr + at, mask=inside, other=0.0))
    moved = tl.load(parameter_ptr + at, mask=inside, other=0.0) - direction * rate
    tl.store(parameter_ptr + at, saturated(moved, LOW, HIGH), mask=inside)
