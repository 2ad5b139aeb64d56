"""GPTQ against optimal brain quantization computed column by column, and what it promises about errors and codes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from conftest import MULTIMODAL, Tiny
from method_bed import (
    PROMPTS,
    block_outputs,
    check_manners,
    exact_policy,
    inputs_of,
    open_small,
    sequences_of,
    short_responses,
)

from onptq.methods.gptq import DAMPING, gptq, greedy_codes
from onptq.methods.search import search
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import LINEARS
from onptq.quantizer.folded import FoldedLinear
from onptq.quantizer.numerics import code_range
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import OFFSET_RANGE, Theta

Beds = Callable[[str], tuple[Policy, list[EncodedPrompt], Theta]]
SCHEMES = ("W3A4", "W4A16", "W3A16-g32", "W3A16-g32-asym")


@pytest.fixture(scope="module")
def beds(small: Path) -> Beds:
    """A float64 policy of the given scheme, its sequences and its theta."""
    made: dict[str, tuple[Policy, list[EncodedPrompt], Theta]] = {}

    def get(scheme: str) -> tuple[Policy, list[EncodedPrompt], Theta]:
        if scheme not in made:
            bed = open_small(small)
            policy = exact_policy(bed, scheme)
            prompts = bed.encode(policy, PROMPTS)
            theta = gptq(policy, prompts, responses=short_responses(prompts))
            made[scheme] = policy, sequences_of(policy, prompts), theta
        return made[scheme]

    return get


def naive_codes(
    weight: np.ndarray, step: np.ndarray, zero: np.ndarray, hessian: np.ndarray, bits: int, act_order: bool
) -> np.ndarray:
    """Optimal brain quantization in a given order: after every column all that are left take the best possible values.

    With F the columns left and e the error of column j, w_F -= e / [H_F^-1]_jj * [H_F^-1]_j; H_F is inverted anew each time.
    """
    low, high = code_range(bits)
    damped = hessian.astype(np.float64).copy()
    for j in range(len(damped)):
        damped[j, j] = damped[j, j] or 1.0
    damped += DAMPING * np.mean(np.diag(damped)) * np.eye(len(damped))
    order = sorted(range(len(damped)), key=lambda j: (-hessian[j, j] if act_order else 0, j))
    left, codes = weight.astype(np.float64).copy(), np.zeros(weight.shape)
    while order:
        inverse = np.linalg.inv(damped[np.ix_(order, order)])
        j = order[0]
        codes[:, j] = np.round(np.clip(left[:, j] / step[:, j] + zero[:, j], low, high))
        error = left[:, j] - (codes[:, j] - zero[:, j]) * step[:, j]
        left[:, order] -= np.outer(error / inverse[0, 0], inverse[0])
        order = order[1:]
    return codes


def deployed(policy: Policy, theta: Theta) -> dict[str, FoldedLinear]:
    policy.freeze(theta)
    return {path: piece for path, piece in policy.folded() if isinstance(piece, FoldedLinear)}


def grid_of(piece: FoldedLinear) -> tuple[np.ndarray, np.ndarray]:
    """Step and zero point of every weight."""
    size = piece.codes.shape[1] // piece.step.shape[1]
    zero = torch.zeros_like(piece.step) if piece.zero is None else piece.zero
    return tuple(part.double().repeat_interleave(size, 1).numpy() for part in (piece.step, zero))  # type: ignore[return-value]


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_columns_in_blocks_give_the_codes_of_one_column_at_a_time(act_order: bool, asymmetric: bool) -> None:
    rng = np.random.default_rng(0)
    rows, columns, bits = 12, 300, 3  # three blocks of columns, the last one short
    mixing = rng.normal(size=(columns, columns)) / 12 + np.eye(columns)
    x = rng.normal(size=(500, columns)) * np.exp(rng.normal(size=columns)) @ mixing
    x[:, 7] = 0  # an input that is never there
    weight = rng.normal(size=(rows, columns))
    step = np.repeat(np.abs(weight).reshape(rows, 6, 50).max(-1) / 3, 50, axis=1)
    zero = np.repeat(rng.integers(-2, 2, (rows, 6)).astype(float), 50, axis=1) if asymmetric else np.zeros_like(step)
    found = greedy_codes(*map(torch.from_numpy, (weight, step, zero, x.T @ x)), bits, act_order)
    expected = naive_codes(weight, step, zero, x.T @ x, bits, act_order)
    np.testing.assert_array_equal(found.numpy(), expected)
    assert (expected != np.round(np.clip(weight / step + zero, -4, 3))).mean() > 0.1, "and not those of plain rounding"


@pytest.mark.parametrize("scheme", ["W4A16", "W3A16-g32-asym"])
def test_every_linear_has_the_codes_of_its_inputs_under_the_quantized_predecessors(beds: Beds, scheme: str) -> None:
    policy, sequences, theta = beds(scheme)
    pieces = deployed(policy, theta)
    for block in policy.structure.blocks:
        for name in LINEARS:
            piece, weight = pieces[block.path(name)], block.child(name).weight.double().numpy()
            x = inputs_of(policy, "Q", sequences, block, name)
            step, zero = grid_of(piece)
            codes = naive_codes(weight, step, zero, x.T @ x, policy.scheme.weight_bits, act_order=True)
            same = (piece.codes.numpy() == codes).all(1)
            kept = (theta.offset[block.path(name)] == 0).all(1).numpy()
            assert (same | kept).all(), block.path(name)
            assert kept.mean() < 0.1, "few rows are better off with plain rounding"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_row_errs_more_than_under_plain_rounding(beds: Beds, scheme: str) -> None:
    policy, sequences, theta = beds(scheme)
    plain = deployed(policy, Theta.rtn(policy.structure.blocks, policy.scheme))
    pieces = deployed(policy, theta)
    total = {"gptq": 0.0, "rtn": 0.0}
    for block in policy.structure.blocks:
        for name in LINEARS:
            path, weight = block.path(name), block.child(name).weight.double().numpy()
            x = inputs_of(policy, "Q", sequences, block, name)
            if policy.scheme.quantizes_activations:
                token = oracles.token_step(x, policy.scheme.activation_bits)
                x = oracles.rounding(x, token, policy.scheme.activation_bits)(x, token)
            errors = {}
            for label, piece in (("gptq", pieces[path]), ("rtn", plain[path])):
                step, zero = grid_of(piece)
                errors[label] = ((((piece.codes.numpy() - zero) * step - weight) @ x.T) ** 2).sum(1)
                total[label] += errors[label].sum() / ((weight @ x.T) ** 2).sum()
            assert (errors["gptq"] <= errors["rtn"] * (1 + 1e-6)).all(), path
    assert total["gptq"] < 0.6 * total["rtn"]


def test_rows_that_the_greedy_order_serves_worse_keep_plain_rounding(
    monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    """With codes that are all zero, plain rounding is better in every row, and nothing is left of them."""
    monkeypatch.setattr(importlib.import_module("onptq.methods.gptq"), "greedy_codes", lambda weight, *rest: weight * 0)
    bed = open_small(small)
    policy = bed.policy("W4A8")
    prompts = bed.encode(policy, 2)
    theta = gptq(policy, prompts, responses=short_responses(prompts))
    assert theta.offset
    assert not any(offset.any() for offset in theta.offset.values())


def test_codes_far_from_plain_rounding_survive_the_trust_region_and_the_disk(beds: Beds, tmp_path: Path) -> None:
    policy, _, theta = beds("W3A8")
    offsets = torch.cat([offset.flatten() for offset in theta.offset.values()])
    assert 0.05 < (offsets.abs() > OFFSET_RANGE[1]).double().mean() < 0.5
    assert offsets.abs().max() > 1.5, "more than one step away"
    before = deployed(policy, theta)
    theta.save(tmp_path / "theta.safetensors")
    kept = Theta.load(tmp_path / "theta.safetensors")
    kept.project_(theta)
    assert all(torch.equal(piece.codes, before[path].codes) for path, piece in deployed(policy, kept).items())
    for offset in kept.offset.values():
        offset += 2
    kept.project_(theta)
    for path, offset in kept.offset.items():
        assert torch.equal(offset, (theta.offset[path] + 2).clamp(max=theta.offset[path].clamp(min=0.5)))


@pytest.mark.parametrize("scheme", ["W3A8", "W3A16-g32-asym"])
def test_centring_takes_its_codes_as_they_are(beds: Beds, scheme: str) -> None:
    policy, _, theta = beds(scheme)
    before = deployed(policy, theta)
    centred = policy.centre(theta)
    moved = torch.cat([(centred.offset[path] - offset).abs().flatten() for path, offset in theta.offset.items()])
    assert moved.max() < 0.5001, "no further than to the middle of the code"
    for path, piece in deployed(policy, centred).items():
        assert torch.equal(piece.codes, before[path].codes)
        assert torch.equal(piece.step, before[path].step)
        assert piece.zero is None or torch.equal(piece.zero, before[path].zero)


def test_the_live_graph_is_the_deployed_one(beds: Beds) -> None:
    policy, sequences, theta = beds("W3A16-g32-asym")
    policy.freeze(theta)
    frozen = block_outputs(policy, "Q", sequences)
    policy.attach(theta)
    for ours, theirs in zip(block_outputs(policy, "Q", sequences), frozen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_given_start_keeps_its_smoothing_and_ratios(small: Path) -> None:
    bed = open_small(small)
    policy = bed.policy("W3A8")
    prompts = bed.encode(policy, 2)
    start = search(policy, prompts)
    theta = gptq(policy, prompts, start=start, responses=short_responses(prompts))
    assert not start.offset
    for part in ("smoothing", "ratio"):
        mine, theirs = getattr(theta, part), getattr(start, part)
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    sequences = sequences_of(policy, prompts)
    dense = block_outputs(policy, "D", sequences)[0]
    errors = []
    for each in (start, theta):
        policy.freeze(each)
        found = block_outputs(policy, "Q", sequences)[0]
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(found, dense, strict=True)))
    assert errors[1] < 0.9 * errors[0]


def test_unquantized_weights_have_nothing_to_round(small: Path) -> None:
    bed = open_small(small)
    policy = bed.policy("W16A8")
    assert not gptq(policy, bed.encode(policy, 1)).offset


@pytest.mark.parametrize("family", MULTIMODAL)
def test_every_family_is_rounded_and_left_as_it_was(tiny: Callable[[str], Tiny], family: str) -> None:
    def method(policy: Policy, prompts: list[EncodedPrompt], advance: Callable[[int], None]) -> Theta:
        return gptq(policy, prompts, advance, responses=short_responses(prompts))

    _, theta = check_manners(tiny(family), "W4A8", method)
    assert theta.offset.keys() == theta.ratio.keys()
    assert all(offset.any() for offset in theta.offset.values())
    assert not any(u.any() for u in theta.smoothing.values())
