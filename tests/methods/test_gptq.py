"""GPTQ against optimal brain quantization computed column by column, and what it promises about errors and codes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import naive
import numpy as np
import oracles
import pytest
import torch
from conftest import Tiny
from method_models import (
    PROMPTS,
    block_outputs,
    check_contract,
    exact_policy,
    inputs_of,
    open_small,
    sequences_of,
    short_responses,
)

from onptq.kernels.grid import code_range
from onptq.methods.gptq import gptq, greedy_codes
from onptq.methods.search import search
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import LINEARS
from onptq.quantizer.folded import FoldedLinear
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import OFFSET_RANGE, Theta

Cases = Callable[[str], tuple[Policy, list[EncodedPrompt], Theta]]
DAMPING = 0.01  # of the Hessian's mean diagonal, as the authors have it
SCHEMES = ("W3A4", "W4A16", "W3A4-g32", "W3A16-g32-asym")


@pytest.fixture(scope="module")
def cases(small: Path) -> Cases:
    """A float64 policy of the given scheme, its sequences and its theta."""
    made: dict[str, tuple[Policy, list[EncodedPrompt], Theta]] = {}

    def get(scheme: str) -> tuple[Policy, list[EncodedPrompt], Theta]:
        if scheme not in made:
            checkpoint = open_small(small)
            policy = exact_policy(checkpoint, scheme)
            prompts = checkpoint.encode(policy, PROMPTS)
            theta = gptq(policy, prompts, responses=short_responses(prompts))
            made[scheme] = policy, sequences_of(policy, prompts), theta
        return made[scheme]

    return get


def naive_codes(
    weight: np.ndarray, scale: np.ndarray, zero: np.ndarray, hessian: np.ndarray, bits: int, act_order: bool
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
        codes[:, j] = np.round(np.clip(left[:, j] / scale[:, j] + zero[:, j], low, high))
        error = left[:, j] - (codes[:, j] - zero[:, j]) * scale[:, j]
        left[:, order] -= np.outer(error / inverse[0, 0], inverse[0])
        order = order[1:]
    return codes


def library_codes(
    weight: np.ndarray, scale: np.ndarray, zero: np.ndarray, hessian: np.ndarray, bits: int, act_order: bool
) -> np.ndarray:
    """What `naive_codes` is compared with."""
    tensors = [torch.from_numpy(array) for array in (weight, scale, zero, hessian)]
    return greedy_codes(tensors[0], tensors[1], tensors[2], tensors[3], bits, act_order).numpy()


def deployed(policy: Policy, theta: Theta) -> dict[str, FoldedLinear]:
    policy.freeze(theta)
    return {path: piece for path, piece in policy.folded() if isinstance(piece, FoldedLinear)}


def grid_of(piece: FoldedLinear) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point of every weight."""
    size = piece.codes.shape[1] // piece.scale.shape[1]
    zero = torch.zeros_like(piece.scale) if piece.zero is None else piece.zero
    return tuple(part.double().repeat_interleave(size, 1).numpy() for part in (piece.scale, zero))  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_columns_in_blocks_give_the_codes_of_one_column_at_a_time(act_order: bool, asymmetric: bool) -> None:
    rng = np.random.default_rng(0)
    rows, columns, bits = 12, 300, 3  # three blocks of columns, the last one short
    mixing = rng.normal(size=(columns, columns)) / 12 + np.eye(columns)
    x = rng.normal(size=(500, columns)) * np.exp(rng.normal(size=columns)) @ mixing
    x[:, 7] = 0  # an input that is never there
    weight = rng.normal(size=(rows, columns))
    scale = np.repeat(np.abs(weight).reshape(rows, 6, 50).max(-1) / 3, 50, axis=1)
    zero = np.repeat(rng.integers(-2, 2, (rows, 6)).astype(float), 50, axis=1) if asymmetric else np.zeros_like(scale)
    actual = library_codes(weight, scale, zero, x.T @ x, bits, act_order)
    expected = naive_codes(weight, scale, zero, x.T @ x, bits, act_order)
    np.testing.assert_array_equal(actual, expected)
    assert (expected != np.round(np.clip(weight / scale + zero, -4, 3))).mean() > 0.1, "and not those of plain rounding"


