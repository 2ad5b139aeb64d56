"""Recurrent states: what a block carries from token to token, through the methods that transformers' classes call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Remembered = tuple[dict[int, Tensor], dict[int, Tensor]]


class RecurrentStates:
    """The last inputs of each block's convolution [B, channels, kernel] and its recurrent state, by layer."""

    def __init__(self) -> None:
        self.conv: dict[int, Tensor] = {}
        self.recurrent: dict[int, Tensor] = {}
        self.remembered: Remembered = {}, {}

    @property
    def states_nbytes(self) -> int:
        parts = (self.conv, self.recurrent, *self.remembered)
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    def get_conv_state(self, layer: int, **_: Any) -> Tensor | None:
        return self.conv.get(layer)

    def get_recurrent_state(self, layer: int, **_: Any) -> Tensor | None:
        return self.recurrent.get(layer)

    def is_recording_past(self, layer: int) -> bool:
        return False

    def update_conv_state(self, inputs: Tensor, layer: int, *, conv_kernel_size: int, **_: Any) -> Tensor:
        """The inputs [B, channels, S] behind those that were there, at least as many as the kernel reads."""
        before = self.conv.get(layer)
        lacking = max(0, conv_kernel_size - inputs.shape[-1])
        whole = functional.pad(inputs, (lacking, 0)) if before is None else torch.cat((before, inputs), dim=-1)
        self.conv[layer] = whole[..., -conv_kernel_size:].clone()
        return whole

    def update_recurrent_state(self, state: Tensor, layer: int, **_: Any) -> Tensor:
        self.recurrent[layer] = state
        return state

    def remember(self) -> None:
        """Keep the present states: `restore` goes back to them."""
        self.remembered = _copied(self.conv), _copied(self.recurrent)

    def restore(self) -> None:
        self.conv, self.recurrent = map(_copied, self.remembered)

    def take_states(self, rows: Tensor) -> None:
        """Make the batch these rows of it."""
        self.conv = {layer: tensor[rows] for layer, tensor in self.conv.items()}
        self.recurrent = {layer: tensor[rows] for layer, tensor in self.recurrent.items()}

    def put_states(self, rows: Tensor, batch: int, other: RecurrentStates) -> None:
        """Make another batch's states those of these rows, of `batch` in all."""
        for mine, others in ((self.conv, other.conv), (self.recurrent, other.recurrent)):
            for layer, tensor in others.items():
                mine.setdefault(layer, tensor.new_zeros(batch, *tensor.shape[1:]))[rows] = tensor


def _copied(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """Copies: a block may write to its state in place."""
    return {layer: tensor.clone() for layer, tensor in tensors.items()}
