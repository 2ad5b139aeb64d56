"""RTN: rounding to nearest, without data, without smoothing, over the full range of every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta


def rtn(
    policy: Policy, prompts: Sequence[EncodedPrompt] = (), advance: Callable[[int], None] = lambda blocks: None
) -> Theta:
    """The theta of plain rounding; prompts are not used."""
    return Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
