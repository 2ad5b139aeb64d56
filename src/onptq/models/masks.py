"""What each token of a prompt sees, read off the masks that the checkpoint's own forward gives its decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onptq.errors import OnPTQError
from onptq.models.structure import FULL, Structure


def mutual_runs(given: Any, structure: Structure, length: int) -> Tensor | None:
    """[P] the number of the run of tokens, if any, that see one another both ways, as an image's do in Gemma; 0 elsewhere.

    None where every token sees itself and what is before it. `given` is the decoder's mask of one prompt, or one mask
    by layer type. A mask that is neither is refused."""
    by_type: Mapping[str, Any] = given if isinstance(given, Mapping) else {FULL: given}
    seen = {kind: _visible(mask, length) for kind, mask in by_type.items()}
    visible = {kind: mask for kind, mask in seen.items() if mask is not None}
    if not visible:
        return None
    slots = torch.arange(length, device=next(iter(visible.values())).device)
    causal = slots[:, None] >= slots
    runs = _runs(next(iter(visible.values())))
    together = causal | ((runs[:, None] == runs) & (runs > 0))
    for block in structure.blocks:
        expected = together
        if block.window:
            expected = together & (slots[:, None] - slots < block.window)
        elif block.chunk:
            expected = together & (slots[:, None] // block.chunk == slots // block.chunk)
        found = visible.get(block.layer_type if isinstance(given, Mapping) else FULL)
        if found is not None and not torch.equal(found, expected):
            raise OnPTQError(
                f"{type(structure.decoder).__name__} masks layers of type {block.layer_type} neither causally nor with "
                "runs of tokens that see one another: unsupported"
            )
    return runs if bool(runs.any()) else None


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
