"""The paper's equations, written naively in float64 numpy, one function each; nothing here calls the library's own arithmetic.

Numbers are the paper's. Where the paper leaves a choice open, the function says which resolution it follows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]
LN2 = math.log(2)


def softmax(logits: Array) -> Array:
    logits = np.asarray(logits, np.float64)
    weight = np.exp(logits - logits.max())
    return weight / weight.sum()


def first_argmax(values: Sequence[float] | Array, without: int | None = None) -> int:
    """The lowest index among the largest entries."""
    best = None
    for index, value in enumerate(values):
        if index != without and (best is None or value > values[best]):
            best = index
    assert best is not None
    return best


# Compare


def eq3_actions(z_dense: Array, z_quant: Array) -> tuple[int, int]:
    """a^R and a-hat."""
    return first_argmax(z_dense), first_argmax(z_quant)


def eq4_competitor(z_quant: Array, reference: int) -> int:
    return first_argmax(z_quant, without=reference)


def eq5_margin(logits: Array, reference: int, competitor: int) -> float:
    return float(logits[reference]) - float(logits[competitor])


def eq6_erosion(margin_dense: float, margin_quant: float) -> float:
    return max(0.0, margin_dense - margin_quant)


def kl(p: Array, q: Array) -> float:
    """KL(p || q) of two distributions, 0 log 0 = 0."""
    total = 0.0
    for a, b in zip(p, q, strict=True):
        if a > 0:
            total += a * (math.log(a) - math.log(b)) if b > 0 else math.inf
    return total


def js(p: Array, q: Array) -> float:
    middle = (p + q) / 2
    return (kl(p, middle) + kl(q, middle)) / 2


def eq7_same_state(z_dense: Array, z_quant: Array) -> float:
    """j_t, natural logarithm."""
    return js(softmax(z_dense), softmax(z_quant))


# Branch and risk


def common_horizon(reference: Sequence[int], competitor: Sequence[int], eos: Collection[int]) -> int:
    """H_t for two branches of H tokens, the forced one first: s_{t+h} lies behind h tokens and exists iff none of them ended
    its branch."""
    reach = 0
    for h in range(1, len(reference) + 1):
        if any(token in eos for token in (*reference[:h], *competitor[:h])):
            break
        reach = h
    return reach


def eq8_consequence(
    reference: Sequence[Array] | Array, competitor: Sequence[Array] | Array, horizon: int, divergence: str = "js"
) -> float:
    """A_t from D's logits at s_{t+1}, ..., s_{t+H} of both branches; 0 where no common state exists."""
    if horizon == 0:
        return 0.0
    separation = {"js": js, "kl": kl}[divergence]
    return sum(separation(softmax(reference[h]), softmax(competitor[h])) for h in range(horizon)) / horizon


def eq9_risk(erosion: float, consequence: float, divergence: float, branch_weight: float, eta: float) -> float:
    return erosion * (1 + branch_weight * consequence) + eta * divergence


def eq10_critical(rank: Mapping[tuple[int, int], float], budget: int) -> list[tuple[int, int]]:
    """The `budget` states (prompt, t) of highest rank; equal ranks in the order of prompt and t."""
    return sorted(rank, key=lambda state: (-rank[state], *state))[:budget]


def eq11_weights(risk: Sequence[float]) -> list[float]:
    total = math.fsum(risk)
    return [value / total if total else 1 / len(risk) for value in risk]


# Calibrate


def mse(p: Array, q: Array) -> float:
    return float(((p - q) ** 2).sum()) / len(p)


def eq12_objective(anchor: float, gamma: float, weights: Sequence[float], critical: Sequence[float]) -> float:
    return anchor + gamma * math.fsum(w * loss for w, loss in zip(weights, critical, strict=True))


def eq13_critical_loss(hidden: float, pair: float, response: float) -> float:
    return hidden + pair + response


def eq14_anchor(
    dense: Sequence[Array],
    quant: Sequence[Array],
    energy: Sequence[float] | None = None,
    share: Sequence[Array] | None = None,
) -> float:
    """Hidden vectors of every anchor token of every prompt: per prompt [blocks, tokens, d].

    `energy` divides a block's error; `share` replaces the uniform 1 / |U| by a weight per token.
    """
    tokens = sum(prompt.shape[1] for prompt in dense)
    total = 0.0
    for index, (d, q) in enumerate(zip(dense, quant, strict=True)):
        for u in range(d.shape[1]):
            weight = 1 / tokens if share is None else float(share[index][u])
            for block in range(len(d)):
                total += weight * mse(d[block, u], q[block, u]) / (1.0 if energy is None else energy[block])
    return total / len(dense[0])


