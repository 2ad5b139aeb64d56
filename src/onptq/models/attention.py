"""The attention kernels of PyTorch that may run, and grouped masks for them on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

TRUSTED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NAME = "onptq_groups"
ALIGNED = 8  # numbers at which rows of a mask begin; others are copied in every block


def trusted_attention() -> AbstractContextManager[None]:
    """A context without cuDNN's attention, which PyTorch 2.11 and later prefer on Hopper GPUs.

    It makes a plan for every new shape, and here each token and each batch has a shape of its own. With 64 keys (small
    images have 64 patches) its gradient is NaN where a row's logsumexp is below -88.7, minus the log of the largest
    float: keys beyond the last count as exp(0 - logsumexp) times 0 (pytorch/pytorch#196678).
    """
    trusted: AbstractContextManager[None] = sdpa_kernel(TRUSTED)
    return trusted


def grouped_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A boolean mask [B, 1, S, K] as one to add to logits, once per query head of a group: [B, 1, groups S, K]."""
    hidden = ~mask.repeat(1, 1, groups, 1)
    *rows, keys = hidden.shape
    padded = torch.zeros(*rows, -(-keys // ALIGNED) * ALIGNED, dtype=dtype, device=mask.device)
    return padded[..., :keys].masked_fill_(hidden, -math.inf)


def attend_in_groups(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of query heads [B, heads, S, d] over fewer key heads, under a grouped mask.

    Query heads that share a key head are rows of one GEMM, so that no key is copied."""
    batch, heads, rows, width = query.shape
    together = query.reshape(batch, key.shape[1], -1, width)
    attended = functional.scaled_dot_product_attention(together, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(batch, heads, rows, width).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend_in_groups)


def wants_groups(mask: Tensor | None) -> bool:
    """Whether heads are to be grouped here: without a mask PyTorch does it itself."""
    return mask is not None and mask.is_cuda


@contextmanager
def in_groups(block: nn.Module) -> Iterator[None]:
    """A context in which no key is copied for every query head, as transformers does where there is a mask."""
    config: Any = block.self_attn.config  # type: ignore[union-attr]
    before, config._attn_implementation = config._attn_implementation, NAME
    try:
        yield
    finally:
        config._attn_implementation = before
