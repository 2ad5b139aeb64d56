"""The branch-aware objective, Eqs. 12-17, against the plain model's hidden states, one prompt at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from conftest import MULTIMODAL, Tiny, in_turn
from naive import decoder_forwards
from test_theta import exact_policy, learnable, random_theta
from torch import Tensor
from torch.nn.functional import huber_loss

import onptq.quantizer.numerics
import onptq.quantizer.weights
from onptq.bank import States, Trajectory
from onptq.cycle import compare as comparison
from onptq.cycle.calibrate import objective
from onptq.cycle.compare import compare, pair_margin
from onptq.cycle.divergence import kl_divergence
from onptq.cycle.objective import Targets, Terms, UpdateSequences, block_energy, decision_losses, measure, pair_strength
from onptq.engine.prefixes import Prefixes
from onptq.kernels.grid import code_range
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import CalibrateConfig
from onptq.registry import LOSS_TERMS
from onptq.schemes import Scheme

TERMS = tuple(field.name for field in fields(Terms))
CRITICAL = {0: (1, 4, 6), 1: (), 2: (2, 3)}  # prompt -> t of its critical states: prompt 1 has none, 0's first is s_1
WEIGHTS = (0.4, 0.05, 0.25, 0.2, 0.1)


@dataclass(frozen=True)
class Case:
    """A policy, three prompts with images (or sounds) of different sizes, responses, critical states; and what the plain
    model computes for them, per prompt [blocks, tokens, d] and [tokens, vocabulary]."""

    policy: Policy
    theta: Theta
    prompts: list[EncodedPrompt]
    trajectories: list[Trajectory]
    states: States
    hidden: dict[str, list[np.ndarray]]
    logits: dict[str, list[np.ndarray]]

    def items(self, **options: bool) -> UpdateSequences:
        return UpdateSequences(self.policy, self.prompts, self.trajectories, self.states, **options)

    def anchor(self, side: str) -> list[np.ndarray]:
        return [hidden[:, : prompt.length] for hidden, prompt in zip(self.hidden[side], self.prompts, strict=True)]

    def at(self, row: int) -> tuple[int, int]:
        """Prompt and position of the final-prefix token of a state."""
        prompt = int(self.states.prompt[row])
        return prompt, self.prompts[prompt].length + int(self.states.t[row]) - 2

    def expected(self, energy: list[float] | None = None, visited: bool = False) -> dict[str, float]:
        """The four sums of the objective, from Eqs. 14-17; with `visited` the last is a mean over every state."""
        sums = dict.fromkeys(TERMS, 0.0)
        sums["anchor"] = oracles.eq14_anchor(self.anchor("D"), self.anchor("Q"), energy)
        for row in range(len(self.states)):
            prompt, u = self.at(row)
            pair = int(self.states.reference[row]), int(self.states.competitor[row])
            z = {side: self.logits[side][prompt][u] for side in "DQ"}
            margins = {side: oracles.eq5_margin(z[side], *pair) for side in "DQ"}
            weight = float(self.states.weight[row])
            dense, quant = (self.hidden[side][prompt][:, u] for side in "DQ")
            sums["hidden"] += weight * oracles.eq15_hidden(dense, quant, energy)
            sums["pair"] += weight * oracles.eq16_pair(margins["Q"], margins["D"])
            share = 1 / len(self.states) if visited else weight
            sums["response"] += share * oracles.eq17_response(z["D"], z["Q"])
        return sums


def make_case(tiny: Tiny, scheme: str) -> Case:
    policy = tiny.policy(scheme, torch.float64)
    prompts = tiny.encode(policy, 3)
    assert len({prompt.length for prompt in prompts}) == 3
    theta = random_theta(policy)
    policy.freeze(theta)
    rng = np.random.default_rng(0)
    trajectories = [Trajectory(p, tuple(rng.integers(0, 256, 6 + p).tolist()), False) for p in range(3)]
    states = compare(Prefixes(policy, prompts, max_tokens=8), trajectories)
    critical = np.array([t in CRITICAL[p] for p, t in zip(states.prompt, states.t, strict=True)])
    weight = np.zeros(len(states), np.float32)
    weight[critical] = WEIGHTS
    states = states.with_columns(critical=critical, weight=weight)
    blocks = [block.module for block in policy.structure.blocks]
    hidden: dict[str, list[np.ndarray]] = {}
    logits: dict[str, list[np.ndarray]] = {}
    for side in ("D", "Q"):
        with policy.speaking(side):
            seen = [
                oracles.plain_forward(policy.model, blocks, tiny.inputs(ordinal).tensors, trajectory.tokens)
                for ordinal, trajectory in enumerate(trajectories)
            ]
        hidden[side], logits[side] = [h for h, _ in seen], [z for _, z in seen]
    return Case(policy, theta, prompts, trajectories, states, hidden, logits)


@pytest.fixture(scope="module")
def cases(tiny: Callable[[str], Tiny]) -> Callable[..., Case]:
    made: dict[tuple[str, str], Case] = {}

    def get(family: str = "qwen2.5-vl", scheme: str = "W4A16") -> Case:
        if (family, scheme) not in made:
            made[family, scheme] = make_case(tiny(family), scheme)
        case = made[family, scheme]
        case.policy.freeze(case.theta)
        return case

    return get


def check(found: Terms, expected: dict[str, float], rel: float = 2e-6) -> None:
    for name, value in found.floats().items():
        assert value == pytest.approx(expected[name], rel=rel), name


@pytest.mark.parametrize("family", [*MULTIMODAL, "qwen3"])
def test_the_four_terms_are_equations_14_to_17_literally(cases: Callable[..., Case], family: str) -> None:
    case = cases(family)
    found = measure(case.policy, case.items(), Targets(case.policy, None))
    check(found, case.expected())
    assert min(found.floats().values()) > 1e-5


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_energy_form_divides_each_blocks_error(cases: Callable[..., Case], family: str) -> None:
    case, targets = cases(family), Targets(cases(family).policy, None)
    energy = block_energy(targets, case.items())
    expected = oracles.block_energy(case.anchor("D"))
    np.testing.assert_allclose(energy.numpy(), expected, rtol=1e-5)
    check(measure(case.policy, case.items(), targets, energy), case.expected(expected))
    plain = measure(case.policy, case.items(), targets).floats()
    normalized = measure(case.policy, case.items(), targets, energy).floats()
    assert normalized["pair"] == plain["pair"]
    assert normalized["response"] == plain["response"]
    assert normalized["anchor"] != pytest.approx(plain["anchor"], rel=1e-3)


@pytest.mark.parametrize("energy", [False, True], ids=["literal", "energy"])
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen2.5-omni", "qwen3"])
def test_over_visited_states_only_the_response_loss_is_a_plain_mean(
    cases: Callable[..., Case], family: str, energy: bool
) -> None:
    case = cases(family)
    items, targets = case.items(every_response=True), Targets(case.policy, None)
    assert [len(item.at) for item in items] == [len(trajectory.tokens) for trajectory in case.trajectories]
    assert sum(float(item.response_weight.sum()) for item in items) == pytest.approx(1)
    by_block = oracles.block_energy(case.anchor("D")) if energy else None
    found = measure(case.policy, items, targets, block_energy(targets, items) if energy else None)
    expected = case.expected(by_block, visited=True)
    check(found, expected)
    critical = case.expected(by_block)
    assert {name for name in TERMS if expected[name] != critical[name]} == {"response"}
    assert expected["response"] != pytest.approx(critical["response"], rel=0.01)


def test_the_response_loss_may_weigh_visited_states_by_their_consequence(cases: Callable[..., Case]) -> None:
    case = cases()
    consequence = np.linspace(0, 0.6, len(case.states)).astype(np.float32)
    states = case.states.with_columns(consequence=consequence)
    items = UpdateSequences(case.policy, case.prompts, case.trajectories, states, every_response=True, consequence=2.0)
    weights = torch.cat([item.response_weight for item in items]).double().numpy()
    rows = np.concatenate([np.flatnonzero(states.prompt == prompt.ordinal) for prompt in case.prompts])
    expected = 1 + 2.0 * consequence[rows].astype(np.float64)
    np.testing.assert_allclose(weights, expected / expected.sum(), rtol=1e-6)


def test_a_matched_pair_weight_makes_the_pair_loss_begin_as_strong_as_with_equal_weights(
    cases: Callable[..., Case],
) -> None:
    case = cases()
    margins = list(zip(case.states.margin_quant.tolist(), case.states.margin_dense.tolist(), strict=True))
    expected = oracles.matched_pair_weight(margins, case.states.weight.tolist())
    factor = pair_strength(case.states)
    assert factor == pytest.approx(expected, rel=1e-6)
    assert abs(factor - 1) > 0.1
    count = len(case.states)
    uniform = case.states.with_columns(critical=np.ones(count, np.bool_), weight=np.full(count, 1 / count, np.float32))
    assert pair_strength(uniform) == 1.0
    pair = {}
    for name, states in (("risk", case.states), ("uniform", uniform)):
        items = UpdateSequences(case.policy, case.prompts, case.trajectories, states)
        pair[name] = measure(case.policy, items, Targets(case.policy, None)).floats()["pair"]
    assert factor * pair["risk"] == pytest.approx(pair["uniform"], rel=1e-5)


def test_without_a_loss_to_match_the_pair_weight_is_as_it_is(cases: Callable[..., Case]) -> None:
    states = cases().states
    nothing = np.zeros(len(states), np.float32)
    assert pair_strength(states.with_columns(weight=nothing)) == 1.0
    assert pair_strength(states.with_columns(margin_quant=states.margin_dense)) == 1.0
    assert pair_strength(states.take(np.zeros(0, np.int64))) == 1.0


def test_visited_states_without_a_critical_one_teach_the_response_alone(cases: Callable[..., Case]) -> None:
    case = cases()
    plain = case.states.with_columns(
        critical=np.zeros(len(case.states), np.bool_), weight=np.zeros(len(case.states), np.float32)
    )
    items = UpdateSequences(case.policy, case.prompts, case.trajectories, plain, every_response=True)
    found = measure(case.policy, items, Targets(case.policy, None)).floats()
    assert found["response"] == pytest.approx(case.expected(visited=True)["response"], rel=2e-6)
    assert (found["hidden"], found["pair"]) == (0, 0)
    none = UpdateSequences(case.policy, case.prompts, [], None, every_response=True)
    assert measure(case.policy, none, Targets(case.policy, None)).floats()["response"] == 0


def test_activation_quantization_is_in_the_objective_too(cases: Callable[..., Case]) -> None:
    """Roundings of two summation orders may differ here, so the agreement is that of the sums, not of their digits."""
    case = cases(scheme="W4A6")
    targets = Targets(case.policy, None)
    check(measure(case.policy, case.items(), targets), case.expected(), rel=0.02)
    weights_only = cases().expected()
    assert case.expected()["anchor"] > 1.03 * weights_only["anchor"]


def test_massive_tokens_do_not_count_in_a_blocks_energy() -> None:
    """Three prompts of known hidden states, one token a thousand times the rest."""
    hidden = [torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(p), dtype=torch.float64) for p in range(3)]
    hidden[1][:, 7] *= 1000

    class Held:
        def of(self, sequence: int) -> Tensor:
            return hidden[sequence]

    @dataclass(frozen=True)
    class Context:
        sequence: int
        anchor: Tensor

    weights = [
        torch.full((40,), 1 / 110),
        torch.full((40,), 1 / 110),
        torch.cat((torch.full((30,), 1 / 110), torch.zeros(10))),
    ]
    contexts = [Context(index, weight) for index, weight in enumerate(weights)]
    found = block_energy(Held(), contexts)  # type: ignore[arg-type]
    anchors = [hidden[0].numpy(), hidden[1].numpy(), hidden[2][:, :30].numpy()]
    np.testing.assert_allclose(found.numpy(), oracles.block_energy(anchors), rtol=1e-5)
    assert found.max() < 2
    big = [torch.randn(1, 3000, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)]
    hidden[:] = big
    found = block_energy(Held(), [Context(0, torch.ones(3000))])  # type: ignore[arg-type, list-item]
    np.testing.assert_allclose(found.numpy(), oracles.block_energy([big[0].numpy()]), rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen2.5-omni"])
def test_modality_balanced_anchors_weigh_every_modality_the_same(cases: Callable[..., Case], family: str) -> None:
    case = cases(family)
    modalities = [prompt.modality.tolist() for prompt in case.prompts]
    kinds = {modality for prompt in modalities for modality in prompt}
    assert len(kinds) == (3 if family == "qwen2.5-omni" else 2)
    share = oracles.balanced_share(modalities)
    items = case.items(modality_balanced=True)
    expected = oracles.eq14_anchor(case.anchor("D"), case.anchor("Q"), share=share)
    found = measure(case.policy, items, Targets(case.policy, None)).floats()
    assert found["anchor"] == pytest.approx(expected, rel=2e-6)
    weight = torch.cat([item.anchor[: prompt.length] for item, prompt in zip(items, case.prompts, strict=True)])
    modality = torch.cat([prompt.modality for prompt in case.prompts])
    for kind in kinds:
        assert float(weight[modality == kind].sum()) == pytest.approx(1 / len(kinds), rel=1e-5)


def test_the_anchor_is_every_prompt_token_and_no_response_token(cases: Callable[..., Case]) -> None:
    case = cases()
    tokens = sum(prompt.length for prompt in case.prompts)
    for item, prompt, steps in zip(case.items(), case.prompts, CRITICAL.values(), strict=True):
        torch.testing.assert_close(item.anchor[: prompt.length], torch.full((prompt.length,), 1 / tokens))
        assert not item.anchor[prompt.length :].any()
        assert item.sequence.length == prompt.length + max(steps, default=1) - 1, (
            "no token behind the last critical prefix"
        )
        assert item.at.tolist() == [prompt.length - 2 + t for t in steps]
    owned = [len(steps) for steps in CRITICAL.values()]
    weights = [item.weight.tolist() for item in case.items()]
    assert [len(weight) for weight in weights] == owned
    assert [weight for own in weights for weight in own] == pytest.approx(WEIGHTS)


def test_prompts_without_critical_states_still_anchor(cases: Callable[..., Case]) -> None:
    case = cases()
    for states in (None, case.states.with_columns(weight=np.zeros(len(case.states), np.float32))):
        items = UpdateSequences(case.policy, case.prompts, case.trajectories, states)
        found = measure(case.policy, items, Targets(case.policy, None)).floats()
        assert found["anchor"] == pytest.approx(case.expected()["anchor"], rel=2e-6)
        assert (found["hidden"], found["pair"], found["response"]) == (0, 0, 0)


# Batches


@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]], [[1, 2, 0]]])
def test_terms_are_sums_over_prompts_whoever_shares_their_batch(
    cases: Callable[..., Case], groups: list[list[int]]
) -> None:
    case = cases("qwen3-vl")
    items, targets = case.items(), Targets(case.policy, None)
    energy = block_energy(targets, items)
    together: Terms | None = None
    for group in groups:
        part = measure(case.policy, [items[index] for index in group], targets, energy)
        together = part if together is None else together + part
    assert together is not None
    check(together, case.expected(oracles.block_energy(case.anchor("D"))))


def test_a_small_budget_for_dense_targets_changes_nothing(cases: Callable[..., Case]) -> None:
    case = cases()
    kept, none = Targets(case.policy, None), Targets(case.policy, 0)
    for _ in range(2):
        assert measure(case.policy, case.items(), kept).floats() == measure(case.policy, case.items(), none).floats()
    assert kept.used > 0
    assert none.used == 0


def test_dense_targets_are_computed_once_while_the_budget_lasts(cases: Callable[..., Case]) -> None:
    case = cases()
    sequences = [item.sequence for item in case.items()]
    sizes = [Targets(case.policy, 0).of(sequence).nbytes for sequence in sequences]
    targets = Targets(case.policy, sizes[0] + sizes[1])
    forwards = []
    for _ in range(2):
        with decoder_forwards(case.policy) as seen:
            for sequence in sequences:
                targets.of(sequence)
        forwards.append(seen)
    assert forwards == [[("D", sequence.length) for sequence in sequences], [("D", sequences[2].length)]]
    assert targets.used == sizes[0] + sizes[1]
    least = Targets(case.policy, max(sizes))
    for sequence in sequences:
        least.of(sequence)
    assert 0 < least.used <= max(sizes), "the budget is for all of them together"


@pytest.mark.parametrize("rows", [1, 2])
def test_a_few_rows_of_logits_at_a_time_give_the_same_terms_and_gradients(
    cases: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    case = cases()

    def terms_and_gradients() -> tuple[Terms, list[Tensor]]:
        theta = learnable(case.theta)
        case.policy.attach(theta)
        terms = measure(case.policy, case.items(), Targets(case.policy, None))
        objective(terms, CalibrateConfig(gamma=1.0, hidden=1.0, pair=1.0, response=1.0)).backward()
        gradients = [ratio.grad for ratio in theta.ratio.values()]
        return terms, [gradient for gradient in gradients if gradient is not None]

    _, whole = terms_and_gradients()
    monkeypatch.setattr(comparison, "LOGIT_BYTES", 4 * 4 * rows * case.policy.vocabulary)
    assert 2 * comparison.state_rows(case.policy.vocabulary, models=4) == 2 * rows < len(WEIGHTS)
    found, gradients = terms_and_gradients()
    check(found, case.expected())
    for one, other in zip(gradients, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 3, 10**6])
def test_added_terms_are_weighted_sums_over_the_critical_states(
    cases: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The paper's own losses, added by name, are the paper's, whether logits come whole or a few rows at a time."""

    def pair(z_dense: Tensor, z_quant: Tensor, reference: Tensor, competitor: Tensor) -> Tensor:
        quant, dense = (pair_margin(z, reference, competitor) for z in (z_quant, z_dense))
        return huber_loss(quant, dense, reduction="none", delta=1.0)

    def response(z_dense: Tensor, z_quant: Tensor, reference: Tensor, competitor: Tensor) -> Tensor:
        return kl_divergence(z_dense, z_quant)

    monkeypatch.setattr(LOSS_TERMS, "_registered", {"pair again": pair, "response again": response})
    case, gradients = cases(), []
    monkeypatch.setattr(comparison, "LOGIT_BYTES", 4 * 4 * rows * case.policy.vocabulary)
    for added in (True, False):
        theta = learnable(case.theta)
        case.policy.attach(theta)
        terms = measure(case.policy, case.items(), Targets(case.policy, None), added=["pair again", "response again"])
        check(replace(terms, added={}), case.expected())
        values = terms.floats()
        assert values["pair again"] == pytest.approx(values["pair"], rel=1e-5)
        assert values["response again"] == pytest.approx(values["response"], rel=1e-5)
        chosen = terms.added.values() if added else (terms.pair, terms.response)
        sum(chosen, torch.zeros(())).backward()
        gradients.append([ratio.grad for ratio in theta.ratio.values() if ratio.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-8)


def test_checkpointing_changes_neither_values_nor_gradients(cases: Callable[..., Case]) -> None:
    case = cases()
    results = []
    for checkpointed in (False, True):
        theta = learnable(case.theta)
        case.policy.attach(theta)
        terms = measure(case.policy, case.items(), Targets(case.policy, None), checkpointed=checkpointed)
        with case.policy.speaking("Q"):
            objective(terms, CalibrateConfig(hidden=1.0, pair=0.1)).backward()
        learned = *theta.smoothing.values(), *theta.ratio.values()
        results.append((terms.floats(), [parameter.grad for parameter in learned]))
    assert results[0][0] == results[1][0]
    for plain, again in zip(results[0][1], results[1][1], strict=True):
        assert plain is not None
        assert again is not None
        torch.testing.assert_close(plain, again, rtol=1e-6, atol=1e-9)


# Eqs. 12 and 13


@pytest.mark.parametrize(
    ("removed", "gamma"),
    [*in_turn([None, "anchor", "hidden", "pair", "response"], [0.2, 1.0]), (None, 0.0), (None, 1.0), ("hidden", 0.0)],
)
def test_the_objective_is_the_anchor_plus_gamma_times_the_critical_losses(
    cases: Callable[..., Case], removed: str | None, gamma: float
) -> None:
    case = cases()
    factors: dict[str, Any] = {"hidden": 1.0, "pair": 1.0, "response": 1.0, **({removed: 0.0} if removed else {})}
    cfg = CalibrateConfig(gamma=gamma, **factors)
    losses = []
    for row in np.flatnonzero(case.states.critical):
        one = np.zeros(len(case.states), np.bool_)
        one[row] = True
        alone = replace(case, states=case.states.with_columns(critical=one, weight=one.astype(np.float32)))
        parts = {name: value * (name != removed) for name, value in alone.expected().items()}
        losses.append(oracles.eq13_critical_loss(parts["hidden"], parts["pair"], parts["response"]))
    anchor = case.expected()["anchor"] * (removed != "anchor")
    expected = oracles.eq12_objective(anchor, gamma, WEIGHTS, losses)
    found = objective(measure(case.policy, case.items(), Targets(case.policy, None)), cfg)
    assert float(found) == pytest.approx(expected, rel=2e-6)


def test_decision_losses_are_huber_and_kl_of_each_state(cases: Callable[..., Case]) -> None:
    case = cases("qwen2.5-omni")
    width = case.prompts[0].embeds.shape[1]
    dense = torch.randn(12, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    quant = dense + torch.linspace(0.01, 1, 12, dtype=torch.float64)[:, None] * torch.randn(
        12, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    reference, competitor = torch.arange(12), torch.arange(12) + 300
    z_dense, z_quant = case.policy.logits(dense), case.policy.logits(quant)
    margin = pair_margin(z_dense, reference, competitor)
    pair, response = decision_losses(case.policy, dense, quant, reference, competitor, margin)
    changes = []
    for row in range(12):
        d, q = z_dense[row].numpy(), z_quant[row].numpy()
        margins = [oracles.eq5_margin(z, row, row + 300) for z in (q, d)]
        changes.append(abs(margins[0] - margins[1]))
        assert float(pair[row]) == pytest.approx(oracles.eq16_pair(*margins), rel=1e-6)
        assert float(response[row]) == pytest.approx(oracles.eq17_response(d, q), rel=1e-6)
    assert min(changes) < 1 < max(changes), "both pieces of the Huber loss are here"


def test_the_dense_margin_is_the_banks_not_a_fresh_one(cases: Callable[..., Case]) -> None:
    """It is frozen with the round: a bank that says otherwise moves the pair loss."""
    case = cases()
    moved = case.states.with_columns(margin_dense=case.states.margin_dense + 10)
    items = UpdateSequences(case.policy, case.prompts, case.trajectories, moved)
    assert float(measure(case.policy, items, Targets(case.policy, None)).pair) > 5


# Gradients


class Replay:
    """Stands in for FakeQuantize: rounds and remembers at first, then repeats the same residuals and saturated codes, which
    makes the objective a smooth function of theta."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self.next: int | None = None

    def rewind(self) -> None:
        self.next = 0

    def apply(
        self, x: Tensor, step: Tensor, shift: Tensor | None, zero: Tensor | None, bits: int, dtype: torch.dtype
    ) -> Tensor:
        zero = torch.zeros_like(step) if zero is None else zero
        v = x / step + (0 if shift is None else shift - zero)
        if self.next is None:
            low, high = code_range(bits)
            code = (v + zero).clamp(low, high).round() - zero
            inside = (v + zero >= low) & (v + zero <= high)
            self.seen.append((inside, code - v, code))
            return code * step
        inside, residual, code = self.seen[self.next]
        self.next += 1
        return torch.where(inside, v + residual, code) * step


@pytest.mark.parametrize("scheme", [Scheme(4, 8), Scheme(3, 16, symmetric=False)], ids=str)
@pytest.mark.parametrize("part", ["smoothing", "ratio", "offset"])
def test_gradients_of_theta_are_those_of_the_smooth_surrogate(
    tiny: Callable[[str], Tiny], cases: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, scheme: Scheme, part: str
) -> None:
    """End to end: blocks, attention, norms, biases, head and every dynamic step lie inside the graph."""
    case, policy = cases(), exact_policy(tiny("qwen2.5-vl"), scheme)
    items = UpdateSequences(policy, case.prompts, case.trajectories, case.states)[::2]
    targets = Targets(policy, None)
    theta = random_theta(policy, torch.float64, offsets=True)
    for u in theta.smoothing.values():
        u *= 0.2
    cfg = CalibrateConfig(gamma=1.0, hidden=1.0, pair=0.1)

    def loss(at: Theta) -> Tensor:
        policy.attach(at)
        return objective(measure(policy, items, targets), cfg)

    live = learnable(theta)
    value = loss(live)
    value.backward()
    gradient = {key: parameter.grad for key, parameter in getattr(live, part).items()}
    # half way between the gradient and a random direction: a slope that is no sum of cancelling noise
    generator = torch.Generator().manual_seed(7)
    direction = {
        key: grad / grad.std() + torch.randn(grad.shape, generator=generator) for key, grad in gradient.items()
    }
    slope = sum(float((gradient[key] * along).sum()) for key, along in direction.items())

    replay = Replay()
    monkeypatch.setattr(onptq.quantizer.numerics, "FakeQuantize", replay)
    monkeypatch.setattr(onptq.quantizer.weights, "FakeQuantize", replay)
    with torch.no_grad():
        assert float(loss(theta)) == pytest.approx(float(value), rel=1e-6)

        def moved(distance: float) -> float:
            shifted = theta.clone()
            for key, along in direction.items():
                getattr(shifted, part)[key].add_(distance * along)
            replay.rewind()
            return float(loss(shifted))

        reach = 3e-5  # the models' own norms compute in fp32, which drowns anything shorter
        measured = (moved(reach) - moved(-reach)) / (2 * reach)
    assert slope == pytest.approx(measured, rel=2e-3)
