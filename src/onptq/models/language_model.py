"""A language model as the engine runs it: blocks over encoded prompts, explicit positions and explicit caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from onptq.errors import OnPTQError
from onptq.models.decoder import Cache, KVCache, Tokens, head_logits, run_blocks
from onptq.models.sharding import ShardedBlocks
from onptq.models.structure import Structure, find_structure

Side = Literal["D", "Q"]


class LanguageModel:
    """A checkpoint as it was loaded, dense or quantized. Both sides compute the same; those of a `Policy` differ."""

    def __init__(self, model: nn.Module, eos: Sequence[int] = (), *, structure: Structure | None = None) -> None:
        self.model, self.eos = model.eval().requires_grad_(False), frozenset(eos)
        self.structure = structure or find_structure(model, linears=nn.Module)
        weight = self.structure.embedding.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.sharded: ShardedBlocks | None = None

    @property
    def generation(self) -> tuple[int, int]:
        """The identity of the present Q, part of the key of every cache of what Q computed."""
        return 0, 0

    @property
    def blocks(self) -> int:
        return len(self.structure.blocks)

    @property
    def vocabulary(self) -> int:
        head = self.structure.head
        return head.weight.shape[0] if self.structure.has_plain_head else head.out_features

    def speaking(self, side: Side) -> AbstractContextManager[None]:
        """A context in which the model computes as `side`."""
        return nullcontext()

    def embed(self, ids: Tensor) -> Tensor:
        return self.structure.embed(ids)

    def cache(self, batch: int, slots: int) -> KVCache:
        return KVCache(self.structure, batch, slots, self.dtype, self.device)

    def run(
        self,
        tokens: Tokens,
        cache: Cache | None = None,
        observe: Callable[[int, Tensor], None] | None = None,
        checkpointed: bool = False,
    ) -> Tensor:
        """The residual stream [B, S, d] after the last block; `observe` sees it after every block."""
        if self.sharded is not None and torch.is_grad_enabled() and not checkpointed:
            raise OnPTQError(
                "gradients through the whole model need all of its blocks at once, and they are sharded: expected another "
                "init, or compute.shard=never"
            )
        return run_blocks(self.structure, tokens, cache, observe, checkpointed, self.sharded)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head: [..., d] to fp32 [..., V]."""
        return head_logits(self.structure, hidden)
