"""Decision-Consequence risk and the critical set (Eqs. 9-11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onptq.bank import MISMATCH, Column, States
from onptq.errors import OnPTQError
from onptq.recipe import Recipe, RiskConfig, SelectConfig
from onptq.registry import SELECTION_RULES


def score(states: States, cfg: RiskConfig) -> States:
    """Eq. 9: erosion, amplified by how far its two futures separate, plus a full-vocabulary backstop."""
    erosion, divergence = states.erosion.astype(np.float64), _divergence(states, cfg).astype(np.float64)
    amplified = cfg.erosion_weight * erosion * (1 + cfg.branch_weight * states.consequence)
    risk = np.where(states.candidates, amplified + cfg.divergence_weight * divergence, 0.0)
    broken = np.flatnonzero(~np.isfinite(erosion + divergence + risk))  # NaN logits can look like an agreement
    if len(broken):
        row = int(broken[0])
        raise OnPTQError(
            f"the risk of prompt {states.prompt[row]}, token {states.t[row]} is not finite "
            f"(erosion {erosion[row]}, divergence {divergence[row]}): the model's logits overflow or hold NaN"
        )
    return states.with_columns(risk=risk.astype(np.float32))


@dataclass(frozen=True)
class Ranking:
    """A selection rule's answer: the states it may take, and their order."""

    eligible: Column  # bool [S]
    rank: Column  # [S], the largest first
    budgeted: bool = True  # False takes every eligible state, all with the same weight


def select(states: States, cfg: SelectConfig, *, risk: RiskConfig | None = None, seed: int = 0) -> States:
    """Eqs. 10-11 and other rules. Ties go to the earlier prompt, then the earlier token, so that two runs agree."""
    rule: Callable[..., Ranking] = SELECTION_RULES[cfg.rule]
    ranking = rule(states, risk or RiskConfig(), np.random.default_rng(seed))
    order = np.lexsort((states.t, states.prompt, -ranking.rank))
    order = order[ranking.eligible[order]]
    if not ranking.budgeted:
        chosen = order
    elif cfg.per_prompt is not None:
        chosen = order[_place_within_prompt(states.prompt[order]) < cfg.per_prompt]
    else:
        chosen = order[: cfg.budget]
    critical = np.zeros(len(states), np.bool_)
    critical[chosen] = True
    weight = np.zeros(len(states), np.float64)
    weight[chosen] = states.risk[chosen] if ranking.budgeted and cfg.weights == "risk" else 1.0
    total = weight.sum()
    if total == 0 and len(chosen):
        weight[chosen], total = 1.0, float(len(chosen))
    return states.with_columns(critical=critical, weight=(weight / (total or 1.0)).astype(np.float32))


def critical_states(states: States, recipe: Recipe, k: int) -> States:
    """The compared and branched states of round k with their risk, and which of them are critical."""
    return select(score(states, recipe.risk), recipe.select, risk=recipe.risk, seed=recipe.seed + k)


def by_risk(states: States, risk: RiskConfig, rng: np.random.Generator) -> Ranking:
    """Candidates of the largest risk."""
    return Ranking(states.candidates, states.risk)


def every_state(states: States, risk: RiskConfig, rng: np.random.Generator) -> Ranking:
    """Every state, candidate or not."""
    return Ranking(np.ones(len(states), np.bool_), np.zeros(len(states)), budgeted=False)


def mismatches_by_risk(states: States, risk: RiskConfig, rng: np.random.Generator) -> Ranking:
    """Mismatches of the largest risk, no near misses."""
    return Ranking(states.kind == MISMATCH, states.risk)


def by_erosion_and_divergence(states: States, risk: RiskConfig, rng: np.random.Generator) -> Ranking:
    """Candidates of the largest local damage, without the consequence."""
    return Ranking(states.candidates, states.erosion + risk.divergence_weight * _divergence(states, risk))


def by_consequence(states: States, risk: RiskConfig, rng: np.random.Generator) -> Ranking:
    """Candidates of the largest consequence, whatever their erosion."""
    return Ranking(states.candidates, states.consequence)


def at_random(states: States, risk: RiskConfig, rng: np.random.Generator) -> Ranking:
    """Candidates at random."""
    return Ranking(states.candidates, rng.random(len(states)))


def _divergence(states: States, cfg: RiskConfig) -> Column:
    return states.kl if cfg.divergence == "kl" else states.js


def _place_within_prompt(prompts: Column) -> Column:
    """0 for a prompt's first state in the given order, 1 for its second, ..."""
    order = np.argsort(prompts, kind="stable")
    grouped = prompts[order]
    starts = np.r_[0, np.flatnonzero(np.diff(grouped)) + 1] if len(grouped) else np.zeros(0, np.int64)
    place = np.empty(len(prompts), np.int64)
    place[order] = np.arange(len(grouped)) - np.repeat(starts, np.diff(np.r_[starts, len(grouped)]))
    return place
