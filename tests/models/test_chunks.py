"""Chunked attention: a token sees those of its own chunk, under transformers' own masks and in every cache.

Of transformers' classes only Llama 4 has it, which is refused for its experts; so its masks are put over Llama's layers."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

from onptq.models.decoder import Cache, KVCache, SlotCache, Tokens, TreeCache, layer_masks, run_blocks
from onptq.models.structure import CHUNKED, FULL, Structure, find_structure

CHUNK, LENGTH = 8, 21


@pytest.fixture(scope="module")
def structure() -> Structure:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=[CHUNKED, FULL, CHUNKED],
        attention_chunk_size=CHUNK,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).double().eval().requires_grad_(False)
    return find_structure(model)


def hidden(batch: int = 2) -> Tensor:
    return torch.randn(batch, LENGTH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def positions(start: int, end: int, batch: int = 2) -> Tensor:
    return torch.arange(start, end).expand(1, batch, -1)


def by_transformers(structure: Structure, embeds: Tensor) -> Tensor:
    config, at = structure.decoder.config, positions(0, LENGTH)[0]
    given = {"config": config, "inputs_embeds": embeds, "attention_mask": None, "past_key_values": None}
    full = create_causal_mask(**given, position_ids=at)
    masks = {FULL: full, CHUNKED: create_chunked_causal_mask(**given, position_ids=at)}
    rotary = structure.decoder.rotary_emb(embeds, at)  # type: ignore[operator]
    for block in structure.blocks:
        embeds = block.module(embeds, attention_mask=masks[block.layer_type], position_embeddings=rotary)
    return embeds


def test_a_token_sees_its_own_chunk_up_to_itself(structure: Structure) -> None:
    masks = layer_masks(structure, Tokens(hidden(), positions(0, LENGTH), None))
    mask = masks[CHUNKED]
    assert mask is not None
    for query in range(LENGTH):
        seen = [key for key in range(LENGTH) if key <= query and key // CHUNK == query // CHUNK]
        assert mask[0, 0, query].nonzero()[:, 0].tolist() == seen
    assert masks[FULL] is None
    assert [block.chunk for block in structure.blocks] == [CHUNK, None, CHUNK]


def test_blocks_compute_what_they_compute_under_the_masks_of_transformers(structure: Structure) -> None:
    embeds = hidden()
    found = run_blocks(structure, Tokens(embeds, positions(0, LENGTH), None))
    torch.testing.assert_close(found, by_transformers(structure, embeds))
    unchunked = embeds
    rotary = structure.decoder.rotary_emb(embeds, positions(0, LENGTH)[0])  # type: ignore[operator]
    for block in structure.blocks:
        unchunked = block.module(unchunked, attention_mask=None, position_embeddings=rotary)
    assert not torch.allclose(found, unchunked)


@pytest.mark.parametrize("prefix", [5, 8, 13])
@pytest.mark.parametrize("kind", ["appended", "slots", "tree"])
def test_tokens_behind_a_cached_prefix_see_what_they_saw_in_one_pass(
    structure: Structure, prefix: int, kind: str
) -> None:
    """Prefixes that end within a chunk and at its end."""
    embeds = hidden()
    whole = run_blocks(structure, Tokens(embeds, positions(0, LENGTH), None))
    cache = KVCache(structure, 2, LENGTH, torch.float64, torch.device("cpu"))
    run_blocks(structure, Tokens(embeds[:, :prefix], positions(0, prefix), None), cache)
    slots, parts = torch.arange(LENGTH), []
    slot = torch.tensor([prefix])
    kinds: dict[str, Cache] = {"appended": cache, "slots": SlotCache(cache, slot), "tree": TreeCache(cache)}
    for token in range(prefix, LENGTH):
        seen = slots <= token if kind == "slots" else slots[: token + 1] >= 0
        mask = seen.expand(2, 1, 1, -1)
        slot.fill_(token)
        parts.append(
            run_blocks(structure, Tokens(embeds[:, token, None], positions(token, token + 1), mask), kinds[kind])
        )
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, prefix:])
