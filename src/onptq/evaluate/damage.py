"""Metrics of damage: which of the changed decisions matter, and what becomes of whole responses and answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from onptq.bank import MISMATCH, States, Trajectory
from onptq.evaluate.answers import Answer
from onptq.evaluate.metrics import CONTENT, PROMPTS, by_task, places, sums
from onptq.evaluate.percentiles import Percentile
from onptq.evaluate.statistics import Column, Measure, Part, Single
from onptq.evaluate.tasks import Scored

NEAR_TIE = 0.25  # logits: below this margin of its own the dense model all but tosses a coin between the two tokens
LONGEST_CYCLE = 16  # tokens
FEWEST_REPETITIONS = 3
LOOP_TOKENS = 24  # that a cycle covers at least, so that a word said three times is no loop
SHARES = {"kl_p50": 0.5, "kl_p95": 0.95, "kl_p99": 0.99}


def damage_measures(
    prompts: Sequence[int],
    *,
    states: States | None = None,
    mismatches: States | None = None,
    dense_path: States | None = None,
    responses: Sequence[Trajectory] | None = None,
    dense_responses: Sequence[Trajectory] | None = None,
) -> dict[str, Single]:
    """The measures that the given results allow: the dense model has no states, and old folders have fewer files."""
    measures: dict[str, Single] = {}
    if states is not None:
        measures |= {**tie_measures(states, prompts), **percentile_measures(states, prompts)}
    if states is not None and mismatches is not None:
        measures |= consequence_measures(states, mismatches, prompts)
    if dense_path is not None:
        measures |= dense_path_measures(dense_path, prompts)
    if responses is not None:
        measures |= loop_measures(responses, prompts)
    if responses is not None and dense_responses is not None:
        measures |= response_measures(dense_responses, responses, prompts)
    return measures


def tie_measures(states: States, prompts: Sequence[int]) -> dict[str, Measure]:
    """Mismatches at near ties of the dense model, and all others, which add up to the mismatch; and how often Q disagrees with
    itself where its margin is not known to be that of a near tie."""
    mismatch, near = states.kind == MISMATCH, states.margin_dense < NEAR_TIE
    disagrees = states.token != states.quantized
    tossed = (states.token == states.reference) | (states.token == states.competitor)
    tossed &= np.abs(states.margin_quant) < NEAR_TIE
    return {
        "near_tie": _mean(states, mismatch & near, prompts, 100),
        "clear": _mean(states, mismatch & ~near, prompts, 100),
        "noise_clear": _mean(states, disagrees & ~tossed, prompts, 100),
    }


def consequence_measures(states: States, branched: States, prompts: Sequence[int]) -> dict[str, Measure]:
    """Consequence-weighted mismatch: A_t of the mismatches, which are `branched`, over all `states`."""
    weighted = sums(places(branched.prompt, prompts), len(prompts), branched.consequence)
    count = sums(places(states.prompt, prompts), len(prompts), np.ones(len(states)))
    return {"cwm": Measure((Part(PROMPTS, weighted, count),), 100)}


def dense_path_measures(states: States, prompts: Sequence[int]) -> dict[str, Measure]:
    """Mismatch and KL on the dense model's responses, the same states for every candidate; how often D disagrees with itself."""
    return {
        "noise_dense_path": _mean(states, states.token != states.reference, prompts, 100),
        "dense_path_mismatch": _mean(states, states.kind == MISMATCH, prompts, 100),
        "dense_path_kl": _mean(states, states.kl, prompts),
    }


def percentile_measures(states: States, prompts: Sequence[int]) -> dict[str, Percentile]:
    """Percentiles of the KL over all states."""
    place = places(states.prompt, prompts)
    return {name: Percentile(PROMPTS, states.kl, place, len(prompts), share) for name, share in SHARES.items()}


def response_measures(
    dense: Sequence[Trajectory], other: Sequence[Trajectory], prompts: Sequence[int]
) -> dict[str, Measure]:
    """Responses in other tokens than the dense model's, and the mean length of a response over that of the dense model's."""
    was, now = ({one.prompt: one.tokens for one in each} for each in (dense, other))
    changed = np.array([was[prompt] != now[prompt] for prompt in prompts], np.float64)
    lengths = [np.array([len(tokens[prompt]) for prompt in prompts], np.float64) for tokens in (now, was)]
    return {
        "reworded": Measure((Part(PROMPTS, changed, np.ones(len(prompts))),), 100),
        "length": Measure((Part(PROMPTS, *lengths),), 100),
    }


def loop_measures(responses: Sequence[Trajectory], prompts: Sequence[int]) -> dict[str, Measure]:
    """Responses that are cut off in a loop."""
    looping = {one.prompt for one in responses if not one.finished and ends_in_loop(one.tokens)}
    loops = np.array([prompt in looping for prompt in prompts], np.float64)
    return {"loops": Measure((Part(PROMPTS, loops, np.ones(len(prompts))),), 100)}


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the last tokens repeat a cycle of 1 to 16 tokens, at least three times and over at least 24 tokens.

    The response may be cut off anywhere in the cycle.
    """
    for cycle in range(1, LONGEST_CYCLE + 1):
        length = max(LOOP_TOKENS, FEWEST_REPETITIONS * cycle)
        tail = tokens[-length:]
        if len(tail) == length and tail[cycle:] == tail[:-cycle]:
            return True
    return False


def content_measures(items: Sequence[Scored], dense: Sequence[Answer], other: Sequence[Answer]) -> dict[str, Measure]:
    """Answers that score lower or higher than the dense model's, over all tasks: more or fewer points of those possible."""
    before, after = by_task(items, dense), by_task(items, other)
    parts: dict[str, list[Part]] = {name: [] for name in CONTENT}
    for task, (of_task, was) in before.items():
        gains = np.array([_gain(old, new) for old, new in zip(was, after[task][1], strict=True)])
        if of_task[0].measure == "word errors":
            gains = -gains
        for name, changed in (("content_worse", gains < 0), ("content_better", gains > 0)):
            parts[name].append(Part(task, changed.astype(np.float64), np.ones(len(of_task))))
    return {name: Measure(tuple(each), 100) for name, each in parts.items()}


def _gain(before: Answer, after: Answer) -> float:
    """The sign of the difference between both answers' points over their totals."""
    return after.points * before.total - before.points * after.total


def _mean(states: States, values: Column, prompts: Sequence[int], scale: float = 1.0) -> Measure:
    """Over all states, with the prompts as clusters."""
    total = partial(sums, places(states.prompt, prompts), len(prompts))
    return Measure((Part(PROMPTS, total(values), total(np.ones(len(states)))),), scale)