@pytest.mark.parametrize("scheme", ["W4A16", "W3A16-g32-asym"])
def test_every_linear_has_the_codes_of_its_inputs_under_the_quantized_predecessors(cases: Cases, scheme: str) -> None:
    policy, sequences, theta = cases(scheme)
    pieces = deployed(policy, theta)
    for block in policy.structure.blocks:
        for name in LINEARS:
            piece, weight = pieces[block.path(name)], block.child(name).get_parameter("weight").double().numpy()
            x = inputs_of(policy, "Q", sequences, block, name)
            scale, zero = grid_of(piece)
            codes = naive_codes(weight, scale, zero, x.T @ x, policy.scheme.weight_bits, act_order=True)
            same = (piece.codes.numpy() == codes).all(1)
            plain = (theta.offset[block.path(name)] == 0).all(1).numpy()
            assert (same | plain).all(), block.path(name)
            assert plain.mean() < 0.1, "few rows are better off with plain rounding"


def test_the_hessian_is_of_inputs_as_the_linear_multiplies_them(small: Path) -> None:
    """Rounded to 4 bits, where their products differ most from those of the inputs themselves."""
    checkpoint = open_small(small)
    policy = exact_policy(checkpoint, "W4A4")
    prompts = checkpoint.encode(policy, PROMPTS)
    same: dict[bool, list[np.ndarray]] = {True: [], False: []}
    with naive.without_ties():
        theta = gptq(policy, prompts, responses=short_responses(prompts))
        pieces, sequences = deployed(policy, theta), sequences_of(policy, prompts)
        block = policy.structure.blocks[0]
        for name in LINEARS:
            piece, weight = pieces[block.path(name)], block.child(name).get_parameter("weight").double().numpy()
            x, (scale, zero) = inputs_of(policy, "Q", sequences, block, name), grid_of(piece)
            token = oracles.token_scale_off_ties(x, 4)
            learned = (theta.offset[block.path(name)] != 0).any(1).numpy()
            for rounded, seen in ((True, oracles.rounding(x, token, 4)(x, token)), (False, x)):
                codes = naive_codes(weight, scale, zero, seen.T @ seen, 4, act_order=True)
                same[rounded].append((piece.codes.numpy() == codes).all(1)[learned])
    assert np.concatenate(same[True]).all()
    assert np.concatenate(same[False]).mean() < 0.5, "the case tells the two apart"


@pytest.mark.parametrize("inputs", ["none", "few"])
def test_inputs_that_are_always_zero_count_as_ones(inputs: str) -> None:
    """Without any input there is no error to make up for, and nothing to divide by."""
    rng = np.random.default_rng(1)
    weight, x = rng.normal(size=(6, 40)), np.zeros((50, 40))
    if inputs == "few":  # and small ones, so that the damping depends on the ones
        x[:, :12] = 0.1 * rng.normal(size=(50, 12)) @ (np.eye(12) + 0.5)
    scale, zero = np.full_like(weight, np.abs(weight).max() / 3), np.zeros_like(weight)
    actual = library_codes(weight, scale, zero, x.T @ x, 3, act_order=True)
    np.testing.assert_array_equal(actual, naive_codes(weight, scale, zero, x.T @ x, 3, act_order=True))
    plain = np.round(np.clip(weight / scale, -4, 3))
    np.testing.assert_array_equal(actual[:, 12:], plain[:, 12:])
    assert (inputs == "none") == np.array_equal(actual, plain)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_row_errs_more_than_under_plain_rounding(cases: Cases, scheme: str) -> None:
    policy, sequences, theta = cases(scheme)
    plain = deployed(policy, Theta.rtn(policy.structure.blocks, policy.scheme))
    pieces = deployed(policy, theta)
    total = {"gptq": 0.0, "rtn": 0.0}
    for block in policy.structure.blocks:
        for name in LINEARS:
            path, weight = block.path(name), block.child(name).get_parameter("weight").double().numpy()
            x = inputs_of(policy, "Q", sequences, block, name)
            if policy.scheme.quantizes_activations:
                token = oracles.token_scale(x, policy.scheme.activation_bits)
                x = oracles.rounding(x, token, policy.scheme.activation_bits)(x, token)
            errors = {}
            for label, piece in (("gptq", pieces[path]), ("rtn", plain[path])):
                scale, zero = grid_of(piece)
                errors[label] = ((((piece.codes.numpy() - zero) * scale - weight) @ x.T) ** 2).sum(1)
                total[label] += errors[label].sum() / ((weight @ x.T) ** 2).sum()
            assert (errors["gptq"] <= errors["rtn"] * (1 + 1e-6)).all(), path
    assert total["gptq"] < 0.6 * total["rtn"]


