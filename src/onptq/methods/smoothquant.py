"""SmoothQuant: s_j = amax|x_j|^alpha / amax|W_j|^(1 - alpha), alpha 0.5, before the two norms' linears; then plain rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from onptq.methods.search import FLOOR, REACH
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.policy import Policy
from onptq.quantizer.theta import PAIRS, Theta, pair_key

ALPHA = 0.5
SMOOTHED = ("norm_qkv", "norm_gate_up")  # o_proj and down_proj are left alone, as its authors do


@torch.no_grad()
def smoothquant(
    policy: Policy, prompts: Sequence[EncodedPrompt], advance: Callable[[int], None] = lambda blocks: None
) -> Theta:
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    largest = input_maxima(policy, prompts)
    for block in policy.structure.blocks:
        for pair in SMOOTHED:
            weights = [block.child(name).weight for name in PAIRS[pair][1]]
            w_max = torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0)  # type: ignore[operator, union-attr]
            x_max = largest[pair_key(block, pair)]
            u = ALPHA * x_max.clamp(min=FLOOR).log() - (1 - ALPHA) * w_max.clamp(min=FLOOR).log()
            theta.smoothing[pair_key(block, pair)] = (u - u.mean()).clamp(-REACH, REACH)
        advance(1)
    return theta


def input_maxima(policy: Policy, prompts: Sequence[EncodedPrompt]) -> dict[str, Tensor]:
    """amax over all tokens of all prompts of what enters a pair's consumers under D: pair key -> [I]."""
    largest: dict[str, Tensor] = {}

    def listener(key: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def listen(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found = args[0].abs().flatten(0, -2).amax(0).float()
            largest[key] = torch.maximum(largest[key], found) if key in largest else found

        return listen

    hooks = [
        block.child(PAIRS[pair][1][0]).register_forward_pre_hook(listener(pair_key(block, pair)))
        for block in policy.structure.blocks
        for pair in SMOOTHED
    ]
    try:
        with policy.speaking("D"):
            for prompt in prompts:
                batch = PromptBatch.of([prompt])
                causal = torch.ones(prompt.length, prompt.length, dtype=torch.bool, device=policy.device).tril()
                policy.run(Tokens(batch.embeds, batch.positions, causal[None, None], batch.deepstack))
    finally:
        for hook in hooks:
            hook.remove()
    return largest
