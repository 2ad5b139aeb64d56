"""Metrics: ratios over items and over prompts, named, with which way is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from onptq.bank import MISMATCH, States
from onptq.evaluate.answers import Answer
from onptq.evaluate.critical import Margins
from onptq.evaluate.scores import paired
from onptq.evaluate.statistics import Column, Measure, Part
from onptq.evaluate.tasks import Scored

PROMPTS = "prompts"  # the stratum of held-out prompts; tasks are strata of their own


@dataclass(frozen=True)
class Label:
    """The name and the format of a measure, whether less of it is better, and the measure of its noise floor.

    The noise floor of a rate is the same rate between a model and itself: cached decoding beside one forward over all of it.
    """

    name: str
    less_is_better: bool | None = True  # None: neither
    percent: bool = False
    digits: int = 1
    noise: str = ""
    noise_at_most: bool = False  # whether that is an upper bound


def noise_label(name: str) -> Label:
    return Label(name, less_is_better=None, percent=True, digits=2)


BEHAVIOUR = {
    "kl": Label("KL", digits=4),
    "js": Label("JS", digits=4),
    "mismatch": Label("mismatch", percent=True, noise="noise"),
    "noise": noise_label("noise floor"),
    "noise_responses": noise_label("noise floor of responses"),
    "erosion": Label("erosion", digits=3),
    "first_fork": Label("first fork", less_is_better=False),
    "js_before_fork": Label("JS before the fork", digits=4),
    "js_after_fork": Label("JS after the fork", digits=4),
    "kl_before_fork": Label("KL before the fork", digits=4),
    "kl_after_fork": Label("KL after the fork", digits=4),
    "js_at_fork": Label("JS at the fork", digits=4),
    "forked": Label("prompts with a fork", percent=True, noise="noise_responses"),
}
# How many decisions change is one thing, how much is damaged by that another.
DAMAGE = {
    "near_tie": Label("near ties", percent=True, noise="noise", noise_at_most=True),
    "clear": Label("clear mismatch", percent=True, noise="noise_clear", noise_at_most=True),
    "noise_clear": noise_label("noise floor of clear mismatches"),
    "cwm": Label("CWM", percent=True, digits=2),
    "dense_path_mismatch": Label("dense-path mismatch", percent=True, noise="noise_dense_path"),
    "noise_dense_path": noise_label("noise floor of the dense model"),
    "dense_path_kl": Label("dense-path KL", digits=4),
    "reworded": Label("reworded", percent=True, noise="noise_responses"),
    "length": Label("length", less_is_better=None, percent=True),
    "loops": Label("loops", percent=True, noise="noise_responses", noise_at_most=True),
}
PERCENTILES = {f"kl_p{share}": Label(f"KL p{share}", digits=5) for share in (50, 95, 99)}
# On the joint-critical states that all candidates of a scheme share, not on a candidate's own.
CRITICAL = {
    "critical_flips": Label("margin flips", percent=True),
    "critical_erosion": Label("critical erosion", digits=3),
}
# Numerator and denominator of each, among the sums of `per_prompt`; the mean over prompts where the latter is absent.
_RATIOS: Mapping[str, tuple[str, str | None]] = {
    "kl": ("kl", "states"),
    "js": ("js", "states"),
    "mismatch": ("mismatches", "states"),
    "noise": ("disagreements", "states"),
    "noise_responses": ("disagreeing", None),
    "erosion": ("erosion", "states"),
    "first_fork": ("common", None),
    "forked": ("forked", None),
} | {
    f"{divergence}_{side}": (f"{divergence}_{side}", f"states_{side}")
    for divergence, side in (
        ("js", "before_fork"),
        ("js", "after_fork"),
        ("js", "at_fork"),
        ("kl", "before_fork"),
        ("kl", "after_fork"),
    )
}
CHANGES = {
    "flips": Label("flips", percent=True, noise="noise_graded", noise_at_most=True),
    "changed": Label("answers changed", percent=True, noise="noise_answers", noise_at_most=True),
    "changed_wrong": Label(
        "changed though wrong before and after", percent=True, noise="noise_graded", noise_at_most=True
    ),
}
CONTENT = {
    "content_worse": Label("content worse", percent=True, noise="noise_answers", noise_at_most=True),
    "content_better": Label(
        "content better", less_is_better=None, percent=True, noise="noise_answers", noise_at_most=True
    ),
}
NOISE_OF_ANSWERS = {
    "noise_answers": noise_label("noise floor of answers"),
    "noise_graded": noise_label("noise floor of right and wrong answers"),
}
NOISE_OF = "noise:"  # before the name of a task or of the average
AVERAGE = "average"


def labels(items: Sequence[Scored]) -> dict[str, Label]:
    """Every measure there can be, in the order of the report."""
    scores: dict[str, Label] = {}
    for item in items:
        words = item.measure == "word errors"
        noise = "" if words else f"{NOISE_OF}{item.task}"
        scores[item.task] = Label(f"{item.task} WER" if words else item.task, words, True, 1, noise, bool(noise))
    if any(not label.less_is_better for label in scores.values()):
        scores[AVERAGE] = Label("average score", False, True, 1, f"{NOISE_OF}{AVERAGE}", True)
    noises = {label.noise: noise_label(f"noise floor of {label.name}") for label in scores.values() if label.noise}
    return scores | CHANGES | CONTENT | NOISE_OF_ANSWERS | noises | BEHAVIOUR | DAMAGE | PERCENTILES | CRITICAL


def score_measures(items: Sequence[Scored], answers: Sequence[Answer]) -> dict[str, Measure]:
    """One per task, and their unweighted mean where more is better."""
    measures, averaged = {}, []
    for task, (of_task, given) in by_task(items, answers).items():
        part = Part(task, np.array([one.points for one in given]), np.array([one.total for one in given]))
        measures[task] = Measure((part,), 100)
        if of_task[0].measure != "word errors":
            averaged.append(part)
    return measures | ({AVERAGE: Measure(tuple(averaged), 100, "mean")} if averaged else {})


def change_measures(items: Sequence[Scored], dense: Sequence[Answer], other: Sequence[Answer]) -> dict[str, Measure]:
    """Flips of correctness, texts that changed, and those of them that are wrong before and after; over all tasks."""
    before, after = by_task(items, dense), by_task(items, other)
    parts: dict[str, list[Part]] = {name: [] for name in CHANGES}
    for task, (of_task, was) in before.items():
        now = after[task][1]
        ones = np.ones(len(of_task))
        changed = np.array([old.text != new.text for old, new in zip(was, now, strict=True)])
        parts["changed"].append(Part(task, changed.astype(np.float64), ones))
        if of_task[0].measure == "accuracy":
            right_before, right_after = right(was), right(now)
            wrong_twice = changed & ~right_before & ~right_after
            parts["flips"].append(Part(task, (right_before != right_after).astype(np.float64), ones))
            parts["changed_wrong"].append(Part(task, wrong_twice.astype(np.float64), ones))
    return {name: Measure(tuple(each), 100) for name, each in parts.items() if each}


def noise_of_answers(items: Sequence[Scored], answers: Sequence[Answer]) -> dict[str, Measure]:
    """The share of answers that another way to compute would word differently: of all, of those that are right or wrong, of
    each task where more is better, and their mean; nothing where that was not measured."""
    if not all(one.disagrees is not None for one in answers):
        return {}
    measures = {task: of_task[0].measure for task, (of_task, _) in by_task(items, answers).items()}
    parts = {
        task: Part(task, np.array([bool(one.disagrees) for one in given], np.float64), np.ones(len(given)))
        for task, (_, given) in by_task(items, answers).items()
    }
    graded = tuple(parts[task] for task, measure in measures.items() if measure == "accuracy")
    averaged = {task: parts[task] for task, measure in measures.items() if measure != "word errors"}
    found = {"noise_answers": Measure(tuple(parts.values()), 100)}
    found |= {"noise_graded": Measure(graded, 100)} if graded else {}
    found |= {f"{NOISE_OF}{task}": Measure((part,), 100) for task, part in averaged.items()}
    return found | ({f"{NOISE_OF}{AVERAGE}": Measure(tuple(averaged.values()), 100, "mean")} if averaged else {})


def behaviour_measures(states: States, prompts: Sequence[int]) -> dict[str, Measure]:
    sums = per_prompt(states, prompts)
    ones = np.ones(len(prompts))
    return {
        name: Measure(
            (Part(PROMPTS, sums[top], ones if bottom is None else sums[bottom]),), 100 if BEHAVIOUR[name].percent else 1
        )
        for name, (top, bottom) in _RATIOS.items()
    }


def critical_measures(margins: Margins, prompts: Sequence[int]) -> dict[str, Measure]:
    """The share of joint-critical states that have lost their margin, and the mean loss."""
    quant, dense = margins.quant[margins.critical], margins.dense[margins.critical]
    total = partial(sums, places(margins.prompt[margins.critical], prompts), len(prompts))
    count = total(np.ones(len(quant)))
    return {
        "critical_flips": Measure((Part(PROMPTS, total(quant < 0), count),), 100),
        "critical_erosion": Measure((Part(PROMPTS, total(np.maximum(dense - quant, 0)), count),)),
    }


def right(answers: Sequence[Answer]) -> Column:
    return np.array([one.points == one.total for one in answers], np.bool_)


def judged(items: Sequence[Scored], answers: Sequence[Answer]) -> Column:
    """Whether each item that is either right or wrong was answered right, in the order of the items."""
    return right([one for item, one in paired(items, answers) if item.measure == "accuracy"])


def by_task(items: Sequence[Scored], answers: Sequence[Answer]) -> dict[str, tuple[list[Scored], list[Answer]]]:
    tasks: dict[str, tuple[list[Scored], list[Answer]]] = {}
    for item, given in paired(items, answers):
        of_task, answered = tasks.setdefault(item.task, ([], []))
        of_task.append(item)
        answered.append(given)
    return tasks


def per_prompt(states: States, prompts: Sequence[int]) -> dict[str, Column]:
    """Sums over each prompt's states, in the order of `prompts`: what a cluster bootstrap by prompt resamples.

    The first fork is the first state whose decision differs; up to it both models, answering alone, say the same.
    States before it, the fork itself and states after it are summed apart.
    """
    place, count = places(states.prompt, prompts), len(prompts)
    total = partial(sums, place, count)
    mismatch, disagreement = states.kind == MISMATCH, states.token != states.quantized
    fork = np.full(count, np.inf)
    np.minimum.at(fork, place[mismatch], states.t[mismatch])
    lengths = total(np.ones(len(states)))
    sides = {
        "before_fork": states.t < fork[place],
        "at_fork": states.t == fork[place],
        "after_fork": states.t > fork[place],
    }
    totals = {
        "states": lengths,
        "mismatches": total(mismatch),
        "disagreements": total(disagreement),
        "disagreeing": (total(disagreement) > 0).astype(np.float64),
        "erosion": total(states.erosion),
        "js": total(states.js),
        "kl": total(states.kl),
        "common": np.where(np.isfinite(fork), fork - 1, lengths),
        "forked": np.isfinite(fork).astype(np.float64),
    }
    for side, chosen in sides.items():
        totals |= {
            f"states_{side}": total(chosen),
            f"js_{side}": total(states.js * chosen),
            f"kl_{side}": total(states.kl * chosen),
        }
    return totals


def places(of_states: Column, prompts: Sequence[int]) -> Column:
    """The place in `prompts` of each state's prompt."""
    order = {prompt: place for place, prompt in enumerate(prompts)}
    return np.array([order[prompt] for prompt in of_states.tolist()], np.int64)


def sums(place: Column, count: int, values: Column) -> Column:
    """Sums of the values of states over each of `count` prompts."""
    return np.bincount(place, values.astype(np.float64), minlength=count)