def eq15_hidden(dense: Array, quant: Array, energy: Sequence[float] | None = None) -> float:
    """The final-prefix hidden vectors of one state, [blocks, d]."""
    errors = [mse(d, q) for d, q in zip(dense, quant, strict=True)]
    return sum(error / (1.0 if energy is None else energy[block]) for block, error in enumerate(errors)) / len(errors)


def eq16_pair(margin_quant: float, margin_dense: float) -> float:
    change = abs(margin_quant - margin_dense)
    return 0.5 * change**2 if change <= 1 else change - 0.5


def matched_pair_weight(margins: Sequence[tuple[float, float]], weights: Sequence[float]) -> float:
    """By what the pair weight is multiplied so that both arms begin alike; (m_Q, m_D) of every visited state."""
    losses = [eq16_pair(quant, dense) for quant, dense in margins]
    return math.fsum(losses) / len(losses) / math.fsum(w * loss for w, loss in zip(weights, losses, strict=True))


def eq17_response(z_dense: Array, z_quant: Array) -> float:
    return kl(softmax(z_dense), softmax(z_quant))


def block_energy(dense: Sequence[Array], massive_share: float = 0.001) -> list[float]:
    """Mean dense energy per channel after each block over all anchor tokens, without the `massive_share` (at least one) of
    largest norm."""
    energies = []
    for block in range(len(dense[0])):
        tokens = sorted(float((vector**2).mean()) for prompt in dense for vector in prompt[block])
        massive = max(1, round(massive_share * len(tokens)))
        energies.append(sum(tokens[:-massive]) / len(tokens[:-massive]))
    return energies


def balanced_share(modalities: Sequence[Sequence[int]]) -> list[Array]:
    """Token weights of `modality_balanced`: over all prompts, each modality that occurs weighs the same."""
    every = [modality for prompt in modalities for modality in prompt]
    kinds = set(every)
    return [np.array([1 / (len(kinds) * every.count(modality)) for modality in prompt]) for prompt in modalities]


def cosine_rate(rate: float, step: int, steps: int) -> float:
    """From the whole rate at step 0 along half a cosine; a tenth would be reached at step `steps`."""
    return rate * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)


def adam_moves(
    gradients: Sequence[Array], rates: Sequence[float], betas: tuple[float, float], epsilon: float
) -> list[Array]:
    """What Adam adds to a parameter at each step; without decay, AdamW is the same."""
    first, second, moves = np.zeros_like(gradients[0]), np.zeros_like(gradients[0]), []
    for count, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        mean, square = first / (1 - betas[0] ** count), second / (1 - betas[1] ** count)
        moves.append(-rate * mean / (np.sqrt(square) + epsilon))
    return moves


# Theorem 1 and appendix B


def eq20_return(policy: Array, value: Array) -> float:
    """J_{M -> mu}: the expected future value of the policy's next action."""
    return math.fsum(float(p) * float(v) for p, v in zip(policy, value, strict=True))


def total_variation(p: Array, q: Array) -> float:
    return math.fsum(abs(float(a) - float(b)) for a, b in zip(p, q, strict=True)) / 2


def span(value: Array) -> float:
    return float(max(value)) - float(min(value))


def eq21_bound(p_dense: Array, p_quant: Array, value: Array) -> float:
    """The right-hand side of the Decision-Consequence bound."""
    return total_variation(p_quant, p_dense) * span(value)


def eq28_pair_policy(policy: Array, reference: int, competitor: int) -> tuple[float, float]:
    """The policy restricted to the pair."""
    mass = float(policy[reference]) + float(policy[competitor])
    return float(policy[reference]) / mass, float(policy[competitor]) / mass


def eq29_pair_return(policy: Array, value: Array, reference: int, competitor: int) -> float:
    q, rest = eq28_pair_policy(policy, reference, competitor)
    return q * float(value[reference]) + rest * float(value[competitor])


