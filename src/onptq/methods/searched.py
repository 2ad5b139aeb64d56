"""`search`, then a rounding method on its grid: smoothing and clipping choose where the codes lie, the other which to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onptq.bank import Trajectory
from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import greedy_rollouts
from onptq.methods.layerwise import RESPONSE_TOKENS
from onptq.methods.search import search
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta


def searched(rounding: Callable[..., Theta]) -> Callable[..., Theta]:
    """`rounding` takes the searched theta as its `start`, and the same responses."""

    def method(
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        advance: Callable[[int], None] = lambda blocks: None,
        *,
        responses: Sequence[Trajectory] | None = None,
        **options: Any,
    ) -> Theta:
        if responses is None:
            responses = greedy_rollouts(Prefixes(policy, prompts, max_tokens=RESPONSE_TOKENS), side="D")
        grid = search(policy, prompts, responses=responses)
        return rounding(policy, prompts, advance, responses=responses, start=grid, **options)

    return method
