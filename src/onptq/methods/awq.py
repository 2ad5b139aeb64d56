"""AWQ: scales from mean |x| with a searched exponent, then a searched clip of every weight group.

As its authors' code: 20 exponents per pair, judged by the output of the attention, the MLP or the linear itself with everything
else dense, on the dense model's inputs; 10 clips per row and group, judged by partial products, for all linears but q and k,
whose product clipping disturbs. Beyond it: v -> o is scaled under GQA too, with one scale per KV channel, and in schemes that
quantize activations a candidate is judged with its activations quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onptq.methods.activations import Stream
from onptq.methods.linears import by_query_head, dense_weight, entering, rounded_weight
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import Block
from onptq.policy import Policy
from onptq.quantizer.theta import PAIR_INTO, PAIRS, Theta, log_scales_in, log_scales_out, pair_key
from onptq.quantizer.weights import fake_quantize_weight, smoothed

EXPONENTS = tuple(step / 20 for step in range(20))  # s = mean|x|^exponent; the first leaves everything as it is
CLIPS = tuple(1 - step / 20 for step in range(10))  # 1 down to 0.55 of the range
CLIPPED = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CLIP_TOKENS = 512
FLOOR = 1e-4
ROWS = 256  # rows clipped at a time: their partial products are [rows, groups, tokens]


@torch.no_grad()
def awq(
    policy: Policy, prompts: Sequence[EncodedPrompt], advance: Callable[[int], None] = lambda blocks: None
) -> Theta:
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    stream = Stream(policy, prompts)
    with policy.speaking("D"):
        for block in policy.structure.blocks:
            judges = _judges(block)
            for judge in judges.values():
                judge.listen()
            try:
                stream.advance(block)
            finally:
                for judge in judges.values():
                    judge.stop()
            for pair, judge in judges.items():
                theta.smoothing[pair_key(block, pair)] = _best_scales(policy, theta, block, pair, judge)
            for name in CLIPPED:
                theta.ratio[block.path(name)] = _best_clips(policy, theta, block, name, judges[PAIR_INTO[name]])
            advance(1)
    return theta
