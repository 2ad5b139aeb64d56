"""Folded parts of a decoder layer, ready to be written: integers and scales, no theta."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FoldedLinear:
    """Codes and scales of a linear.

    A scheme with 16-bit weights (W16A8) has the dense weight in `codes`, with scales of one."""

    codes: Tensor  # [O, I]: int8 in [-2^(b-1), 2^(b-1)-1], or floats as E4M3
    scale: Tensor  # [O, G] in the checkpoint's storage dtype (G = 1 per row, or I/group_size); per block [O/128, I/128]
    zero: Tensor | None  # int8 [O, G], asymmetric only; dequantized = (codes - zero) * scale
    bias: Tensor | None  # [O], storage dtype
    tensor_scale: Tensor | None = None  # scales times it are numbers of E4M3
    input_scale: Tensor | None = None  # the same of the input's scales


@dataclass(frozen=True)
class FoldedCache:
    """The scales of one layer's cached keys and values, [1] each, in the storage dtype."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class FoldedNorm:
    """The gain of a norm, divided by the smoothing behind it."""

    weight: Tensor  # [d], storage dtype


@dataclass(frozen=True)
class FoldedFollower:
    """The weight of what reads a smoothed input and stays 16-bit, times the smoothing before it."""

    weight: Tensor  # [O, I], storage dtype


Folded = FoldedLinear | FoldedNorm | FoldedFollower | FoldedCache
