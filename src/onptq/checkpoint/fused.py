"""Experts that a checkpoint stores in 3D tensors, seen as the linears that they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_LINEARS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Slice:
    """The rows of one expert's linear in a 3D tensor."""

    name: str  # of the 3D tensor
    expert: int
    first: int
    rows: int
    transposed: bool  # whether it stores inputs by outputs

    def read(self, shard: Any) -> Tensor:
        """The linear's weight [O, I] from an open safetensors file."""
        whole, end = shard.get_slice(self.name), self.first + self.rows
        if self.transposed:
            part: Tensor = whole[self.expert : self.expert + 1, :, self.first : end][0].t().contiguous()
        else:
            part = whole[self.expert : self.expert + 1, self.first : end][0].contiguous()
        return part


def slices(name: str, shape: tuple[int, ...], hidden: Any) -> Iterator[tuple[str, tuple[int, int], Slice]]:
    """The linears in a tensor by name, with their shapes [O, I]; none unless it holds experts.

    Qwen3-VL-MoE stores inputs by outputs, [E, H, 2 I] and [E, I, H], which the model's width tells. As in transformers,
    nothing is transposed where both would fit."""
    match = _FUSED.fullmatch(name)
    if match is None or len(shape) != 3:
        return
    joined = match[2] == "gate_up_proj"
    transposed = shape[2 if joined else 1] != hidden
    experts, outputs, inputs = (shape[0], shape[2], shape[1]) if transposed else shape
    linears = _LINEARS[match[2]]
    rows = outputs // len(linears)
    for expert in range(experts):
        for place, linear in enumerate(linears):
            part = Slice(name, expert, place * rows, rows, transposed)
            yield f"{match[1]}.{expert}.{linear}.weight", (rows, inputs), part
