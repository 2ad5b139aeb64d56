"""Round to nearest: no data, nothing smoothed, the full range of every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta


def rtn(
    policy: Policy, prompts: Sequence[EncodedPrompt] = (), advance: Callable[[int], None] = lambda blocks: None
) -> Theta:
    return Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
