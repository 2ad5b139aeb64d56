"""Follow (Eq. 1): on-policy trajectories. Every prefix that Q writes is a state it will meet when deployed."""

from __future__ import annotations

from collections.abc import Callable

from onptq.bank import Trajectory
from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import rollouts
from onptq.engine.sampling import Sampling
from onptq.models.language_model import Side


def follow(
    prefixes: Prefixes,
    side: Side = "Q",
    *,
    sampling: Sampling | None = None,
    advance: Callable[[int], None] = lambda prompts: None,
) -> list[Trajectory]:
    """Q's greedy response to every prompt, y_t = argmax z_Q(s_t), or a sampled one; or D's, for the off-policy control."""
    return rollouts(prefixes, side, advance, sampling)
