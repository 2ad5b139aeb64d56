"""What each token of a prompt sees, read off the masks that the checkpoint's own forward gives its decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onptq.errors import OnPTQError
from onptq.models.structure import Structure


def mutual_runs(given: Any, structure: Structure, length: int) -> Tensor | None:
    """[types, P] for every layer type the number of the run of tokens, if any, that see one another both ways, as an
    image's do in Gemma; 0 elsewhere.

    None where every token sees itself and what is before it. `given` is the decoder's mask of one prompt, or one mask
    by layer type. A mask that is neither is refused."""
    by_type: Mapping[str, Any] = given if isinstance(given, Mapping) else dict.fromkeys(structure.types, given)
    device = structure.embedding.weight.device
    slots = torch.arange(length, device=device)
    runs = torch.zeros(len(structure.types), length, dtype=torch.long, device=device)
    examples = {block.layer_type: block for block in structure.blocks}
    for place, kind in enumerate(structure.types):
        visible, block = _visible(by_type.get(kind), length), examples[kind]
        if visible is None:
            continue
        runs[place] = _runs(visible)
        expected = (slots[:, None] >= slots) | same_run(runs[place])
        if block.window:
            expected = expected & (slots[:, None] - slots < block.window)
        elif block.chunk:
            expected = expected & (slots[:, None] // block.chunk == slots // block.chunk)
        if not torch.equal(visible, expected):
            raise OnPTQError(
                f"{type(structure.decoder).__name__} masks layers of type {kind} neither causally nor with runs of tokens "
                "that see one another: unsupported"
            )
    return runs if bool(runs.any()) else None


def same_run(runs: Tensor) -> Tensor:
    """[..., P, P] True where both tokens belong to one run [..., P]."""
    return (runs[..., :, None] == runs[..., None, :]) & (runs[..., None, :] > 0)


def _visible(mask: Any, length: int) -> Tensor | None:
    """[P, P] True where a query sees a key; None without a mask of queries and keys."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    seen: Tensor = mask[0, 0, :length, :length]
    return seen if seen.dtype == torch.bool else seen == 0


def _runs(visible: Tensor) -> Tensor:
    """[P] the number, from 1, of each run of tokens that see the one after them; 0 for all others."""
    ahead = visible.diagonal(1)  # token i sees i + 1
    inside = torch.zeros(len(visible), dtype=torch.bool, device=visible.device)
    inside[:-1] |= ahead
    inside[1:] |= ahead
    begins = inside.clone()
    begins[1:] &= ~ahead
    return begins.cumsum(0) * inside
