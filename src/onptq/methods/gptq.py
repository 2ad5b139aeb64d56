"""GPTQ: columns are rounded one after the other, and the columns still to come make up for each one's error.

As its authors' code with `true_sequential`: block by block and linear by linear on the inputs that the quantized predecessors
give, damping of 1% of the Hessian's mean diagonal, columns in blocks of 128. Groups are static: scales come from the weight as it
was, so that columns can be taken in another order and still lie in plain groups. A code can be several levels from plain
rounding's; theta holds it as the offset that puts the weight on the code's centre, beyond half a scale where need be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from onptq.bank import Trajectory
from onptq.methods.experts import inputs_of, is_cold, read_by
from onptq.methods.guards import require_finite_error
from onptq.methods.layerwise import Stream, answered_sequences, open_streams
from onptq.methods.linears import dense_weight, tensor_scale
from onptq.methods.resume import BlockStore, fitted_blocks
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import EXPERTS, UP_DOWN, Block
from onptq.quantizer.numerics import in_offsets, quantize_inputs, round_to_codes
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Learned, Theta, log_scales_in, log_scales_out
from onptq.quantizer.weights import per_weight, smoothed, to_groups, weight_grid
from onptq.schemes import Grid

DAMPING = 0.01  # of the Hessian's mean diagonal
COLUMNS = 128


def gptq(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    init: Theta | None = None,
    act_order: bool = True,
    settled: bool = False,
    store: BlockStore | None = None,
) -> Theta:
    """GPTQ's theta on the prompts and responses, the dense model's own greedy ones by default."""
    sequences = answered_sequences(policy, prompts, responses)
    return gptq_on(policy, sequences, advance, init=init, act_order=act_order, settled=settled, store=store)


@torch.no_grad()
def gptq_on(
    policy: Policy,
    sequences: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    init: Theta | None = None,
    act_order: bool = True,
    settled: bool = False,
    store: BlockStore | None = None,
) -> Theta:
    """GPTQ's theta on whole sequences.

    `init` gives smoothing and ratios; by default nothing is smoothed and the range is full. `act_order` takes the columns with
    the largest inputs first. `settled` gives codes instead of offsets, a quarter of the bytes.
    """
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device) if init is None else init.freed()
    if not policy.scheme.quantizes_weights:
        return theta
    streams = open_streams(policy, sequences)
    with policy.lent(), policy.speaking("Q"):
        policy.attach(theta)
        for block in fitted_blocks(policy, theta, streams, store, advance):
            _fit(policy, theta, block, streams, act_order)
            if settled:
                policy.settle_block(theta, block)
    return theta


def _fit(policy: Policy, theta: Theta, block: Block, streams: Sequence[Stream], act_order: bool) -> None:
    """Choose the codes of one block's linears, in place, each behind its quantized predecessors."""
    for _, stage in groupby(block.pairs, lambda pair: UP_DOWN if pair.endswith(UP_DOWN) else pair):
        pairs = [pair for pair in stage if policy.scheme_of(block, pair).quantizes_weights]
        hessians = _hessians(policy, streams, block, pairs)
        for name in (name for pair in pairs for name in block.consumers(pair)):
            if (hessian := read_by(block, name, hessians)) is not None:
                offset = _offsets(policy, theta, block, name, hessian, act_order)
                theta.linears[block.path(name)] = Learned(theta.linears[block.path(name)].ratio, offset)


def _hessians(policy: Policy, streams: Sequence[Stream], block: Block, pairs: Sequence[str]) -> dict[str, Tensor]:
    """X^T X of what the consumers of the pairs read, rounded as they multiply it, [I, I], by pair or by expert; of cold experts
    none. All come from one run of the block."""
    total, tokens = dict[str, Tensor](), dict[str, int]()
    pair_of = {pair: pair for pair in pairs}
    if "norm_gate_up" in pairs:
        pair_of |= {f"{EXPERTS}{number}": "norm_gate_up" for number in range(len(block.experts or ()))}
    for stream in streams if pairs else ():
        inputs = inputs_of(stream, block)
        for key in pair_of.keys() & inputs.keys():
            x = quantize_inputs(stream.tokens(inputs[key]), policy.scheme_of(block, pair_of[key]))
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            total[key] = x.T @ x if key not in total else total[key].addmm_(x.T, x)
            tokens[key] = tokens.get(key, 0) + len(x)
    for key, hessian in total.items():
        require_finite_error(hessian, f"layers.{block.index}.{key} (its Hessian)")
    return {key: hessian for key, hessian in total.items() if not is_cold(key, tokens[key])}


def _offsets(policy: Policy, theta: Theta, block: Block, name: str, hessian: Tensor, act_order: bool) -> Tensor:
    """Rounding offsets of a linear [O, I]. Rows with a smaller error under plain rounding are rounded plainly."""
    weight = smoothed(dense_weight(block, name), log_scales_in(theta, block, name), log_scales_out(theta, block, name))
    ratio = theta.linears[block.path(name)].ratio
    scheme = policy.scheme.of(block.path(name))
    rows, grid = scheme.block_rows, scheme.weight_grid
    scale, zero = weight_grid(to_groups(weight, ratio, rows), ratio, scheme, policy.storage, tensor_scale(block, name))
    zero = torch.zeros_like(scale) if zero is None else zero
    scale, zero = (per_weight(part[..., 0], weight.shape, rows) for part in (scale, zero))
    plain = round_to_codes(weight, scale, grid, zero)
    codes = greedy_codes(weight, scale, zero, hessian, grid, act_order)
    errors = [output_error(weight - (each - zero) * scale, hessian) for each in (codes, plain)]
    scaled = weight / scale
    offset = in_offsets(codes - zero - scaled, scaled, grid)
    return torch.where((errors[0] < errors[1])[:, None], offset, 0).float()


def output_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """Squared output error of every row of a weight difference [O, I], summed over the tokens in the Hessian."""
    difference = difference.to(hessian.dtype)
    return (difference @ hessian * difference).sum(1)


def greedy_codes(weight: Tensor, scale: Tensor, zero: Tensor, hessian: Tensor, grid: Grid, act_order: bool) -> Tensor:
    """Codes [O, I] of a weight on a fixed grid; scale and zero point are given per weight."""
    diagonal, count = hessian.diagonal(), weight.shape[1]
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(count, device=weight.device)
    upper = _inverse_factor(hessian[order][:, order])
    left, scale, zero = weight[:, order].to(hessian.dtype), scale[:, order], zero[:, order]
    codes = torch.empty_like(weight)
    for first in range(0, count, COLUMNS):
        last = min(first + COLUMNS, count)
        errors = left.new_empty(len(left), last - first)
        for j in range(first, last):
            code = round_to_codes(left[:, j], scale[:, j], grid, zero[:, j])
            error = (left[:, j] - (code - zero[:, j]) * scale[:, j]) / upper[j, j]
            left[:, j + 1 : last] -= error[:, None] * upper[j, j + 1 : last]
            errors[:, j - first] = error
            codes[:, order[j]] = code.to(codes.dtype)
        left[:, last:] -= errors @ upper[first:last, last:]
    return codes


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Upper Cholesky factor of the damped Hessian's inverse, in float64: few tokens leave it nearly singular."""
    wide = hessian.double().clone()
    diagonal = wide.diagonal()
    diagonal[diagonal == 0] = 1  # an input that is always zero
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.to(hessian.dtype)
