"""A method that was stopped goes on after its last finished block, and ends with the same theta."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny
from method_models import open_small, same_theta, short_responses

from onptq.methods import METHODS, accepts
from onptq.methods.resume import BlockStore, RunStore
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.run import Run

SEARCHED = ("search+gptq", "search+signround")
STORED = ("awq", "blockwise", "gptq", "masquant", "mbq", "qig", "search", "signround", "smoothquant+gptq", *SEARCHED)


class Stopped(Exception):
    pass


def stop(blocks: int) -> None:
    raise Stopped


def method(name: str, policy: Policy, prompts: list[EncodedPrompt]) -> Callable[..., Theta]:
    """`theta = method(...)(advance, store)`, with few steps and short responses."""
    options: dict[str, Any] = {"steps": 4, "points": 2, "responses": short_responses(prompts)}
    given = {option: value for option, value in options.items() if accepts(name, option)}

    def run(advance: Callable[[int], None] = lambda blocks: None, store: BlockStore | None = None) -> Theta:
        theta: Theta = METHODS[name](policy, prompts, advance, store=store, **given)
        return theta

    return run


def begin(small: Path, tmp_path: Path, name: str) -> tuple[Tiny, Policy, Callable[..., Theta], RunStore]:
    """A method that was stopped when its first block was finished, and its store."""
    checkpoint = open_small(small)
    policy = checkpoint.policy("W4A8")
    run = method(name, policy, checkpoint.encode(policy, 2))
    with Run.open(tmp_path / "run", {"recipe": name}) as folder:
        store = RunStore(folder, policy.device)
        with pytest.raises(Stopped):
            run(stop, store)
    return checkpoint, policy, run, store


def test_every_method_that_works_block_by_block_is_tried_here() -> None:
    assert {name for name in METHODS._built_in if accepts(name, "store")} == set(STORED)


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_a_stopped_method_goes_on_after_its_finished_blocks_and_ends_with_the_same_theta(
    small: Path, tmp_path: Path, name: str
) -> None:
    _, policy, run, store = begin(small, tmp_path, name)
    assert store.finished == 1 < policy.blocks
    whole = run()
    for left in (policy.blocks - 1, 0):
        fitted: list[int] = []
        theta = run(fitted.append, store)
        assert fitted == [1] * left, "finished blocks are not fitted again"
        assert store.finished == policy.blocks
        assert same_theta(theta, whole)


@pytest.mark.parametrize("name", SEARCHED)
def test_a_finished_search_is_not_begun_again(
    small: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even its sample is taken, which costs a forward of every sequence."""
    _, _, run, store = begin(small, tmp_path, name)
    search = importlib.import_module("onptq.methods.search")
    sample, taken = search.sample_inputs, list[str]()

    def spy(policy: Policy, sequences: list[EncodedPrompt]) -> Any:
        taken.append("sample")
        return sample(policy, sequences)

    monkeypatch.setattr(search, "sample_inputs", spy)
    run(store=store)
    assert taken == []
    run()
    assert taken == ["sample"]


def test_a_finished_block_is_what_the_store_has(small: Path, tmp_path: Path) -> None:
    _, policy, run, store = begin(small, tmp_path, "search")
    block = policy.structure.blocks[0]
    part = store.read(0)
    assert part is not None
    for linear in part.linears.values():
        linear.ratio.fill_(-0.25)
    store.write(0, part)
    theta = run(store=store)
    owned = {path for path in theta.ratio if path.startswith(f"layers.{block.index}.")}
    assert len(owned) == 7 < len(theta.ratio)
    assert all(bool((theta.ratio[path] == -0.25).all()) == (path in owned) for path in theta.ratio)
