"""Codes of activations and their steps in one tensor of the activations' dtype: it goes wherever the activations would."""

from __future__ import annotations

import torch
from torch import Tensor

STEP_BYTES = 4
ROOM = 16  # bytes a row has for its step: a product may read four steps at a time, of the last rows too


def empty_packet(rows: int, width: int, like: Tensor) -> Tensor:
    """For int8 codes [rows, width], the width in multiples of 16."""
    return like.new_empty(rows, (width + ROOM) // like.dtype.itemsize)


def unpacked(packet: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, width] and steps float32 [rows, 1], both where the packet has them: all codes, then all steps."""
    rows = packet.shape[0]
    values = packet.view(torch.int8).view(-1)
    codes, steps = values[: rows * width], values[rows * width : rows * (width + STEP_BYTES)]
    return codes.view(rows, width), steps.view(torch.float32).view(rows, 1)
