"""GPTQ's rounding on the searched grid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Tiny
from method_bed import PROMPTS, check_manners, exact_policy, open_small, short_responses

from onptq.methods.gptq import gptq
from onptq.methods.search import search
from onptq.methods.search_gptq import search_gptq


@pytest.fixture(scope="module")
def bed(small: Path):
    opened = open_small(small)
    policy = exact_policy(opened, "W3A8")
    prompts = opened.encode(policy, PROMPTS)
    return policy, prompts, short_responses(prompts)


def test_the_grid_is_the_searched_one_and_the_codes_are_gptqs_on_it(bed) -> None:
    policy, prompts, responses = bed
    found = search_gptq(policy, prompts, responses=responses)
    grid = search(policy, prompts, responses=responses)
    for part in ("smoothing", "ratio"):
        assert all(torch.equal(value, getattr(found, part)[key]) for key, value in getattr(grid, part).items())
    codes = gptq(policy, prompts, responses=responses, start=grid)
    assert found.offset.keys() == codes.offset.keys()
    assert all(torch.equal(found.offset[key], codes.offset[key]) for key in codes.offset)
    assert any(offset.abs().max() > 0 for offset in found.offset.values())


def test_it_tells_of_every_block_and_leaves_the_policy_as_it_was(tiny: Callable[[str], Tiny]) -> None:
    check_manners(
        tiny("qwen3-vl"),
        "W4A8",
        lambda policy, prompts, advance: search_gptq(policy, prompts, advance, responses=short_responses(prompts)),
    )
