"""The initial checkpoint: smoothing strength per pair and step ratio per row, both chosen by output error.

Every grid contains plain rounding (no smoothing, full range), so no choice has a larger error on the calibration prompts than
RTN: a fixed strength or a ratio chosen by weight error alone can, and does on some models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.structure import Block
from onptq.policy import Policy
from onptq.quantizer.integer import fake_quantize_activations
from onptq.quantizer.theta import PAIR_INTO, PAIRS, Theta, log_scales_in, log_scales_out, pair_key
from onptq.quantizer.weights import fake_quantize_weight, smoothed
from onptq.schemes import Scheme

STRENGTHS = tuple(step / 10 for step in range(1, 10))  # alpha of s = amax(x)^alpha / amax(W)^(1 - alpha)
RATIOS = tuple(1 - step / 20 for step in range(1, 11))  # 0.95 down to 0.5
SAMPLE_TOKENS = 1024
FLOOR = 1e-5
REACH = 8.0  # largest |log s|


@torch.no_grad()
def search(
    policy: Policy, prompts: Sequence[EncodedPrompt], advance: Callable[[int], None] = lambda blocks: None
) -> Theta:
    """theta^(0) from the dense model's activations on the prompts."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    inputs = sample_inputs(policy, prompts)
    for block in policy.structure.blocks:
        seen = inputs.pop(block.index)
        for pair in PAIRS:
            theta.smoothing[pair_key(block, pair)] = _best_smoothing(policy, theta, block, pair, seen)
        for _, consumers in PAIRS.values():
            for name in consumers:
                theta.ratio[block.path(name)] = _best_ratio(policy, theta, block, name, seen)
        advance(1)
    return theta


def sample_inputs(policy: Policy, prompts: Sequence[EncodedPrompt]) -> dict[int, dict[str, Tensor]]:
    """What enters each pair's consumers under D, for tokens spread evenly over every prompt: block -> pair -> [n, I]."""
    share = max(1, SAMPLE_TOKENS // len(prompts))
    seen: dict[int, dict[str, list[Tensor]]] = {
        block.index: {pair: [] for pair in PAIRS} for block in policy.structure.blocks
    }
    chosen = torch.zeros(0, dtype=torch.long)

    def listener(into: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, args: into.append(args[0][0, chosen])

    hooks = [
        block.child(consumers[0]).register_forward_pre_hook(listener(seen[block.index][pair]))
        for block in policy.structure.blocks
        for pair, (_, consumers) in PAIRS.items()
    ]
    try:
        with policy.speaking("D"):
            for prompt in prompts:
                batch = PromptBatch.of([prompt])
                chosen = torch.linspace(0, prompt.length - 1, min(share, prompt.length), device=policy.device).long()
                causal = torch.ones(prompt.length, prompt.length, dtype=torch.bool, device=policy.device).tril()
                policy.run(Tokens(batch.embeds, batch.positions, causal[None, None], batch.deepstack))
    finally:
        for hook in hooks:
            hook.remove()
    return {block: {pair: torch.cat(parts) for pair, parts in pairs.items()} for block, pairs in seen.items()}


def _best_smoothing(policy: Policy, theta: Theta, block: Block, pair: str, seen: dict[str, Tensor]) -> Tensor:
    """The u, among no smoothing and every strength, with the least relative output error summed over the consumers."""
    key, consumers, x = pair_key(block, pair), PAIRS[pair][1], seen[pair]
    weights = {name: _dense_weight(block, name) for name in consumers}
    outputs = {name: x @ weight.T for name, weight in weights.items()}
    x_max = _per_channel(x.abs().amax(0).float(), block, pair)
    w_max = _per_channel(
        torch.stack([weight.abs().amax(0) for weight in weights.values()]).amax(0).float(), block, pair
    )
    best, least = theta.smoothing[key], torch.inf
    for strength in (None, *STRENGTHS):
        u = torch.zeros_like(best)
        if strength is not None:
            u = strength * x_max.clamp(min=FLOOR).log() - (1 - strength) * w_max.clamp(min=FLOOR).log()
            u = (u - u.mean()).clamp(-REACH, REACH)
        theta.smoothing[key] = u
        entering = _quantized_input(policy.scheme, log_scales_in(theta, block, consumers[0]), x)
        error = 0.0
        for name, out in outputs.items():
            weight = smoothed(weights[name], log_scales_in(theta, block, name), None)
            emitted = entering @ _rounded(policy, theta, block, name, weight).T
            error += float((emitted - out).float().square().sum() / out.float().square().sum().clamp(min=FLOOR))
        if error < least:
            best, least = u, error
    return best


def _per_channel(values: Tensor, block: Block, pair: str) -> Tensor:
    """Under GQA the query heads of a group share one KV channel's scale: take the largest over them."""
    if pair != "v_o":
        return values
    return values.view(block.kv_heads, -1, block.head_dim).amax(1).flatten()


def _best_ratio(policy: Policy, theta: Theta, block: Block, name: str, seen: dict[str, Tensor]) -> Tensor:
    """Per row (and group: all groups of a row share the choice), the ratio of least output error."""
    path, x = block.path(name), seen[PAIR_INTO[name]]
    log_in, log_out = log_scales_in(theta, block, name), log_scales_out(theta, block, name)
    weight = smoothed(_dense_weight(block, name), log_in, log_out)
    entering = _quantized_input(policy.scheme, log_in, x)
    out = x @ _dense_weight(block, name).T
    if log_out is not None:
        out = out * log_out.neg().exp()
    full = theta.ratio[path]
    best, least = full, torch.full((len(full),), torch.inf, device=full.device)
    for ratio in (1.0, *RATIOS):
        theta.ratio[path] = torch.full_like(full, ratio).log()
        emitted = entering @ _rounded(policy, theta, block, name, weight).T
        error = (emitted - out).float().square().sum(0)
        better = error < least
        best, least = torch.where(better[:, None], theta.ratio[path], best), torch.where(better, error, least)
    return best


def _quantized_input(scheme: Scheme, log_in: Tensor, x: Tensor) -> Tensor:
    """What the smoothed and quantized consumers of D's input x [n, I] multiply with."""
    x = (x.float() / log_in.exp()).to(x.dtype)
    return fake_quantize_activations(x, scheme.activation_bits) if scheme.quantizes_activations else x


def _rounded(policy: Policy, theta: Theta, block: Block, name: str, weight: Tensor) -> Tensor:
    ratio = theta.ratio[block.path(name)]
    return fake_quantize_weight(weight, ratio, None, policy.scheme, policy.storage, policy.dtype)


def _dense_weight(block: Block, name: str) -> Tensor:
    weight: Tensor = block.child(name).weight  # type: ignore[assignment]
    return weight
