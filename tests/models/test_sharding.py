"""Turns of processes that share blocks: which request is served, and what a process holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Tiny
from torch.distributed.tensor import DTensor

from onptq.engine.prefixes import whole_prompts
from onptq.errors import OnPTQError
from onptq.models.encoding import PromptBatch
from onptq.models.sharding import Part, Request, ShardedBlocks, choose
from onptq.quantizer.theta import Theta
from onptq.ranks import Ranks


def passes(kinds: str, blocks: int = 4) -> Iterator[Request]:
    """The requests of passes forward (f) and back (b)."""
    for kind in kinds:
        order = range(blocks) if kind == "f" else range(blocks - 1, -1, -1)
        yield from (Request(block, kind == "b") for block in order)


def turns(*queues: Iterator[Request]) -> Sequence[Request]:
    """What is served until nobody asks any more; every rank gets on when its block is served."""
    served, last, asked = [], Request(-1), [next(queue, None) for queue in queues]
    while any(request is not None for request in asked):
        last = choose([request for request in asked if request is not None], last)
        served.append(last)
        asked = [
            next(queue, None) if request is not None and request.block == last.block else request
            for queue, request in zip(queues, asked, strict=True)
        ]
    return served


def test_ranks_with_the_same_passes_go_through_them_together() -> None:
    assert turns(passes("ffb"), passes("ffb"), passes("ffb")) == [*passes("ffb")]


def test_a_rank_that_is_ahead_waits_for_the_next_pass_of_its_kind() -> None:
    """One has its dense targets already, and is through forward while the other computes them: both go back together."""
    assert turns(passes("fb"), passes("ffb")) == [*passes("ffb")]
    assert turns(passes("fbfb"), passes("fb")) == [*passes("fbfb")]


def test_a_pass_goes_on_before_another_begins() -> None:
    assert choose([Request(0), Request(3)], Request(2)) == Request(3)
    assert choose([Request(5, back=True), Request(2, back=True)], Request(3, back=True)) == Request(2, back=True)
    assert choose([Request(5, back=True), Request(2)], Request(4)) == Request(2)
    assert choose([Request(5, back=True), Request(2, back=True)], Request(4)) == Request(5, back=True)


@pytest.mark.parametrize("back", [False, True])
def test_a_request_travels_as_a_number(back: bool) -> None:
    assert Request.of(Request(7, back).number) == Request(7, back)


@pytest.fixture
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_block_is_whole_only_while_it_is_used(tiny: Callable[[str], Tiny], group: None, offloaded: bool) -> None:
    qwen = tiny("qwen3")
    policy = qwen.policy()
    tokens = whole_prompts(PromptBatch.of(qwen.encode(policy, 1)))
    weights = [[one.clone() for one in block.module.parameters()] for block in policy.structure.blocks]
    with torch.no_grad():
        expected = policy.run(tokens)
    policy.shard(Ranks(), torch.device("cpu"), offloaded=offloaded)
    assert isinstance(policy.sharded, ShardedBlocks)
    assert policy.sharded.local_bytes == sum(one.nbytes for block in weights for one in block)

    def is_whole(index: int) -> bool:
        parameters = [*policy.structure.blocks[index].module.parameters()]
        assert len({isinstance(one, DTensor) for one in parameters}) == 1
        return not isinstance(parameters[0], DTensor)

    with torch.no_grad():
        assert torch.equal(policy.run(tokens), expected)
    for block, before in zip(policy.gathered_blocks(), weights, strict=True):
        assert [is_whole(index) for index in range(policy.blocks)] == [
            index == block.index for index in range(policy.blocks)
        ]
        assert all(torch.equal(one, other) for one, other in zip(block.module.parameters(), before, strict=True))
    first = policy.structure.blocks[0]
    with pytest.raises(RuntimeError, match="broken"), policy.gathered(first), policy.gathered(first):
        raise RuntimeError("broken")
    assert not is_whole(0)
    with pytest.raises(OnPTQError, match="gradients through the whole model need all of its blocks at once"):
        policy.run(tokens)
    policy.release()


@pytest.mark.parametrize("offloaded", [False, True])
def test_settled_codes_are_whole_only_while_their_block_is(
    tiny: Callable[[str], Tiny], group: None, offloaded: bool, tmp_path: Path
) -> None:
    qwen = tiny("qwen3")
    policy = qwen.policy()
    tokens = whole_prompts(PromptBatch.of(qwen.encode(policy, 1)))
    settled = policy.settle(Theta.rtn(policy.structure.blocks, policy.scheme))
    settled.save(tmp_path / "theta.safetensors")
    policy.attach(settled)
    with torch.no_grad(), policy.speaking("Q"):
        expected = policy.run(tokens)
    policy.shard(Ranks(), torch.device("cpu"), offloaded=offloaded)
    assert policy.sharded is not None
    before = policy.sharded.local_bytes
    split = policy.load(tmp_path / "theta.safetensors")
    codes = [linear.levels for linear in split.settled.values()]
    assert {each.untyped_storage().nbytes() for each in codes} == {0}
    assert policy.sharded.local_bytes - before == sum(each.numel() for each in codes)
    version = split.version
    policy.attach(split)
    with torch.no_grad(), policy.speaking("Q"):
        assert torch.equal(policy.run(tokens), expected)
    assert {each.untyped_storage().nbytes() for each in codes} == {0}
    assert split.version == version, "what is gathered is no write"
    again = policy.split(policy.whole(split))
    assert all(again.settled[path].levels is linear.levels for path, linear in split.settled.items())
    for name, tensor in policy.whole(split).tensors().items():
        assert torch.equal(tensor, settled.tensors()[name]), name


def test_parts_of_all_processes_are_the_whole() -> None:
    whole = torch.arange(10, dtype=torch.int8).view(2, 5)
    parts = [Part(whole, Ranks(rank, 3), torch.device("cpu"), offloaded=False) for rank in range(3)]
    assert torch.cat([part.own for part in parts]).tolist() == [*range(10), 0, 0]
    assert {part.whole.untyped_storage().nbytes() for part in parts} == {0}
