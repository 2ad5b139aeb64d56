"""Heads that share keys, together instead of on copies of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Tiny
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from onptq.cycle.branch import branch
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.methods.rtn import rtn
from onptq.models import decoder
from onptq.models.attention import attend_in_groups, grouped_mask, wants_groups


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def oracle(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Head by head and row by row."""
    batch, heads, rows, width = query.shape
    out = torch.zeros(batch, rows, heads, width, dtype=query.dtype)
    for b in range(batch):
        for h in range(heads):
            shared = h // (heads // key.shape[1])
            for row in range(rows):
                seen = mask[b, 0, row].nonzero()[:, 0]
                weight = (scaling * key[b, shared, seen] @ query[b, h, row]).softmax(0)
                out[b, row, h] = weight @ value[b, shared, seen]
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("rows", [1, 5])
def test_heads_that_share_keys_see_what_each_saw_alone(rows: int, heads: int, kv_heads: int) -> None:
    query, key, value = (
        drawn(2, count, size, 8, seed=size) for count, size in ((heads, rows), (kv_heads, 9), (kv_heads, 9))
    )
    value = value.flip(2)
    mask = drawn(2, 1, rows, 9, seed=3) > 0
    mask[..., 4] = True
    module = nn.Module()
    module.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    folded = grouped_mask(mask, heads // kv_heads, query.dtype)
    ours, _ = attend_in_groups(module, query, key, value, folded, scaling=0.3, dropout=0.0)
    assert all(stride % 8 == 0 for stride in folded.stride()[:-1])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours, oracle(query, key, value, mask, 0.3))


def test_on_a_cpu_and_without_a_mask_attention_is_that_of_transformers() -> None:
    assert not wants_groups(None)
    assert not wants_groups(torch.ones(1, 1, 1, 1, dtype=torch.bool))


@pytest.mark.parametrize("family", ["qwen2.5-omni", "qwen3-vl", "llama"])
def test_rollouts_comparisons_and_branches_are_the_same_in_groups(
    tiny: Callable[[str], Tiny], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    policy = model.policy("W4A16")
    policy.freeze(rtn(policy))
    prompts = model.encode(policy, 3)
    calls: list[Tensor] = []
    results = []

    def wants(mask: Tensor | None) -> bool:
        calls.extend(() if mask is None else (mask,))
        return mask is not None

    for grouped in (False, True):
        if grouped:
            monkeypatch.setattr(decoder, "wants_groups", wants)
        prefixes = Prefixes(policy, prompts, max_tokens=6)
        trajectories = follow(prefixes)
        states = branch(prefixes, trajectories, compare(prefixes, trajectories), horizon=2)
        results.append((trajectories, states))
        assert bool(calls) == grouped
        modules: list[Any] = [block.module for block in policy.structure.blocks]
        assert {module.self_attn.config._attn_implementation for module in modules} == {"sdpa"}
    (plain, states), (together, grouped_states) = results
    assert plain == together
    for name in states.__dataclass_fields__:
        torch.testing.assert_close(
            torch.as_tensor(getattr(grouped_states, name)), torch.as_tensor(getattr(states, name)), rtol=1e-4, atol=1e-5
        )
