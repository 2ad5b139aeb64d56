"""Where memory ends, less is done at once: the same results, one warning, remembered.

No GPU is here to fill, so a policy's own forward refuses, as CUDA's allocator would, what is larger than a limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Tiny
from torch import Tensor

from onptq import quantize
from onptq.bank import States, Trajectory
from onptq.cycle.branch import branch
from onptq.cycle.calibrate import calibrate
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.risk import score, select
from onptq.engine.budget import BatchBudget
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.evaluate.critical import margins_on
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt
from onptq.progress import QuietReporter
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import CalibrateConfig, Recipe, RiskConfig, SelectConfig
from onptq.run import run_home

COUNT, TOKENS = 6, 6


@contextmanager
def memory_for(rows: int, after: int = 0) -> Iterator[None]:
    """Every policy takes at most so many rows of a batch at once, once `after` larger batches have passed."""
    run, passed = Policy.run, 0

    def limited(self: Policy, tokens: Tokens, *args: Any, **options: Any) -> Tensor:
        nonlocal passed
        if len(tokens.embeds) > rows:
            passed += 1
            if passed > after:
                raise torch.OutOfMemoryError(f"{len(tokens.embeds)} rows")
        return run(self, tokens, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "run", limited)
        yield


@pytest.fixture(scope="module")
def policy(tiny: Callable[[str], Tiny]) -> Policy:
    policy = tiny("qwen3-vl").policy("W4A16")  # weights only: no rounding that a batch's last bit could turn
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme))
    return policy


@pytest.fixture(scope="module")
def prompts(tiny: Callable[[str], Tiny], policy: Policy) -> list[EncodedPrompt]:
    return tiny("qwen3-vl").encode(policy, COUNT)


def visited(prefixes: Prefixes) -> tuple[list[Trajectory], States]:
    trajectories = follow(prefixes)
    return trajectories, branch(prefixes, trajectories, compare(prefixes, trajectories), horizon=2)


def same(found: States, expected: States) -> None:
    for name in ("prompt", "t", "token", "reference", "competitor", "quantized", "kind", "horizon"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    for name in ("margin_dense", "margin_quant", "js", "kl", "consequence"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-4), name


def test_half_the_size_is_tried_until_the_work_fits_with_one_warning() -> None:
    warnings: list[str] = []
    stored: list[int] = []
    tried: list[int] = []
    budget = BatchBudget(12, "prompts", warn=warnings.append, keep=stored.append)

    def work(size: int) -> str:
        tried.append(size)
        if size > 2:
            raise torch.OutOfMemoryError
        return "done"

    assert budget.fit(work) == "done"
    assert (tried, stored, budget.size) == ([12, 6, 3, 1], [6, 3, 1], 1)
    assert len(warnings) == 1
    assert "12 prompts" in warnings[0]
    assert "6" in warnings[0]


def test_what_does_not_fit_even_alone_is_an_error_and_other_errors_are_left_alone() -> None:
    def too_large(size: int) -> None:
        raise torch.OutOfMemoryError

    def broken(size: int) -> None:
        raise ValueError("broken")

    with pytest.raises(torch.OutOfMemoryError):
        BatchBudget(4, "prompts").fit(too_large)
    budget = BatchBudget(4, "prompts")
    with pytest.raises(ValueError, match="broken"):
        budget.fit(broken)
    assert budget.size == 4


@pytest.mark.slow
def test_rollouts_comparison_and_branches_are_the_same_in_smaller_batches(
    policy: Policy, prompts: list[EncodedPrompt]
) -> None:
    whole = Prefixes(policy, prompts, max_tokens=TOKENS)
    assert [len(batch.prompts) for batch in whole.batches] == [COUNT]
    trajectories, states = visited(whole)
    for rows in (1, 2, 4):
        tight = Prefixes(policy, prompts, max_tokens=TOKENS)
        with memory_for(rows):
            found, compared = visited(tight)
        assert found == trajectories
        same(compared, states)
        assert max(len(batch.prompts) for batch in tight.batches) <= rows


def test_each_step_finds_its_own_limit_and_counts_every_prompt_once(
    policy: Policy, prompts: list[EncodedPrompt]
) -> None:
    prefixes = Prefixes(policy, prompts, max_tokens=TOKENS)
    trajectories = follow(prefixes)
    counted: dict[str, int] = {"compared": 0, "branched": 0, "read": 0}

    def count(step: str) -> Callable[[int], None]:
        return lambda number: counted.__setitem__(step, counted[step] + number)

    with memory_for(4):
        states = compare(prefixes, trajectories, advance=count("compared"))
    with memory_for(2):
        states = branch(prefixes, trajectories, states, horizon=2, advance=count("branched"))
    with memory_for(1):
        margins = margins_on(prefixes, trajectories, states, count("read"))
    assert counted == {"compared": COUNT, "branched": int(states.candidates.sum()), "read": COUNT}
    assert counted["branched"] > 0
    assert margins.quant == pytest.approx(states.margin_quant, abs=1e-4)


@pytest.mark.slow
def test_two_models_are_split_alike(tiny: Callable[[str], Tiny], policy: Policy, prompts: list[EncodedPrompt]) -> None:
    whole = Prefixes(policy, prompts, max_tokens=TOKENS)
    expected = compare(whole, follow(whole))
    other = tiny("qwen3-vl").policy("W4A16")
    other.freeze(Theta.rtn(other.structure.blocks, other.scheme))
    dense, candidate = (Prefixes(one, prompts, max_tokens=TOKENS) for one in (policy, other))
    with memory_for(4):
        trajectories = follow(candidate)
    with memory_for(2):
        same(compare(dense, trajectories, quantized=candidate), expected)
    assert [len(batch.prompts) for batch in dense.batches] == [len(batch.prompts) for batch in candidate.batches]
    assert max(len(batch.prompts) for batch in dense.batches) <= 2


@pytest.mark.slow
def test_prefixes_that_share_a_budget_learn_from_each_other(policy: Policy, prompts: list[EncodedPrompt]) -> None:
    warnings: list[str] = []
    budget = BatchBudget(4096, "tokens", warn=warnings.append)
    first, second = (Prefixes(policy, prompts, max_tokens=TOKENS, batch_tokens=budget) for _ in range(2))
    with memory_for(2):
        follow(first)
        size = budget.size
        follow(second)
    assert budget.size == size < 4096
    assert len(warnings) == 1
    third = Prefixes(policy, prompts, max_tokens=TOKENS, batch_tokens=budget)
    assert [len(batch.prompts) for batch in third.batches] == [len(batch.prompts) for batch in second.batches]


def test_a_prompt_that_does_not_fit_alone_is_named_by_its_size(policy: Policy, prompts: list[EncodedPrompt]) -> None:
    with memory_for(0), pytest.raises(OnPTQError, match=r"a prompt of \d+ tokens and a response of 6 do not fit"):
        follow(Prefixes(policy, prompts, max_tokens=TOKENS))


def test_a_single_prompt_is_tried_again_where_nothing_else_is_cached(
    policy: Policy, prompts: list[EncodedPrompt]
) -> None:
    """As if what earlier prompts left in the caches were what fills the memory."""
    alone = BatchBudget(1, "tokens")
    expected = follow(Prefixes(policy, prompts, max_tokens=TOKENS, batch_tokens=alone))
    prefixes = Prefixes(policy, prompts, max_tokens=TOKENS, batch_tokens=alone)
    run = Policy.run

    def crowded(self: Policy, *args: Any, **options: Any) -> Tensor:
        if len(prefixes._cached) > 2:
            raise torch.OutOfMemoryError
        return run(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "run", crowded)
        assert follow(prefixes) == expected
    assert (prefixes.budget, alone.size) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1])  # 1: in the middle of a step, when there are gradients already
def test_an_update_takes_the_same_steps_with_fewer_prompts_at_once(
    policy: Policy, prompts: list[EncodedPrompt], after: int
) -> None:
    theta = Theta.rtn(policy.structure.blocks, policy.scheme)
    policy.freeze(theta)
    trajectories, states = visited(Prefixes(policy, prompts, max_tokens=TOKENS))
    states = select(score(states, RiskConfig()), SelectConfig(budget=8))
    cfg = CalibrateConfig(epochs=2, batch=COUNT, micro_batch=COUNT // 2, codes="free", lr_smoothing=2e-3, lr_step=2e-3)
    expected = calibrate(policy, prompts, trajectories, states, theta, cfg.model_copy(update={"micro_batch": 1}))
    budget = BatchBudget(COUNT // 2, "prompts")
    with memory_for(2, after):
        found = calibrate(policy, prompts, trajectories, states, theta, cfg, batch_budget=budget)
    assert budget.size == 1
    assert found.history == expected.history
    for name, tensor in expected.theta.tensors().items():
        assert torch.equal(found.theta.tensors()[name], tensor), name
    policy.freeze(theta)


class Warned(QuietReporter):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)


@pytest.mark.slow
def test_a_run_remembers_what_fits(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    checkpoint, reporter = tiny("qwen2.5-vl"), Warned()
    changes = {
        "rounds": 1, "init": "rtn", "data.prompts": 4, "data.holdout": 2, "follow.max_tokens": 6, "calibrate.epochs": 1,
        "calibrate.batch": 4, "calibrate.micro_batch": 4, "compute.device": "cpu",
    }  # fmt: skip
    with memory_for(1):
        quantize(
            str(checkpoint.folder),
            tmp_path / "out",
            calibration=checkpoint.manifest,
            recipe=Recipe().with_overrides(changes),
            reporter=reporter,
        )
    assert sorted(warning.split()[1] for warning in reporter.warnings if "do not fit" in warning) == [
        "prompts",
        "tokens",
    ]
    fits = json.loads((run_home(tmp_path / "out") / "room.json").read_text())
    assert fits["prompts"] == 1
    assert 0 < fits["tokens"] < Recipe().compute.batch_tokens
