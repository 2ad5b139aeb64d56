"""GPTQ: columns rounded one after the other, each one's error made good by the columns still to come.

As its authors' code with `true_sequential`: block by block and linear by linear on the inputs that the quantized predecessors
give, damping of 1% of the Hessian's mean diagonal, columns in blocks of 128. Groups are static: steps come from the weight as it
was, so that columns can be taken in another order and still lie in plain groups. A code can be several steps from plain
rounding's; theta holds it as the offset that puts the weight on the code's centre, beyond half a step where need be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onptq.bank import Trajectory
from onptq.methods.layerwise import IN_ORDER, Stream, answer_prompts, open_streams
from onptq.methods.linears import dense_weight
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import Block
from onptq.quantizer.numerics import fake_quantize_activations, round_to_codes
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import PAIRS, Learned, Theta, log_scales_in, log_scales_out
from onptq.quantizer.weights import smoothed, weight_grid

DAMPING = 0.01
COLUMNS = 128


@torch.no_grad()
def gptq(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    start: Theta | None = None,
    act_order: bool = True,
    settled: bool = False,
) -> Theta:
    """Responses are the dense model's own greedy ones unless they are given. `start` gives smoothing and step ratios (by default
    there is none, and the range is full); `act_order` takes the columns with the largest inputs first; `settled` leaves codes
    instead of offsets, a quarter of the bytes."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device) if start is None else start.freed()
    if not policy.scheme.quantizes_weights:
        return theta
    streams = open_streams(policy, [one.sequence for one in answer_prompts(policy, prompts, responses)])
    with policy.lent(), policy.speaking("Q"):
        policy.attach(theta)
        for block in policy.structure.blocks:
            for pair in IN_ORDER:
                hessian = _hessian(policy, streams, block, pair)
                for name in PAIRS[pair][1]:
                    offset = _offsets(policy, theta, block, name, hessian, act_order)
                    theta.linears[block.path(name)] = Learned(theta.linears[block.path(name)].ratio, offset)
            if settled:
                policy.settle_block(theta, block)
            for stream in streams:
                stream.advance(block)
            advance(1)
    return theta


def _hessian(policy: Policy, streams: Sequence[Stream], block: Block, pair: str) -> Tensor:
    """X^T X of what the pair's consumers multiply with, [I, I]."""
    total: Tensor | None = None
    for stream in streams:
        x = stream.entering(block)[pair][stream.real]
        if policy.scheme.quantizes_activations:
            x = fake_quantize_activations(x, policy.scheme.activation_bits)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        total = x.T @ x if total is None else total.addmm_(x.T, x)
    assert total is not None
    return total


def _offsets(policy: Policy, theta: Theta, block: Block, name: str, hessian: Tensor, act_order: bool) -> Tensor:
    """Rounding offsets of a linear [O, I]. Rows that the greedy order serves worse than plain rounding keep the latter."""
    weight = smoothed(dense_weight(block, name), log_scales_in(theta, block, name), log_scales_out(theta, block, name))
    ratio = theta.linears[block.path(name)].ratio
    size = weight.shape[1] // ratio.shape[1]
    step, zero = weight_grid(weight.view(*ratio.shape, -1), ratio, policy.scheme, policy.storage)
    step, shift = (
        part[..., 0].repeat_interleave(size, dim=1) for part in (step, torch.zeros_like(step) if zero is None else zero)
    )
    bits = policy.scheme.weight_bits
    plain = round_to_codes(weight, step, bits, shift)
    codes = greedy_codes(weight, step, shift, hessian, bits, act_order)
    errors = [output_error(weight - (each - shift) * step, hessian) for each in (codes, plain)]
    return torch.where((errors[0] < errors[1])[:, None], codes - shift - weight / step, 0).float()


def output_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """Squared output error of every row of a weight difference [O, I], summed over the tokens in the Hessian."""
    difference = difference.to(hessian.dtype)
    return (difference @ hessian * difference).sum(1)


def greedy_codes(weight: Tensor, step: Tensor, shift: Tensor, hessian: Tensor, bits: int, act_order: bool) -> Tensor:
    """Codes [O, I] of a weight on a fixed grid, given per weight."""
    diagonal, count = hessian.diagonal(), weight.shape[1]
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(count, device=weight.device)
    upper = _inverse_factor(hessian[order][:, order])
    left, step, shift = weight[:, order].to(hessian.dtype), step[:, order], shift[:, order]
    codes = torch.empty_like(weight)
    for first in range(0, count, COLUMNS):
        last = min(first + COLUMNS, count)
        errors = left.new_empty(len(left), last - first)
        for j in range(first, last):
            code = round_to_codes(left[:, j], step[:, j], bits, shift[:, j])
            error = (left[:, j] - (code - shift[:, j]) * step[:, j]) / upper[j, j]
            left[:, j + 1 : last] -= error[:, None] * upper[j, j + 1 : last]
            errors[:, j - first] = error
            codes[:, order[j]] = code.to(codes.dtype)
        left[:, last:] -= errors @ upper[first:last, last:]
    return codes


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Upper Cholesky factor of the damped Hessian's inverse, in float64: few tokens leave it nearly singular."""
    wide = hessian.double().clone()
    diagonal = wide.diagonal()
    diagonal[diagonal == 0] = 1  # an input that is always zero asks for nothing
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.to(hessian.dtype)
