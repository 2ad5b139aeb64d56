"""Attention of towers within windows; on a GPU all windows in one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

NAME = "onptq_flash_windows"  # transformers gives the windows' bounds to implementations with "flash" in their names


def attend_windows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention [1, rows, heads, width] within windows, of queries, keys and values [1, heads, rows, width].

    Windows lie side by side, padded to the longest."""
    begin, length = cu_seq_lens_q[:-1, None], cu_seq_lens_q.diff()[:, None]
    within = torch.arange(max_length_q, device=query.device)
    real = within < length
    mask = None if real.numel() == query.shape[2] else real[:, None, None]  # windows of one size need no padding
    rows = (begin + within).clamp(max=query.shape[2] - 1)
    query, key, value = (tensor[0].transpose(0, 1)[rows].transpose(1, 2) for tensor in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return attended.transpose(1, 2)[real][None], None


AttentionInterface.register(NAME, attend_windows)


@contextmanager
def windows_at_once(model: nn.Module) -> Iterator[None]:
    """A context in which towers attend in one call. Without flash-attn, transformers calls once for every window."""
    kinds = {type(module): module for module in model.modules()}
    windowed = {kind for kind, one in kinds.items() if "cu_seqlens" in signature(one.forward).parameters}
    towers: list[Any] = [
        module.config for module in model.modules() if type(module) in windowed and hasattr(module, "config")
    ]
    before = [config._attn_implementation for config in towers]
    for config in towers:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, name in zip(towers, before, strict=True):
            config._attn_implementation = name