def test_rows_that_the_greedy_order_serves_worse_keep_plain_rounding(
    monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    """With codes that are all zero, plain rounding is better in every row, and nothing is left of them."""
    monkeypatch.setattr(importlib.import_module("onptq.methods.gptq"), "greedy_codes", lambda weight, *rest: weight * 0)
    checkpoint = open_small(small)
    policy = checkpoint.policy("W4A8")
    prompts = checkpoint.encode(policy, 2)
    theta = gptq(policy, prompts, responses=short_responses(prompts))
    assert theta.offset
    assert not any(offset.any() for offset in theta.offset.values())


def test_codes_far_from_plain_rounding_survive_the_trust_region_and_the_disk(cases: Cases, tmp_path: Path) -> None:
    policy, _, theta = cases("W3A8")
    offsets = torch.cat([offset.flatten() for offset in theta.offset.values()])
    assert 0.05 < (offsets.abs() > OFFSET_RANGE[1]).double().mean() < 0.5
    assert offsets.abs().max() > 1.5, "more than one level away"
    before = deployed(policy, theta)
    theta.save(tmp_path / "theta.safetensors")
    loaded = Theta.load(tmp_path / "theta.safetensors")
    loaded.project_(theta)
    assert all(torch.equal(piece.codes, before[path].codes) for path, piece in deployed(policy, loaded).items())
    for offset in loaded.offset.values():
        offset += 2
    loaded.project_(theta)
    for path, offset in loaded.offset.items():
        assert torch.equal(offset, (theta.offset[path] + 2).clamp(max=theta.offset[path].clamp(min=0.5)))


@pytest.mark.parametrize("scheme", ["W3A8", "W3A16-g32-asym"])
def test_centring_takes_its_codes_as_they_are(cases: Cases, scheme: str) -> None:
    policy, _, theta = cases(scheme)
    before = deployed(policy, theta)
    centred = policy.centre(theta)
    moved = torch.cat([(centred.offset[path] - offset).abs().flatten() for path, offset in theta.offset.items()])
    assert moved.max() < 0.5001, "no further than to the middle of the code"
    for path, piece in deployed(policy, centred).items():
        assert torch.equal(piece.codes, before[path].codes)
        assert torch.equal(piece.scale, before[path].scale)
        zero = before[path].zero
        assert piece.zero is None or (zero is not None and torch.equal(piece.zero, zero))


def test_the_live_graph_is_the_deployed_one(cases: Cases) -> None:
    policy, sequences, theta = cases("W3A16-g32-asym")
    policy.freeze(theta)
    frozen = block_outputs(policy, "Q", sequences)
    policy.attach(theta)
    for ours, theirs in zip(block_outputs(policy, "Q", sequences), frozen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_given_init_keeps_its_smoothing_and_ratios(small: Path) -> None:
    checkpoint = open_small(small)
    policy = checkpoint.policy("W3A8")
    prompts = checkpoint.encode(policy, 2)
    init = search(policy, prompts)
    theta = gptq(policy, prompts, init=init, responses=short_responses(prompts))
    assert not init.offset
    for part in ("smoothing", "ratio"):
        mine, theirs = getattr(theta, part), getattr(init, part)
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    sequences = sequences_of(policy, prompts)
    dense = block_outputs(policy, "D", sequences)[0]
    errors = []
    for each in (init, theta):
        policy.freeze(each)
        actual = block_outputs(policy, "Q", sequences)[0]
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(actual, dense, strict=True)))
    assert errors[1] < 0.9 * errors[0]


def test_unquantized_weights_have_nothing_to_round(small: Path) -> None:
    checkpoint = open_small(small)
    policy = checkpoint.policy("W16A8")
    assert not gptq(policy, checkpoint.encode(policy, 1)).offset


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-omni"])
def test_other_families_are_rounded_and_left_as_it_was(tiny: Callable[[str], Tiny], family: str) -> None:
    def method(policy: Policy, prompts: list[EncodedPrompt], advance: Callable[[int], None]) -> Theta:
        return gptq(policy, prompts, advance, responses=short_responses(prompts))

    _, theta = check_contract(tiny(family), "W4A8", method)
    assert theta.offset.keys() == theta.ratio.keys()
    assert all(offset.any() for offset in theta.offset.values())
    assert not any(u.any() for u in theta.smoothing.values())
