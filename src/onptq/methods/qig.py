"""QIG: MBQ's grid search with a weight per token, by integrated gradients of quantization's effect on the output.

F(x) is the mean absolute difference between a pair's unit with dense and with rounded weights, both
given x. Its integrated gradients along the straight path from the quantized input x^q to the dense input x,
(x - x^q) * int_0^1 dF(x_a)/dx_a da, are each entry's contribution to F(x) - F(x^q). A token's importance is the mean over its
channels of their absolute value, clipped to [Q1 - 1.5 IQR, Q3 + 1.5 IQR] within its sequence and divided by the sequence's sum.
The paper leaves x^q open: here it is the input after the quantized prefix, rounded per token where the scheme rounds activations.
Candidates are judged as MBQ judges them: dense input, dense target.

This is the paper's form. The authors' code differs: its quantized unit has no gradient and its path begins at zero for weights
alone, its candidates get the quantized prefix's input, and its first searches weight all tokens alike.

Every token of the sequence counts, the prompt's text too. Responses, grid, pairs and fold are MBQ's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from onptq.bank import Trajectory
from onptq.methods.layerwise import Stream, answer_prompts, open_streams
from onptq.methods.linears import LinearFunction, quantized_linears, replaced
from onptq.methods.mbq import Case, best_smoothing
from onptq.methods.resume import BlockStore, keep, restore
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import Block
from onptq.quantizer.numerics import quantize_inputs
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, pair_key

POINTS = 32
FENCE = 1.5  # of the interquartile range


@torch.no_grad()
def qig(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    points: int = POINTS,
    store: BlockStore | None = None,
) -> Theta:
    """QIG's theta on the prompts and responses, the dense model's own greedy ones by default."""
    answered = answer_prompts(policy, prompts, responses)
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    sequences = [one.sequence for one in answered]
    dense, quantized = open_streams(policy, sequences), open_streams(policy, sequences)
    with policy.speaking("D"):
        for block in policy.gathered_blocks():
            if not restore(store, theta, block):
                _fit(policy, theta, block, dense, quantized, points)
                keep(store, theta, block)
                advance(1)
            for stream in dense:
                stream.advance(block)
            with replaced(block, quantized_linears(policy, theta, block, block.pairs)):
                for stream in quantized:
                    stream.advance(block)
    return theta


def _fit(
    policy: Policy,
    theta: Theta,
    block: Block,
    dense: Sequence[Stream],
    quantized: Sequence[Stream],
    points: int,
) -> None:
    """Search one block's smoothing, in place."""
    dense_inputs = [stream.inputs(block) for stream in dense]
    for place, pair in enumerate(block.pairs):
        if pair not in block.producers:
            continue
        with replaced(block, quantized_linears(policy, theta, block, block.pairs[:place])):
            quantized_inputs = [stream.inputs(block) for stream in quantized]
        cases = [
            _case(policy, theta, block, pair, stream, x[pair], x_q[pair], points)
            for stream, x, x_q in zip(dense, dense_inputs, quantized_inputs, strict=True)
        ]
        theta.smoothing[pair_key(block, pair)] = best_smoothing(policy, theta, block, pair, cases)


def _case(
    policy: Policy, theta: Theta, block: Block, pair: str, stream: Stream, x: Tensor, x_q: Tensor, points: int
) -> Case:
    attributions = integrated_gradients(
        policy, theta, block, pair, stream, quantize_inputs(x_q, policy.scheme_of(block, pair)), x, points=points
    )
    weight = token_importance(attributions, stream.real)
    return Case(stream, x, stream.unit(block, pair, x), weight)


def integrated_gradients(
    policy: Policy,
    theta: Theta,
    block: Block,
    pair: str,
    stream: Stream,
    begin: Tensor,
    end: Tensor,
    *,
    points: int = POINTS,
) -> Tensor:
    """(x - x^q) times the mean gradient of F along the path, [B, S, I]; theta rounds the weights, without smoothing yet.

    The integral is taken at the middles of `points` equal intervals, so that the entries of a sequence sum to
    F(x) - F(x^q) as closely as the points allow.
    """
    rounded = quantized_linears(policy, theta, block, [pair], activations=False)
    along = _along_inputs if block.recurrent or block.experts or block.followers(pair) else _along_outputs
    return (end - begin) * along(block, pair, stream, rounded, begin, end, points) / points


def _along_inputs(
    block: Block,
    pair: str,
    stream: Stream,
    rounded: Mapping[str, LinearFunction],
    begin: Tensor,
    end: Tensor,
    points: int,
) -> Tensor:
    """The sum of F's gradients over the path's points, the unit run from its input at each of them."""
    total = torch.zeros_like(end)
    for a in _middles(points):
        x = (begin + a * (end - begin)).detach().requires_grad_()
        with torch.enable_grad():
            dense = stream.unit(block, pair, x)
            with replaced(block, rounded):
                quantized = stream.unit(block, pair, x)
            total += torch.autograd.grad(difference(dense, quantized, stream.real).sum(), x)[0]
    return total


def _along_outputs(
    block: Block,
    pair: str,
    stream: Stream,
    rounded: Mapping[str, LinearFunction],
    begin: Tensor,
    end: Tensor,
    points: int,
) -> Tensor:
    """The same where only the pair's linears read the input. Their outputs are straight paths too, so they run at the two ends
    alone, and once backwards for all points."""
    linears = {name: block.child(name) for name in rounded}
    x = end.detach().requires_grad_()
    with torch.enable_grad():
        last = [of[name](x) for of in (linears, rounded) for name in rounded]
    first = [of[name](begin) for of in (linears, rounded) for name in rounded]
    sums = [torch.zeros_like(one) for one in first]
    for a in _middles(points):
        outputs = [(y + a * (z - y)).detach().requires_grad_() for y, z in zip(first, last, strict=True)]
        with torch.enable_grad():
            units = []
            for given in (outputs[: len(rounded)], outputs[len(rounded) :]):
                with replaced(block, {name: _constant(y) for name, y in zip(rounded, given, strict=True)}):
                    units.append(stream.unit(block, pair, end))
            dense, quantized = units
            gradients = torch.autograd.grad(difference(dense, quantized, stream.real).sum(), outputs)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient
    return torch.autograd.grad(last, x, sums)[0]


def _middles(points: int) -> list[float]:
    middles: list[float] = ((torch.arange(points) + 0.5) / points).tolist()
    return middles


def _constant(output: Tensor) -> LinearFunction:
    return lambda x: output


def difference(dense: Tensor, quantized: Tensor, real: Tensor) -> Tensor:
    """F of each sequence [B]: mean over its tokens and their channels of |f(x, w) - f(x, w^q)|."""
    per_token = (dense - quantized).abs().mean(-1)
    return torch.where(real, per_token, 0).sum(-1) / real.sum(-1)


def token_importance(attributions: Tensor, real: Tensor) -> Tensor:
    """lambda [B, S], which sums to one over a sequence's tokens; uniform where all attributions are zero."""
    weights = torch.zeros_like(real, dtype=torch.float32)
    for row, tokens in enumerate(real):
        score = attributions[row, tokens].float().abs().mean(-1)
        low, high = score.quantile(0.25), score.quantile(0.75)
        score = score.clamp(low - FENCE * (high - low), high + FENCE * (high - low))
        total = score.sum()
        weights[row, tokens] = score / total if total > 0 else torch.full_like(score, 1 / len(score))
    return weights
