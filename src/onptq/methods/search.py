"""Search: smoothing strength per pair and scale ratio per row, both chosen by output error. Where scales are numbers of few
bits, every group takes the valid scale of least weighted error first, and a row keeps them where its output is better.

Every grid contains plain rounding (no smoothing, full range), so no choice has a larger error on the calibration set than RTN. A
fixed strength, or a ratio chosen by weight error alone, can have one, and has on some models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onptq.bank import Trajectory
from onptq.methods.experts import ROUTES, read_by, read_by_experts
from onptq.methods.guards import require_finite_error, run_finite
from onptq.methods.layerwise import answered_sequences, observing
from onptq.methods.linears import by_query_head, dense_weight, quantized_input, rounded_weight
from onptq.methods.resume import BlockStore, keep, restore, restore_all
from onptq.methods.smoothquant import FLOOR, migrated, weight_maxima
from onptq.models.encoding import EncodedPrompt
from onptq.models.experts import observing_routes
from onptq.models.structure import EXPERTS, Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Free, Theta, log_scales_in, log_scales_out, pair_key
from onptq.quantizer.weights import smoothed, to_groups

STRENGTHS = tuple(n / 10 for n in range(1, 10))  # alpha of s = amax(x)^alpha / amax(W)^(1 - alpha)
RATIOS = tuple(1 - n / 20 for n in range(1, 11))  # 0.95 down to 0.5
VALID = {"E4M3": tuple(n / 16 for n in range(24, 7, -1)), "E8M0": (2.0, 1.0, 0.5)}  # reach every number in that range
SAMPLE_TOKENS = 1024
ROUTED_TOKENS = 4096  # the same where each expert reads a share of them
LEAST_TOKENS = 8  # of a sampled sequence: fewer would be its first tokens, whose activations are unlike all others


def search(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    store: BlockStore | None = None,
) -> Theta:
    """The searched theta on the prompts and responses, the dense model's own greedy ones by default."""
    return search_on(policy, answered_sequences(policy, prompts, responses), advance, store=store)


@torch.no_grad()
def search_on(
    policy: Policy,
    sequences: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    store: BlockStore | None = None,
) -> Theta:
    """The searched theta on whole sequences."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    if restore_all(store, theta, policy.structure.blocks):
        return theta
    inputs = sample_inputs(policy, sequences)
    for block in policy.gathered_blocks():
        xs = inputs.pop(block.index)
        if not restore(store, theta, block):
            _fit(policy, theta, block, xs)
            keep(store, theta, block)
            advance(1)
    return theta


def _fit(policy: Policy, theta: Theta, block: Block, inputs: dict[str, Tensor]) -> None:
    """Search one block's smoothing and ratios, in place. Experts that read too few tokens keep theirs."""
    inputs = read_by_experts(block, inputs)
    for pair in (pair for pair in block.producers if pair in inputs):
        theta.smoothing[pair_key(block, pair)] = _best_smoothing(policy, theta, block, pair, inputs)
    for pair in block.pairs:
        for name in block.consumers(pair):
            if (x := read_by(block, name, inputs)) is not None:
                theta.linears[block.path(name)] = Free(_best_ratio(policy, theta, block, name, x))


