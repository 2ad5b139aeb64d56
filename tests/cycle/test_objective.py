"""The branch-aware objective, Eqs. 12-17, against the plain model's hidden states, one prompt at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import oracles
import pytest
import torch
from conftest import MULTIMODAL, Tiny
from test_theta import exact_policy, learnable, random_theta
from torch import Tensor

import onptq.quantizer.numerics
import onptq.quantizer.weights
from onptq.bank import States, Trajectory
from onptq.cycle.calibrate import objective
from onptq.cycle.compare import compare, pair_margin
from onptq.cycle.objective import Targets, Terms, block_energy, decision_losses, make_items, measure
from onptq.data.manifest import load_manifest
from onptq.engine.prefixes import Prefixes
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.numerics import code_range
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import CalibrateConfig
from onptq.schemes import Scheme

TERMS = tuple(field.name for field in fields(Terms))
CRITICAL = {0: (1, 4, 6), 1: (), 2: (2, 3)}  # prompt -> t of its critical states: prompt 1 has none, 0's first is s_1
WEIGHTS = (0.4, 0.05, 0.25, 0.2, 0.1)


@dataclass(frozen=True)
class Bed:
    """A policy, three prompts with images (or sounds) of different sizes, responses, critical states; and what the plain
    model computes for them, per prompt [blocks, tokens, d] and [tokens, vocabulary]."""

    policy: Policy
    theta: Theta
    prompts: list[EncodedPrompt]
    trajectories: list[Trajectory]
    states: States
    hidden: dict[str, list[np.ndarray]]
    logits: dict[str, list[np.ndarray]]

    def items(self, **options: bool) -> list:
        return make_items(self.policy, self.prompts, self.trajectories, self.states, **options)

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


def make_bed(tiny: Tiny, scheme: str) -> Bed:
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
                oracles.plain_forward(policy.model, blocks, tiny.processor(prompt).tensors, trajectory.tokens)
                for prompt, trajectory in zip(load_manifest(tiny.manifest)[:3], trajectories, strict=True)
            ]
        hidden[side], logits[side] = [h for h, _ in seen], [z for _, z in seen]
    return Bed(policy, theta, prompts, trajectories, states, hidden, logits)


@pytest.fixture(scope="module")
def beds(tiny: Callable[[str], Tiny]) -> Callable[..., Bed]:
    made: dict[tuple[str, str], Bed] = {}

    def get(family: str = "qwen2.5-vl", scheme: str = "W4A16") -> Bed:
        if (family, scheme) not in made:
            made[family, scheme] = make_bed(tiny(family), scheme)
        bed = made[family, scheme]
        bed.policy.freeze(bed.theta)
        return bed

    return get


def check(found: Terms, expected: dict[str, float], rel: float = 2e-6) -> None:
    for name, value in found.floats().items():
        assert value == pytest.approx(expected[name], rel=rel), name


@pytest.mark.parametrize("family", [*MULTIMODAL, "qwen3"])
def test_the_four_terms_are_equations_14_to_17_literally(beds: Callable[..., Bed], family: str) -> None:
    bed = beds(family)
    found = measure(bed.policy, bed.items(), Targets(bed.policy, None))
    check(found, bed.expected())
    assert min(found.floats().values()) > 1e-5


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_energy_form_divides_each_blocks_error(beds: Callable[..., Bed], family: str) -> None:
    bed, targets = beds(family), Targets(beds(family).policy, None)
    energy = block_energy(targets, bed.items())
    expected = oracles.block_energy(bed.anchor("D"))
    np.testing.assert_allclose(energy.numpy(), expected, rtol=1e-5)
    check(measure(bed.policy, bed.items(), targets, energy), bed.expected(expected))
    plain = measure(bed.policy, bed.items(), targets).floats()
    normalized = measure(bed.policy, bed.items(), targets, energy).floats()
    assert normalized["pair"] == plain["pair"]
    assert normalized["response"] == plain["response"]
    assert normalized["anchor"] != pytest.approx(plain["anchor"], rel=1e-3)


@pytest.mark.parametrize("energy", [False, True], ids=["literal", "energy"])
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen2.5-omni", "qwen3"])
def test_over_visited_states_only_the_response_loss_is_a_plain_mean(
    beds: Callable[..., Bed], family: str, energy: bool
) -> None:
    bed = beds(family)
    items, targets = bed.items(every_response=True), Targets(bed.policy, None)
    assert [len(item.at) for item in items] == [len(trajectory.tokens) for trajectory in bed.trajectories]
    assert sum(float(item.share.sum()) for item in items) == pytest.approx(1)
    by_block = oracles.block_energy(bed.anchor("D")) if energy else None
    found = measure(bed.policy, items, targets, block_energy(targets, items) if energy else None)
    expected = bed.expected(by_block, visited=True)
    check(found, expected)
    critical = bed.expected(by_block)
    assert {name for name in TERMS if expected[name] != critical[name]} == {"response"}
    assert expected["response"] != pytest.approx(critical["response"], rel=0.01)


def test_visited_states_without_a_critical_one_teach_the_response_alone(beds: Callable[..., Bed]) -> None:
    bed = beds()
    plain = bed.states.with_columns(
        critical=np.zeros(len(bed.states), np.bool_), weight=np.zeros(len(bed.states), np.float32)
    )
    items = make_items(bed.policy, bed.prompts, bed.trajectories, plain, every_response=True)
    found = measure(bed.policy, items, Targets(bed.policy, None)).floats()
    assert found["response"] == pytest.approx(bed.expected(visited=True)["response"], rel=2e-6)
    assert (found["hidden"], found["pair"]) == (0, 0)
    none = make_items(bed.policy, bed.prompts, [], None, every_response=True)
    assert measure(bed.policy, none, Targets(bed.policy, None)).floats()["response"] == 0


def test_activation_quantization_is_in_the_objective_too(beds: Callable[..., Bed]) -> None:
    """Roundings of two summation orders may differ here, so the agreement is that of the sums, not of their digits."""
    bed = beds(scheme="W4A6")
    targets = Targets(bed.policy, None)
    check(measure(bed.policy, bed.items(), targets), bed.expected(), rel=0.02)
    weights_only = beds().expected()
    assert bed.expected()["anchor"] > 1.03 * weights_only["anchor"]


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
    found = block_energy(Held(), [Context(0, torch.ones(3000))])  # type: ignore[arg-type]
    np.testing.assert_allclose(found.numpy(), oracles.block_energy([big[0].numpy()]), rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen2.5-omni"])
def test_modality_balanced_anchors_weigh_every_modality_the_same(beds: Callable[..., Bed], family: str) -> None:
    bed = beds(family)
    modalities = [prompt.modality.tolist() for prompt in bed.prompts]
    kinds = {modality for prompt in modalities for modality in prompt}
    assert len(kinds) == (3 if family == "qwen2.5-omni" else 2)
    share = oracles.balanced_share(modalities)
    items = bed.items(modality_balanced=True)
    expected = oracles.eq14_anchor(bed.anchor("D"), bed.anchor("Q"), share=share)
    found = measure(bed.policy, items, Targets(bed.policy, None)).floats()
    assert found["anchor"] == pytest.approx(expected, rel=2e-6)
    weight = torch.cat([item.anchor[: prompt.length] for item, prompt in zip(items, bed.prompts, strict=True)])
    modality = torch.cat([prompt.modality for prompt in bed.prompts])
    for kind in kinds:
        assert float(weight[modality == kind].sum()) == pytest.approx(1 / len(kinds), rel=1e-5)


def test_the_anchor_is_every_prompt_token_and_no_response_token(beds: Callable[..., Bed]) -> None:
    bed = beds()
    tokens = sum(prompt.length for prompt in bed.prompts)
    for item, prompt, steps in zip(bed.items(), bed.prompts, CRITICAL.values(), strict=True):
        torch.testing.assert_close(item.anchor[: prompt.length], torch.full((prompt.length,), 1 / tokens))
        assert not item.anchor[prompt.length :].any()
        assert item.sequence.length == prompt.length + max(steps, default=1) - 1, (
            "no token behind the last critical prefix"
        )
        assert item.at.tolist() == [prompt.length - 2 + t for t in steps]
    owned = [len(steps) for steps in CRITICAL.values()]
    weights = [item.weight.tolist() for item in bed.items()]
    assert [len(weight) for weight in weights] == owned
    assert [weight for own in weights for weight in own] == pytest.approx(WEIGHTS)


def test_prompts_without_critical_states_still_anchor(beds: Callable[..., Bed]) -> None:
    bed = beds()
    for states in (None, bed.states.with_columns(weight=np.zeros(len(bed.states), np.float32))):
        items = make_items(bed.policy, bed.prompts, bed.trajectories, states)
        found = measure(bed.policy, items, Targets(bed.policy, None)).floats()
        assert found["anchor"] == pytest.approx(bed.expected()["anchor"], rel=2e-6)
        assert (found["hidden"], found["pair"], found["response"]) == (0, 0, 0)


# Batches


@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]], [[1, 2, 0]]])
def test_terms_are_sums_over_prompts_whoever_shares_their_batch(
    beds: Callable[..., Bed], groups: list[list[int]]
) -> None:
    bed = beds("qwen3-vl")
    items, targets = bed.items(), Targets(bed.policy, None)
    energy = block_energy(targets, items)
    together: Terms | None = None
    for group in groups:
        part = measure(bed.policy, [items[index] for index in group], targets, energy)
        together = part if together is None else together + part
    assert together is not None
    check(together, bed.expected(oracles.block_energy(bed.anchor("D"))))


def test_a_small_budget_for_dense_targets_changes_nothing(beds: Callable[..., Bed]) -> None:
    bed = beds()
    kept, none = Targets(bed.policy, None), Targets(bed.policy, 0)
    for _ in range(2):
        assert measure(bed.policy, bed.items(), kept).floats() == measure(bed.policy, bed.items(), none).floats()
    assert kept.used > 0
    assert none.used == 0


def test_checkpointing_changes_neither_values_nor_gradients(beds: Callable[..., Bed]) -> None:
    bed = beds()
    results = []
    for checkpointed in (False, True):
        theta = learnable(bed.theta)
        bed.policy.attach(theta)
        terms = measure(bed.policy, bed.items(), Targets(bed.policy, None), checkpointed=checkpointed)
        with bed.policy.speaking("Q"):
            objective(terms, CalibrateConfig()).backward()
        learned = *theta.smoothing.values(), *theta.ratio.values()
        results.append((terms.floats(), [parameter.grad for parameter in learned]))
    assert results[0][0] == results[1][0]
    for plain, again in zip(results[0][1], results[1][1], strict=True):
        assert plain is not None
        assert again is not None
        torch.testing.assert_close(plain, again, rtol=1e-6, atol=1e-9)


# Eqs. 12 and 13


@pytest.mark.parametrize("removed", [None, "anchor", "hidden", "pair", "response"])
@pytest.mark.parametrize("gamma", [0.0, 0.2, 1.0])
def test_the_objective_is_the_anchor_plus_gamma_times_the_critical_losses(
    beds: Callable[..., Bed], removed: str | None, gamma: float
) -> None:
    bed = beds()
    cfg = CalibrateConfig(gamma=gamma, **{"pair": 1.0, "response": 1.0, **({removed: 0.0} if removed else {})})
    losses = []
    for row in np.flatnonzero(bed.states.critical):
        one = np.zeros(len(bed.states), np.bool_)
        one[row] = True
        alone = replace(bed, states=bed.states.with_columns(critical=one, weight=one.astype(np.float32)))
        parts = {name: value * (name != removed) for name, value in alone.expected().items()}
        losses.append(oracles.eq13_critical_loss(parts["hidden"], parts["pair"], parts["response"]))
    anchor = bed.expected()["anchor"] * (removed != "anchor")
    expected = oracles.eq12_objective(anchor, gamma, WEIGHTS, losses)
    found = objective(measure(bed.policy, bed.items(), Targets(bed.policy, None)), cfg)
    assert float(found) == pytest.approx(expected, rel=2e-6)


def test_decision_losses_are_huber_and_kl_of_each_state(beds: Callable[..., Bed]) -> None:
    bed = beds("qwen2.5-omni")
    width = bed.prompts[0].embeds.shape[1]
    dense = torch.randn(12, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    quant = dense + torch.linspace(0.01, 1, 12, dtype=torch.float64)[:, None] * torch.randn(
        12, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    reference, competitor = torch.arange(12), torch.arange(12) + 300
    z_dense, z_quant = bed.policy.logits(dense), bed.policy.logits(quant)
    margin = pair_margin(z_dense, reference, competitor)
    pair, response = decision_losses(bed.policy, dense, quant, reference, competitor, margin)
    changes = []
    for row in range(12):
        d, q = z_dense[row].numpy(), z_quant[row].numpy()
        margins = [oracles.eq5_margin(z, row, row + 300) for z in (q, d)]
        changes.append(abs(margins[0] - margins[1]))
        assert float(pair[row]) == pytest.approx(oracles.eq16_pair(*margins), rel=1e-6)
        assert float(response[row]) == pytest.approx(oracles.eq17_response(d, q), rel=1e-6)
    assert min(changes) < 1 < max(changes), "both pieces of the Huber loss are here"


def test_the_dense_margin_is_the_banks_not_a_fresh_one(beds: Callable[..., Bed]) -> None:
    """It is frozen with the round: a bank that says otherwise moves the pair loss."""
    bed = beds()
    moved = bed.states.with_columns(margin_dense=bed.states.margin_dense + 10)
    items = make_items(bed.policy, bed.prompts, bed.trajectories, moved)
    assert float(measure(bed.policy, items, Targets(bed.policy, None)).pair) > 5


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
    tiny: Callable[[str], Tiny], beds: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch, scheme: Scheme, part: str
) -> None:
    """End to end: blocks, attention, norms, biases, head and every dynamic step lie inside the graph."""
    bed, policy = beds(), exact_policy(tiny("qwen2.5-vl"), scheme)
    items = make_items(policy, bed.prompts, bed.trajectories, bed.states)[::2]
    targets = Targets(policy, None)
    theta = random_theta(policy, torch.float64, offsets=True)
    for u in theta.smoothing.values():
        u *= 0.2
    cfg = CalibrateConfig(gamma=1.0)

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
                getattr(shifted, part)[key] += distance * along
            replay.rewind()
            return float(loss(shifted))

        reach = 3e-5  # the models' own norms compute in fp32, which drowns anything shorter
        measured = (moved(reach) - moved(-reach)) / (2 * reach)
    assert slope == pytest.approx(measured, rel=2e-3)
