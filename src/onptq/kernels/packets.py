"""Packets: codes and scales of activations in one tensor of their dtype, which goes wherever activations go."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
SCALE_ROWS = 4  # scales that an integer GEMM may read at a time, also those of the last rows
SCALE_SPACE = SCALE_ROWS * SCALE_BYTES  # bytes that every row has for its scale


def empty_packet(rows: int, width: int, like: Tensor) -> Tensor:
    """A packet for int8 codes [rows, width]; the width is a multiple of `SCALE_SPACE`."""
    return like.new_empty(rows, packet_width(width, like.dtype))


def packet_width(width: int, dtype: torch.dtype) -> int:
    """Columns of a packet of activations of `width` columns. The two differ, except for 16 columns of 16 bits."""
    return (width + SCALE_SPACE) // dtype.itemsize


def unpacked(packet: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Views of a packet: codes int8 [rows, width], then scales float32 [rows, 1]."""
    rows = packet.shape[0]
    values = packet.view(torch.int8).view(-1)
    codes, scales = values[: rows * width], values[rows * width : rows * (width + SCALE_BYTES)]
    return codes.view(rows, width), scales.view(torch.float32).view(rows, 1)
