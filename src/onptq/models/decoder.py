"""The decoder as the cycle uses it: blocks run one by one over embeddings, with explicit positions, mask and cache.

Prompts of different lengths share a batch by padding on the right. Every slot's position is given, and the mask follows
from which slots are real, so neither padding nor a model's remembered rope offset can change a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onptq.models.attention import grouped_mask, in_groups, trusted_attention, wants_groups
from onptq.models.experts import routed
from onptq.models.masks import same_run
from onptq.models.recurrent import RecurrentStates
from onptq.models.sharding import ShardedBlocks, recomputed
from onptq.models.structure import RECURRENT, Block, Lent, Structure


class KVCache(RecurrentStates):
    """Keys and values of every block in slots allocated once, [B, kv_heads, slots, head_dim]; none of a recurrent block,
    which has a state, and of one that borrows another's."""

    def __init__(self, structure: Structure, batch: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        heads = [0 if block.recurrent or block.borrows else block.kv_heads for block in structure.blocks]
        shapes = [(batch, count, slots, block.head_dim) for count, block in zip(heads, structure.blocks, strict=True)]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        # [B, slots] where each slot's token is, for blocks that do not see all before it
        self.places = torch.zeros(batch, slots, dtype=torch.long, device=device) if structure.narrowed else None
        self.length = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values)) + self.states_nbytes

    @property
    def slots(self) -> int:
        return self.keys[0].shape[2]

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key.shape[2]
        self.keys[layer][:, :, self.length : end] = key
        self.values[layer][:, :, self.length : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def place(self, positions: Tensor) -> Tensor:
        """Positions [B, K] of all keys once those of tokens at `positions` [B, S] have been added."""
        assert self.places is not None
        end = self.length + positions.shape[1]
        self.places[:, self.length : end] = positions
        return self.places[:, :end]

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def rewind(self, length: int) -> None:
        """Drop what follows the first `length` slots; states go back to where they were remembered."""
        self.length = length
        self.restore()

    def take(self, rows: Tensor) -> None:
        """Make the batch these rows of it."""
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = tensor[rows]
        if self.places is not None:
            self.places = self.places[rows]
        self.take_states(rows)

    def put(self, rows: Tensor, other: KVCache) -> None:
        """Make another cache's rows these rows, in the first slots."""
        for mine, others in ((self.keys, other.keys), (self.values, other.values)):
            for tensor, given in zip(mine, others, strict=True):
                tensor[rows, :, : other.length] = given[:, :, : other.length]
        if self.places is not None and other.places is not None:
            self.places[rows, : other.length] = other.places[:, : other.length]
        self.put_states(rows, len(self.keys[0]), other)

    def fork(self, rows: Tensor, slots: int) -> KVCache:
        """A cache of these rows of the batch with room for `slots` more tokens. What it is given does not come here."""
        other = copy(self)
        other.keys, other.values = (
            [_roomier(tensor[rows], self.length, slots) for tensor in tensors] for tensors in (self.keys, self.values)
        )
        if self.places is not None:
            other.places = torch.nn.functional.pad(self.places[rows, : self.length], (0, slots))
        other.conv, other.recurrent, other.remembered = dict(self.conv), dict(self.recurrent), ({}, {})
        other.take_states(rows)
        return other


def _roomier(keys: Tensor, length: int, slots: int) -> Tensor:
    return torch.nn.functional.pad(keys[:, :, :length], (0, 0, 0, slots))


class SlotCache:
    """A cache that writes a token's keys into the slot that a tensor names and reads all slots, under a mask.

    From token to token only that tensor changes, so a GPU can replay what it did for one."""

    def __init__(self, cache: KVCache, slot: Tensor) -> None:
        self.cache, self.slot = cache, slot  # slot: [1]

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return keys.index_copy_(2, self.slot, key), values.index_copy_(2, self.slot, value)

    def get_conv_state(self, layer: int, **_: Any) -> Tensor | None:
        return self.cache.get_conv_state(layer)

    def get_recurrent_state(self, layer: int, **_: Any) -> Tensor | None:
        return self.cache.get_recurrent_state(layer)

    def is_recording_past(self, layer: int) -> bool:
        return False

    def update_recurrent_state(self, state: Tensor, layer: int, **_: Any) -> Tensor:
        return self.cache.recurrent[layer].copy_(state)

    def place(self, positions: Tensor) -> Tensor:
        assert self.cache.places is not None
        return self.cache.places.index_copy_(1, self.slot, positions)

    def advance(self, tokens: int) -> None:
        """Do nothing: the owner of the slot tensor moves it."""


class TreeCache:
    """A cache of branches on top of a cached prefix, which is read and never written; the branches' keys follow it."""

    def __init__(self, prefix: KVCache) -> None:
        self.prefix = prefix
        self.keys: list[Tensor | None] = [None] * len(prefix.keys)
        self.values: list[Tensor | None] = [None] * len(prefix.values)
        self.places: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        old_key, old_value = self.keys[layer], self.values[layer]
        if old_key is not None and old_value is not None:
            key, value = torch.cat((old_key, key), dim=2), torch.cat((old_value, value), dim=2)
        self.keys[layer], self.values[layer] = key, value
        length = self.prefix.length
        prefix_key, prefix_value = self.prefix.keys[layer][:, :, :length], self.prefix.values[layer][:, :, :length]
        return torch.cat((prefix_key, key), dim=2), torch.cat((prefix_value, value), dim=2)

    def place(self, positions: Tensor) -> Tensor:
        assert self.prefix.places is not None
        self.places = positions if self.places is None else torch.cat((self.places, positions), dim=1)
        return torch.cat((self.prefix.places[:, : self.prefix.length], self.places), dim=1)

    def advance(self, tokens: int) -> None:
        """Do nothing: the prefix keeps its length."""


Cache = KVCache | SlotCache | TreeCache


@dataclass(frozen=True)
class Tokens:
    """The input of the decoder."""

    embeds: Tensor  # [B, S, d], and behind them the inputs of their own that layers read
    positions: Tensor  # [A, B, S]; A = 3 for M-RoPE, else 1
    mask: Tensor | None  # [B, 1, S, K], True where a query sees a key; None: each slot itself and all before it
    deepstack: Sequence[Tensor] = ()  # features [B, S, d] that DeepStack adds after the first blocks
    runs: Tensor | None = None  # [types, B, S] of whole prompts: tokens that see one another both ways
    routes: Mapping[int, Tensor] = field(default_factory=dict)  # experts [B, S, k] by block, where no router decides


def layer_masks(structure: Structure, tokens: Tokens, cache: Cache | None = None) -> dict[str, Tensor | None]:
    """The mask [B, 1, S, K] of every layer type; None where each slot sees itself and all before it."""
    masks: dict[str, Tensor | None] = dict.fromkeys(structure.types, tokens.mask)
    if not structure.narrowed and tokens.runs is None:
        return masks | _unmasked(structure)
    queries, causal = tokens.positions[0], tokens.mask
    if causal is None:
        slots = torch.arange(queries.shape[1], device=queries.device)
        causal = (slots[:, None] >= slots)[None, None]
    for kind, runs in zip(structure.types, () if tokens.runs is None else tokens.runs, strict=False):
        if bool(runs.any()):
            masks[kind] = causal | same_run(runs)[:, None]
    if structure.narrowed:
        keys = queries if cache is None else cache.place(queries)
        at, behind = queries[:, None, :, None], keys[:, None, None, :]
        for kind, block in {block.layer_type: block for block in structure.blocks}.items():
            mask = masks[kind]
            if block.window:
                masks[kind] = (causal if mask is None else mask) & (at - behind < block.window)
            elif block.chunk:
                masks[kind] = (causal if mask is None else mask) & (at // block.chunk == behind // block.chunk)
    return masks | _unmasked(structure)


def _unmasked(structure: Structure) -> dict[str, Tensor | None]:
    """No mask for recurrent blocks: what they see is their state."""
    return {RECURRENT: None} if structure.recurrent else {}


def run_blocks(
    structure: Structure,
    tokens: Tokens,
    cache: Cache | None = None,
    observe: Callable[[int, Tensor], None] | None = None,
    checkpointed: bool = False,
    sharded: ShardedBlocks | None = None,
) -> Tensor:
    """The residual stream after the last block, before the final norm; `observe` sees it after every block."""
    hidden, own = structure.parted(tokens.embeds)
    rotary = structure.rotary(hidden, tokens.positions)
    masks = layer_masks(structure, tokens, cache)
    grouped = any(map(wants_groups, masks.values()))
    if grouped:
        groups = {block.layer_type: block.groups for block in structure.blocks}
        masks = {
            kind: None if mask is None else grouped_mask(mask, groups[kind], hidden.dtype)
            for kind, mask in masks.items()
        }
    if checkpointed:
        hidden = hidden.detach().requires_grad_()  # or the first block's parameters would have no gradient

    def step(block: Block, hidden: Tensor, *borrowed: Tensor) -> tuple[Tensor, ...]:
        """The output of a block, and the keys and values that it lends."""
        mask, shared = masks[block.layer_type], {block.layer_type: borrowed} if borrowed else {}
        arguments = structure.arguments(block, tokens.positions, mask, rotary, cache, shared) | own[block.index]
        grouping = in_groups(block.module) if mask is not None and grouped else nullcontext()
        with trusted_attention(), grouping, routed(block.module, tokens.routes.get(block.index)):
            out: Tensor = block.module(hidden, **arguments)
        return (out, *shared[block.layer_type]) if block.lends else (out,)

    lent: Lent = {}
    for block in structure.blocks:
        borrowed = lent[block.layer_type] if block.borrows else ()
        if checkpointed:
            around = nullcontext if sharded is None else partial(sharded.gathered, block.index, back=True)
            hidden, *lending = recomputed(partial(step, block), around, hidden, *borrowed)
        else:
            hidden, *lending = step(block, hidden, *borrowed)
        if block.lends:
            lent[block.layer_type] = tuple(lending)
        if observe is not None:
            observe(block.index, hidden)
        if block.index < len(tokens.deepstack):
            hidden = hidden + tokens.deepstack[block.index]
    if cache is not None:
        cache.advance(hidden.shape[1])
    return hidden


class _HeadProduct(torch.autograd.Function):
    """rows @ weight.T summed and returned in fp32; the head is frozen, so only the rows have a gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = rows.dtype
        if rows.is_cuda and rows.dtype != torch.float32:
            return torch.mm(rows, weight.T, out_dtype=torch.float32)
        wide = torch.promote_types(rows.dtype, torch.float32)
        return rows.to(wide) @ weight.to(wide).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return (grad.to(weight.dtype) @ weight).to(ctx.dtype), None


def head_logits(structure: Structure, hidden: Tensor) -> Tensor:
    """Final norm and output head, [..., d] to fp32 [..., V]: margins are finer than bf16's grid at 20 to 30."""
    hidden = structure.decoder.norm(hidden)  # type: ignore[operator]
    if not structure.has_plain_head:
        return structure.capped(structure.head(hidden).float())
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits: Tensor = _HeadProduct.apply(rows, structure.head.weight)  # type: ignore[no-untyped-call]
    if structure.head.bias is not None:
        logits = logits + structure.head.bias.to(logits.dtype)
    logits = structure.capped(logits)
    return logits.view(*hidden.shape[:-1], logits.shape[-1])
