"""Follow (Eq. 1): on-policy trajectories. Every prefix that Q writes is a state it will meet when deployed."""

from __future__ import annotations

from collections.abc import Callable

from onptq.bank import Trajectory
from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import greedy_rollouts


def follow(prefixes: Prefixes, *, advance: Callable[[int], None] = lambda prompts: None) -> list[Trajectory]:
    """Q's greedy response to every prompt, y_t = argmax z_Q(s_t)."""
    return greedy_rollouts(prefixes, "Q", advance)
