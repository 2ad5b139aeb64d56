"""`search`, then GPTQ's rounding on its grid: smoothing and clipping choose where the codes lie, compensation which to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onptq.bank import Trajectory
from onptq.cycle.follow import follow
from onptq.cycle.prefixes import Prefixes
from onptq.methods.gptq import gptq
from onptq.methods.layerwise import RESPONSE_TOKENS
from onptq.methods.search import search
from onptq.models.encoding import EncodedPrompt
from onptq.policy import Policy
from onptq.quantizer.theta import Theta


def search_gptq(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
) -> Theta:
    if responses is None:
        responses = follow(Prefixes(policy, prompts, max_tokens=RESPONSE_TOKENS), side="D")
    found = search(policy, prompts, responses=responses)
    return gptq(policy, prompts, advance, responses=responses, start=found)
