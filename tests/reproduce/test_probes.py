"""What is measured at single states, against one forward per state through transformers' own model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import Tiny
from naive import WITH_ACTIVATIONS, Scene, extended, js, naive_branch, next_logits, probabilities, scene, without_ties

from onptq.bank import States, Trajectory
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.models.language_model import Side
from onptq.reproduce.probes import (
    ACTIONS,
    action_values,
    closed_loop,
    first_difference,
    hidden_errors,
    likely_actions,
    said_of,
)

TOKENS, HORIZON = 4, 3


@dataclass(frozen=True)
class Visited:
    scene: Scene
    prefixes: Prefixes
    quantized: list[Trajectory]
    states: States

    def prefix(self, row: int) -> tuple[int, ...]:
        of_prompt = next(one for one in self.quantized if one.prompt == self.states.prompt[row])
        return of_prompt.tokens[: self.states.t[row] - 1]


@pytest.fixture(scope="module")
def visited(tiny: Callable[[str], Tiny]) -> Iterator[Visited]:
    with without_ties():
        made = scene(tiny("qwen2.5-vl"), *WITH_ACTIVATIONS)
        encoded = made.encoded(made.policy)[:2]
        prefixes = Prefixes(made.policy, encoded, max_tokens=TOKENS)
        quantized = follow(prefixes)
        yield Visited(made, prefixes, quantized, compare(prefixes, quantized))


@torch.no_grad()
def hidden_after_blocks(visited: Visited, side: Side, row: int) -> np.ndarray:
    """The residual stream at the last token of a state, [blocks, d], by hooks on a plain forward."""
    policy, kept = visited.scene.policy, []
    inputs = visited.scene.inputs[int(visited.states.prompt[row])]
    hooks = [
        block.module.register_forward_hook(
            lambda module, args, output: kept.append((output[0] if isinstance(output, tuple) else output)[0, -1])
        )
        for block in policy.structure.blocks
    ]
    try:
        with policy.speaking(side):
            policy.model(**extended(inputs, visited.prefix(row)), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(kept).double().numpy()


def test_the_hidden_error_is_equation_15_at_every_state(visited: Visited) -> None:
    found = hidden_errors(visited.prefixes, visited.quantized, visited.states)
    for row in range(len(visited.states)):
        dense, quant = (hidden_after_blocks(visited, side, row) for side in ("D", "Q"))
        assert found[row] == pytest.approx(((quant - dense) ** 2).mean(-1).mean(), rel=1e-5)
    assert (found > 0).all()


def test_closed_loop_has_each_model_on_its_own_response(visited: Visited) -> None:
    dense = follow(visited.prefixes, "D")
    found = closed_loop(visited.prefixes, dense, visited.quantized)
    expected = []
    for d, q in zip(dense, visited.quantized, strict=True):
        inputs, fork = visited.scene.inputs[d.prompt], first_difference(d.tokens, q.tokens)
        for t in range(1, min(len(d.tokens), len(q.tokens)) + 1):
            p = probabilities(next_logits(visited.scene.policy, "D", inputs, d.tokens[: t - 1]))
            r = probabilities(next_logits(visited.scene.policy, "Q", inputs, q.tokens[: t - 1]))
            expected.append((d.prompt, t, js(p, r), t > fork))
    columns = {name: [row[place] for row in expected] for place, name in enumerate(("prompt", "t", "js", "behind"))}
    for name in ("prompt", "t", "behind"):
        assert found[name].tolist() == columns[name]
    assert found["js"] == pytest.approx(np.array(columns["js"]), abs=1e-6)
    assert 0 < sum(columns["behind"]) < len(expected)


def test_the_likeliest_actions_are_the_pair_and_the_next_of_both_models(visited: Visited) -> None:
    found = likely_actions(visited.prefixes, visited.quantized, visited.states)
    tokens, dense, quant, tv = (found[name].reshape(-1, ACTIONS) for name in ("tokens", "dense", "quant", "tv"))
    for row in range(len(visited.states)):
        inputs, prefix = visited.scene.inputs[int(visited.states.prompt[row])], visited.prefix(row)
        p, q = (probabilities(next_logits(visited.scene.policy, side, inputs, prefix)) for side in ("D", "Q"))
        pair = [int(visited.states.reference[row]), int(visited.states.competitor[row])]
        others = [token for token in np.argsort(-(p + q)).tolist() if token not in pair]
        assert tokens[row].tolist() == pair + others[: ACTIONS - 2]
        assert dense[row] == pytest.approx(p[tokens[row]])
        assert quant[row] == pytest.approx(q[tokens[row]])
        assert tv[row, 0] == pytest.approx(np.abs(p - q).sum() / 2)


def test_values_are_of_futures_that_the_quantized_model_continues(visited: Visited) -> None:
    some = visited.states.take(np.arange(0, len(visited.states), 3))
    tokens = likely_actions(visited.prefixes, visited.quantized, some)["tokens"].reshape(-1, ACTIONS)
    found = action_values(visited.prefixes, visited.quantized, some, tokens, HORIZON, frozenset())
    policy = visited.scene.policy
    for row in range(len(some)):
        inputs = visited.scene.inputs[int(some.prompt[row])]
        rollout = next(one for one in visited.quantized if one.prompt == some.prompt[row])
        prefix = rollout.tokens[: some.t[row] - 1]
        own = naive_branch(policy, inputs, prefix, int(some.reference[row]), int(some.competitor[row]), HORIZON, "D")
        for place in range(0, ACTIONS, 2):
            first, second = (int(token) for token in tokens[row, place : place + 2])
            fork = naive_branch(policy, inputs, prefix, first, second, HORIZON)
            values = [said_of(own.reference, future, frozenset()) for future in (fork.reference, fork.competitor)]
            assert found[row, place : place + 2] == pytest.approx(values)
    assert len(set(found.ravel().tolist())) > 1
