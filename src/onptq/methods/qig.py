"""QIG: MBQ's grid search with a weight per token, by integrated gradients of what quantization does to the output.

Paper form (the default). F(x) is the mean absolute difference between a pair's unit with dense and with rounded weights, both
given x. Its integrated gradients along the straight path from the quantized input x^q to the dense input x,
(x - x^q) * int_0^1 dF(x_a)/dx_a da, say what each entry adds to F(x) - F(x^q). A token's importance is the mean over its channels
of their absolute value, clipped to [Q1 - 1.5 IQR, Q3 + 1.5 IQR] within its sequence and divided by the sequence's sum. The paper
leaves open what x^q is: here what the quantized linears multiply with, that is the input after the quantized prefix, rounded per
token where the scheme rounds activations. Candidates are judged as MBQ judges them: dense input, dense target.

Released form. What the authors' code does instead, with points from end to end. Where activations are quantized: F's other unit
is quantized like a candidate and has no gradient, candidates are given the quantized prefix's input, which is also where the path
begins, the target is the dense unit on that input, and nothing is clipped. Weight-only: the path begins at zero, importances are
clipped, and the first five searches weigh response, picture and sound alike.

Every token of the sequence counts, the prompt's text too. Responses, grid, pairs and fold are MBQ's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from onptq.bank import Trajectory
from onptq.methods.layerwise import (
    IN_ORDER,
    INSTRUCTION,
    Stream,
    answer_prompts,
    open_streams,
    quantized_linears,
    replaced,
)
from onptq.methods.mbq import Case, best_smoothing
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import Block
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, pair_key

POINTS = 32
FENCE = 1.5  # of the interquartile range
UNIFORM_SEARCHES = 5  # released form, weight-only


def qig(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    released: bool = False,
    points: int = POINTS,
) -> Theta:
    answered = answer_prompts(policy, prompts, responses)
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    sequences = [one.sequence for one in answered]
    kinds = {one.sequence.ordinal: one.kinds for one in answered}
    dense, quantized = open_streams(policy, sequences), open_streams(policy, sequences)
    searches = 0
    with torch.no_grad(), policy.speaking("D"):
        for block in policy.structure.blocks:
            own = [stream.entering(block) for stream in dense]
            for place, pair in enumerate(IN_ORDER):
                with replaced(block, quantized_linears(policy, theta, block, IN_ORDER[:place])):
                    met = [stream.entering(block) for stream in quantized]
                met_here = [(stream, x[pair], y[pair]) for stream, x, y in zip(dense, own, met, strict=True)]
                if released and not policy.scheme.quantizes_activations and searches < UNIFORM_SEARCHES:
                    cases = [_uniform_case(block, pair, stream, x, kinds) for stream, x, _ in met_here]
                else:
                    make = _released_case if released else _paper_case
                    cases = [make(policy, theta, block, pair, *each, points) for each in met_here]
                theta.smoothing[pair_key(block, pair)] = best_smoothing(policy, theta, block, pair, cases)
                searches += 1
            for stream in dense:
                stream.advance(block)
            with replaced(block, quantized_linears(policy, theta, block, IN_ORDER)):
                for stream in quantized:
                    stream.advance(block)
            advance(1)
    return theta


def _paper_case(
    policy: Policy, theta: Theta, block: Block, pair: str, stream: Stream, x: Tensor, x_met: Tensor, points: int
) -> Case:
    scheme = policy.scheme
    start = fake_quantize_activations(x_met, scheme.activation_bits) if scheme.quantizes_activations else x_met
    attributed = integrated_gradients(policy, theta, block, pair, stream, start, x, points=points)
    weight = token_importance(attributed, stream.real, clipped=True)
    return Case(stream, x, stream.unit(block, pair, x), weight)


def _released_case(
    policy: Policy, theta: Theta, block: Block, pair: str, stream: Stream, x: Tensor, x_met: Tensor, points: int
) -> Case:
    activations = policy.scheme.quantizes_activations
    start = x_met if activations else torch.zeros_like(x)
    given = x_met if activations else x
    attributed = integrated_gradients(policy, theta, block, pair, stream, start, x, points=points, released=True)
    weight = token_importance(attributed, stream.real, clipped=not activations)
    return Case(stream, given, stream.unit(block, pair, given), weight)


def _uniform_case(block: Block, pair: str, stream: Stream, x: Tensor, kinds: Mapping[int, Tensor]) -> Case:
    counts = stream.pad(kinds, INSTRUCTION) != INSTRUCTION
    return Case(stream, x, stream.unit(block, pair, x), counts.float())


def integrated_gradients(
    policy: Policy,
    theta: Theta,
    block: Block,
    pair: str,
    stream: Stream,
    start: Tensor,
    end: Tensor,
    *,
    points: int = POINTS,
    released: bool = False,
) -> Tensor:
    """(x - x^q) times the mean gradient of F along the path, [B, S, I]; theta rounds the weights, without smoothing yet.

    The paper's integral is taken at the middles of `points` equal steps, so that the entries of a sequence sum to
    F(x) - F(x^q) as closely as the points allow.
    """
    rounded = quantized_linears(policy, theta, block, [pair], activations=released)
    followed = not (released and policy.scheme.quantizes_activations)
    path = torch.linspace(0, 1, points) if released else (torch.arange(points) + 0.5) / points
    total = torch.zeros_like(end)
    for a in path.tolist():
        x = (start + a * (end - start)).detach().requires_grad_()
        with torch.enable_grad():
            plain = stream.unit(block, pair, x)
            with replaced(block, rounded), torch.set_grad_enabled(followed):
                other = stream.unit(block, pair, x)
            total += torch.autograd.grad(difference(plain, other, stream.real).sum(), x)[0]
    return (end - start) * total / points


def difference(plain: Tensor, other: Tensor, real: Tensor) -> Tensor:
    """F of each sequence [B]: mean over its tokens and their channels of |f(x, w) - f(x, w^q)|."""
    per_token = (plain - other).abs().mean(-1)
    return torch.where(real, per_token, 0).sum(-1) / real.sum(-1)


def token_importance(attributed: Tensor, real: Tensor, *, clipped: bool) -> Tensor:
    """lambda [B, S], one in sum over a sequence's tokens; alike for all of them where nothing was attributed."""
    weights = torch.zeros_like(real, dtype=torch.float32)
    for row, tokens in enumerate(real):
        score = attributed[row, tokens].float().abs().mean(-1)
        if clipped:
            low, high = score.quantile(0.25), score.quantile(0.75)
            score = score.clamp(low - FENCE * (high - low), high + FENCE * (high - low))
        total = score.sum()
        weights[row, tokens] = score / total if total > 0 else torch.full_like(score, 1 / len(score))
    return weights