def eq30_pair_deviation(p_dense: Array, p_quant: Array, value: Array, reference: int, competitor: int) -> float:
    """The right-hand side of the pair identity: shifted mass times difference of value."""
    dense, quant = (eq28_pair_policy(policy, reference, competitor)[0] for policy in (p_dense, p_quant))
    return abs(quant - dense) * abs(float(value[reference]) - float(value[competitor]))


def eq31_log_odds(policy: Array, reference: int, competitor: int) -> float:
    q, rest = eq28_pair_policy(policy, reference, competitor)
    return math.log(q / rest)


# Quantizers


@dataclass(frozen=True)
class Frozen:
    """Rounding at one point: the residual where the code is free, the code where it saturates. Freezing both turns the
    staircase into the smooth function whose gradient straight-through estimation means."""

    inside: NDArray[np.bool_]
    residual: Array
    code: Array
    zero: Array | float

    def __call__(self, x: Array, step: Array, offset: Array | float = 0.0) -> Array:
        v = x / step + offset + self.zero
        return step * (np.where(self.inside, v + self.residual, self.code) - self.zero)


def rounding(x: Array, step: Array, bits: int, offset: Array | float = 0.0, zero: Array | float = 0.0) -> Frozen:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    v = x / step + offset + zero
    code = v.clip(low, high).round()
    return Frozen((v >= low) & (v <= high), code - v, code, zero)


def token_scale(x: Array, bits: int) -> Array:
    """Dynamic, symmetric, per token: the range of 2^b - 1 steps covers twice the largest magnitude."""
    return np.abs(x).max(-1, keepdims=True) / ((2**bits - 1) / 2)


def token_scale_off_ties(x: Array, bits: int) -> Array:
    """The scale of `naive.without_ties`: a token's largest value lies on the largest code."""
    return np.abs(x).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)


def half_range(bits: int) -> float:
    """Half the distance between the extreme codes, and a thousandth less: where a row's largest weight lies."""
    return (2**bits - 1) / 2 / (1 + 2**-10)


def row_scale(weight: Array, ratio: Array, bits: int) -> Array:
    """Symmetric, per output row (or group): ratio * max|W| over half the range."""
    return ratio * np.abs(weight).max(-1, keepdims=True) / half_range(bits)


def smoothed_weight(weight: Array, u_in: Array, u_out: Array | None) -> Array:
    """W' = diag(1 / s_out) W diag(s_in), s = exp(u)."""
    result = np.empty_like(weight)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            result[o, i] = weight[o, i] * math.exp(u_in[i]) / (1.0 if u_out is None else math.exp(u_out[o]))
    return result


# The checkpoint's own forward, one prompt at a time


@torch.no_grad()
def plain_forward(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: Mapping[str, Tensor], response: Sequence[int]
) -> tuple[Array, Array]:
    """transformers' forward over prompt + response, no cache, no padding: what leaves each block [L, S, d], logits [S, V]."""
    fed = dict(inputs)
    more = torch.tensor([list(response)], dtype=torch.long)
    fed["input_ids"] = torch.cat((inputs["input_ids"], more), dim=1)
    for name in ("attention_mask", "mm_token_type_ids"):
        if name in inputs:
            tail = torch.full_like(more, 1 if name == "attention_mask" else 0).to(inputs[name].dtype)
            fed[name] = torch.cat((inputs[name], tail), dim=1)
    outputs: list[Tensor] = []

    def listen(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output)[0])

    hooks = [block.register_forward_hook(listen) for block in blocks]
    try:
        for module in model.modules():  # rope offsets remembered from another prompt
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None  # type: ignore[assignment]
        logits = model(**fed, use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(outputs).double().numpy(), logits.double().numpy()


# Floats of few bits


def float_codes(mantissa: int, least: int, largest: float) -> list[float]:
    """Every number of the format that is not negative, in order: 0, the subnormal and the normal ones."""
    steps = 2**mantissa
    codes = [step / steps * 2.0**least for step in range(steps)]
    exponent = least
    while codes[-1] < largest:
        codes += [(1 + step / steps) * 2.0**exponent for step in range(steps)]
        exponent += 1
    return [code for code in codes if code <= largest]


def nearest_float(value: float, codes: Sequence[float]) -> float:
    """The nearest code; of two the one with an even last bit, as every second one is; the largest beyond the range."""
    size = abs(value)
    best = min(range(len(codes)), key=lambda index: (abs(codes[index] - size), index % 2))
    return math.copysign(codes[best], value)
