"""The initial checkpoint: smoothing strength per pair and step ratio per row, both chosen by output error.

Every grid contains plain rounding (no smoothing, full range), so no choice has a larger error on the calibration data than
RTN: a fixed strength or a ratio chosen by weight error alone can, and does on some models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onptq.bank import Trajectory
from onptq.engine.prefixes import whole_prompts
from onptq.methods.activations import listening
from onptq.methods.layerwise import answer_prompts
from onptq.methods.linears import by_query_head, dense_weight, entering, rounded_weight
from onptq.methods.smoothquant import FLOOR, migrated, weight_maxima
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.structure import Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import PAIR_INTO, PAIRS, Free, Theta, log_scales_in, log_scales_out, pair_key

STRENGTHS = tuple(step / 10 for step in range(1, 10))  # alpha of s = amax(x)^alpha / amax(W)^(1 - alpha)
RATIOS = tuple(1 - step / 20 for step in range(1, 11))  # 0.95 down to 0.5
SAMPLE_TOKENS = 1024


def search(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
) -> Theta:
    """theta^(0) from the dense model's activations on the prompts and responses, its own greedy ones unless they are given."""
    return search_on(policy, [one.sequence for one in answer_prompts(policy, prompts, responses)], advance)


@torch.no_grad()
def search_on(
    policy: Policy, sequences: Sequence[EncodedPrompt], advance: Callable[[int], None] = lambda blocks: None
) -> Theta:
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    inputs = sample_inputs(policy, sequences)
    for block in policy.structure.blocks:
        seen = inputs.pop(block.index)
        for pair in PAIRS:
            theta.smoothing[pair_key(block, pair)] = _best_smoothing(policy, theta, block, pair, seen)
        for _, consumers in PAIRS.values():
            for name in consumers:
                theta.linears[block.path(name)] = Free(_best_ratio(policy, theta, block, name, seen))
        advance(1)
    return theta


def sample_inputs(policy: Policy, sequences: Sequence[EncodedPrompt]) -> dict[int, dict[str, Tensor]]:
    """What enters each pair's consumers under D, for tokens spread evenly over every sequence: block -> pair -> [n, I]."""
    share = max(1, SAMPLE_TOKENS // len(sequences))
    seen: dict[int, dict[str, list[Tensor]]] = {
        block.index: {pair: [] for pair in PAIRS} for block in policy.structure.blocks
    }
    chosen = torch.zeros(0, dtype=torch.long)

    def hear(block: Block, pair: str, x: Tensor) -> None:
        seen[block.index][pair].append(x[0, chosen])

    with listening(policy.structure.blocks, hear), policy.speaking("D"):
        for sequence in sequences:
            chosen = torch.linspace(0, sequence.length - 1, min(share, sequence.length), device=policy.device).long()
            policy.run(whole_prompts(PromptBatch.of([sequence])))
    return {block: {pair: torch.cat(parts) for pair, parts in pairs.items()} for block, pairs in seen.items()}


def _best_smoothing(policy: Policy, theta: Theta, block: Block, pair: str, seen: dict[str, Tensor]) -> Tensor:
    """The u, among no smoothing and every strength, with the least relative output error summed over the consumers."""
    key, consumers, x = pair_key(block, pair), PAIRS[pair][1], seen[pair]
    outputs = {name: x @ dense_weight(block, name).T for name in consumers}
    x_max = by_query_head(x.abs().amax(0).float(), block, pair).amax(0)
    w_max = weight_maxima(block, pair)
    best, least = theta.smoothing[key], torch.inf
    for strength in (None, *STRENGTHS):
        u = torch.zeros_like(best) if strength is None else migrated(x_max, w_max, strength)
        theta.smoothing[key] = u
        multiplied = entering(policy.scheme, log_scales_in(theta, block, consumers[0]), x)
        error = 0.0
        for name, out in outputs.items():
            weight = rounded_weight(policy, theta, block, name, log_scales_in(theta, block, name))
            emitted = multiplied @ weight.T
            error += float((emitted - out).float().square().sum() / out.float().square().sum().clamp(min=FLOOR))
        if error < least:
            best, least = u, error
    return best


def _best_ratio(policy: Policy, theta: Theta, block: Block, name: str, seen: dict[str, Tensor]) -> Tensor:
    """Per row (and group: all groups of a row share the choice), the ratio of least output error."""
    path, x = block.path(name), seen[PAIR_INTO[name]]
    log_in, log_out = log_scales_in(theta, block, name), log_scales_out(theta, block, name)
    multiplied = entering(policy.scheme, log_in, x)
    out = x @ dense_weight(block, name).T
    if log_out is not None:
        out = out * log_out.neg().exp()
    full = theta.linears[path].ratio
    best, least = full, torch.full((len(full),), torch.inf, device=full.device)
    for ratio in (1.0, *RATIOS):
        log_ratio = torch.full_like(full, ratio).log()
        theta.linears[path] = Free(log_ratio)
        emitted = multiplied @ rounded_weight(policy, theta, block, name, log_in, log_out).T
        error = (emitted - out).float().square().sum(0)
        better = error < least
        best, least = torch.where(better[:, None], log_ratio, best), torch.where(better, error, least)
    return best
