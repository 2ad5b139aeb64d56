"""What folding leaves of a decoder layer, ready to be written: integers and steps, no theta."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FoldedLinear:
    """A scheme that leaves weights alone (W16A8) stores the dense weight itself in `codes`, with steps of one."""

    codes: Tensor  # int8 [O, I], signed codes in [-2^(b-1), 2^(b-1)-1]
    step: Tensor  # [O, G] in the checkpoint's storage dtype (G = 1 per row, or I/group_size)
    zero: Tensor | None  # int8 [O, G], asymmetric only; dequantized = (codes - zero) * step
    bias: Tensor | None  # [O], storage dtype


@dataclass(frozen=True)
class FoldedNorm:
    weight: Tensor  # [d], storage dtype