def sample_inputs(policy: Policy, sequences: Sequence[EncodedPrompt]) -> dict[int, dict[str, Tensor]]:
    """Inputs of each pair's consumers under D, at tokens spread evenly over sequences: block -> pair -> [n, I]. With experts,
    instead of theirs the ROUTES of what all of them could read.

    Of so many sequences that each would give too few tokens, some are taken, spread evenly as well.
    """
    blocks = policy.structure.blocks
    tokens = ROUTED_TOKENS if policy.structure.routed else SAMPLE_TOKENS
    count = min(len(sequences), max(1, tokens // LEAST_TOKENS))
    sequences = [sequences[index] for index in torch.linspace(0, len(sequences) - 1, count).round().int().tolist()]
    share = max(1, tokens // count)
    inputs: dict[int, dict[str, list[Tensor]]] = {block.index: {} for block in blocks}
    sampled = torch.zeros(0, dtype=torch.long)

    def observe(block: Block, pair: str, x: Tensor) -> None:
        if not pair.startswith(EXPERTS):
            inputs[block.index].setdefault(pair, []).append(x.flatten(0, -2)[sampled])

    def follow(place: int, index: Tensor) -> None:
        inputs[blocks[place].index].setdefault(ROUTES, []).append(index[sampled])

    routes = observing_routes([block.module for block in blocks], follow)
    with observing(blocks, observe), routes, policy.speaking("D"):
        for sequence in sequences:
            sampled = torch.linspace(0, sequence.length - 1, min(share, sequence.length), device=policy.device).long()
            run_finite(policy, sequence)
    return {block: {pair: torch.cat(parts) for pair, parts in pairs.items()} for block, pairs in inputs.items()}


def _best_smoothing(policy: Policy, theta: Theta, block: Block, pair: str, inputs: dict[str, Tensor]) -> Tensor:
    """log s, of no smoothing and every strength, with the least relative output error summed over the consumers, each by its
    share of the tokens."""
    key, x, scheme = pair_key(block, pair), inputs[pair], policy.scheme_of(block, pair)
    read = {name: own for name in block.consumers(pair) if (own := read_by(block, name, inputs)) is not None}
    outputs = {name: own @ dense_weight(block, name).T for name, own in read.items()}
    x_max = by_query_head(x.abs().amax(0).float(), block, pair).amax(0)
    w_max = weight_maxima(block, pair)
    best, least = theta.smoothing[key], torch.inf
    for strength in (None, *STRENGTHS):
        u = torch.zeros_like(best) if strength is None else migrated(x_max, w_max, strength)
        theta.smoothing[key] = u
        error = 0.0
        for name, out in outputs.items():
            log_in = log_scales_in(theta, block, name)
            x_q, weight = (
                quantized_input(scheme, log_in, read[name]),
                rounded_weight(policy, theta, block, name, log_in),
            )
            relative = (x_q @ weight.T - out).float().square().sum() / out.float().square().sum().clamp(min=FLOOR)
            error += float(relative) * (len(out) / len(x))
        if error < least:
            best, least = u, error
    require_finite_error(least, key)
    return best


def _best_ratio(policy: Policy, theta: Theta, block: Block, name: str, x: Tensor) -> Tensor:
    """The log ratio of least output error for each row; all groups of a row share it."""
    path = block.path(name)
    scheme = policy.scheme.of(path)
    if not scheme.quantizes_weights:
        return theta.linears[path].ratio
    log_in, log_out = log_scales_in(theta, block, name), log_scales_out(theta, block, name)
    x_q = quantized_input(scheme, log_in, x)
    out = x @ dense_weight(block, name).T
    if log_out is not None:
        out = out * log_out.neg().exp()
    full = theta.linears[path].ratio
    best, least = full, torch.full((len(full),), torch.inf, device=full.device)
    if scheme.scales == "dtype":
        candidates = [torch.full_like(full, ratio).log() for ratio in (1.0, *RATIOS)]
    else:
        candidates = [full, _best_groups(policy, theta, block, name, x_q)]
    for log_ratio in candidates:
        theta.linears[path] = Free(log_ratio)
        weight = rounded_weight(policy, theta, block, name, log_in, log_out)
        error = (x_q @ weight.T - out).float().square().sum(0)[:, None]
        error = to_groups(error, full[:, :1], scheme.block_rows).sum((1, 2))
        better = error < least
        best, least = torch.where(better[:, None], log_ratio, best), torch.where(better, error, least)
    require_finite_error(least, path)
    return best


def _best_groups(policy: Policy, theta: Theta, block: Block, name: str, x: Tensor) -> Tensor:
    """The log ratio of every group whose weights have the least squared error, each weighted by its mean squared input."""
    path, log_in, log_out = block.path(name), log_scales_in(theta, block, name), log_scales_out(theta, block, name)
    exact, importance = smoothed(dense_weight(block, name), log_in, log_out), x.float().square().mean(0)
    full = theta.linears[path].ratio
    best, least = full, torch.full_like(full, torch.inf)
    for ratio in VALID[policy.scheme.of(path).scales]:
        log_ratio = torch.full_like(full, ratio).log()
        theta.linears[path] = Free(log_ratio)
        weight = rounded_weight(policy, theta, block, name, log_in, log_out)
        error = to_groups((weight - exact).square() * importance, full).sum(-1)
        better = error < least
        best, least = torch.where(better, log_ratio, best), torch.where(better, error, least)
    theta.linears[path] = Free(full)
    return best
