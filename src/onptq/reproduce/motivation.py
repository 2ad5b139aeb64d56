"""Figure 1: amplification behind a fork, on-policy coverage, the anchor, and what local divergence says of consequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from onptq.bank import Column, States
from onptq.evaluate.candidates import DENSE, MethodCandidate, folder_name
from onptq.evaluate.metrics import PROMPTS, places, sums
from onptq.evaluate.session import Session
from onptq.evaluate.statistics import Interval, Measure, Part, Resampler, Seeded, Single, differing
from onptq.reproduce.banks import Bank, speaker, visit
from onptq.reproduce.common import differing_setup
from onptq.reproduce.compared import Compared
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.paper_rows import paper, paper_interval
from onptq.reproduce.probes import COLUMNS, closed_loop
from onptq.reproduce.record import (
    Claim,
    Picture,
    Result,
    Table,
    above,
    all_of,
    as_mark,
    below,
    guarded,
    scaled,
    shown,
    within,
)
from onptq.reproduce.resampling import mean, overlap, pearson, resampled, spearman

NAME, TITLE, SCHEME = "motivation", "Motivating diagnostics (Figure 1)", "W4A8"
TOP = 0.2
WEAK = 0.5  # a correlation below this
BARELY = 10.0  # percent of a divergence
COMPARABLE = 2.0  # points of accuracy
UNANCHORED = "on-policy without anchor"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "static": {"method": "uniform", "follow.policy": "dense"},
    "on-policy": {"method": "uniform"},
    UNANCHORED: {"method": "uniform", "calibrate.anchor": 0.0},
}
Loop = Mapping[str, Column]


@dataclass(frozen=True)
class Amplification:
    """JS at the same states, JS of the two models each on its own response behind the fork, and their ratio."""

    same: Interval
    behind: Interval
    ratio: Interval


@dataclass(frozen=True)
class Correlation:
    """Local JS and branch consequence over candidate states."""

    states: int
    pearson: Interval
    spearman: Interval
    overlap: Interval


def amplification(states: States, loop: Loop, seed: int = 0) -> Amplification:
    """Figure 1 (a). `states` are those of Q's responses, `loop` has both models on responses of their own."""
    values = np.concatenate((states.js.astype(np.float64), loop["js"]))
    prompt = np.concatenate((states.prompt, loop["prompt"]))
    same = np.arange(len(values)) < len(states)
    behind = ~same & np.concatenate((np.zeros(len(states), np.bool_), loop["behind"]))
    of_same, of_behind = mean(values, same), mean(values, behind)
    intervals = resampled((of_same, of_behind, lambda rows: of_behind(rows) / (of_same(rows) or np.nan)), prompt, seed)
    return Amplification(*intervals)


def correlation(bank: Bank, seed: int = 0) -> Correlation:
    """Local JS against the branch consequence of the candidates that have valid branches."""
    usable = bank.usable
    states = usable.states.take(np.flatnonzero(usable.states.candidates))
    js, consequence = states.js, states.consequence
    statistics = (pearson(js, consequence), spearman(js, consequence), overlap(js, consequence, TOP))
    return Correlation(len(states), *resampled(statistics, states.prompt, seed))


def loop_measure(loop: Loop, prompts: Sequence[int], only_behind: bool = False) -> Measure:
    """Closed-loop JS over all tokens that both responses have, or over those behind the fork."""
    rows = loop["behind"] if only_behind else np.ones(len(loop["js"]), np.bool_)
    total = partial(sums, places(loop["prompt"][rows], prompts), len(prompts))
    return Measure((Part(PROMPTS, total(loop["js"][rows]), total(np.ones(int(rows.sum())))),))


def over_seeds(loops: Sequence[Loop], prompts: Sequence[int], only_behind: bool = False) -> Single | Seeded:
    """Closed-loop JS of a candidate: of its one seed, or the mean over its seeds."""
    measures = tuple(loop_measure(loop, prompts, only_behind) for loop in loops)
    return measures[0] if len(measures) == 1 else Seeded(measures)


def variants(experiment: Experiment, init: str, scheme: str) -> dict[str, MethodCandidate]:
    """The init, and uniform calibration from it on static and on quantized-policy states, with and without the anchor."""
    few = {"data.prompts": _bank_size(experiment)}
    candidates = {
        "init": MethodCandidate(f"{init}:{scheme}", experiment.recipe(scheme, {**few, "method": init, "init": init}))
    }
    for name, changes in VARIANTS.items():
        candidates[name] = experiment.cycle(
            f"{name} from {init}", scheme, {**few, **changes, "init": init, "rounds": 1}
        )
    return candidates


def _bank_size(experiment: Experiment) -> int:
    return max(1, experiment.settings.scale.prompts // 2)


def run(experiment: Experiment) -> Result:
    scheme, there = experiment.settings.scheme or SCHEME, paper(NAME)
    made = {init: variants(experiment, init, scheme) for init in there["inits"]}
    candidates = [one for of in made.values() for one in of.values()]
    examples = experiment.examples()
    compared = experiment.compare(f"motivation-{scheme}", candidates, scheme, prompts=examples)
    loops: dict[str, dict[str, list[Loop]]] = {}
    with experiment.session(f"motivation-loops-{scheme}", scheme, examples) as session:
        for init, of in made.items():
            loops[init] = {
                name: [_loop(session, compared, seed, scheme) for seed in compared.seeds(one.name)]
                for name, one in of.items()
            }
    first = there["inits"][0]
    with experiment.session(
        f"motivation-bank-{scheme}", scheme, experiment.calibration(_bank_size(experiment))
    ) as session:
        name, recipe = made[first]["init"].name, experiment.recipe(scheme)
        bank = visit(session, name, speaker(session, compared.theta(name), scheme), recipe)
    names = {init: {name: one.name for name, one in of.items()} for init, of in made.items()}
    return result(compared, names, loops, correlation(bank, experiment.settings.seed), experiment)


def _loop(session: Session, compared: Compared, name: str, scheme: str) -> Loop:
    def measure() -> Loop:
        speaker(session, compared.theta(name), scheme)()
        dense, quantized = compared.trajectories(DENSE), compared.trajectories(name)
        with session.reporter.phase(f"Closed loop {name}", total=len(session.prompts), unit="prompts") as bar:
            return closed_loop(session.prefixes(), dense, quantized, bar.advance)

    return session.run.step(f"loops/{folder_name(name)}.parquet", COLUMNS, measure)


def result(
    compared: Compared,
    names: Mapping[str, Mapping[str, str]],
    loops: Mapping[str, Mapping[str, Sequence[Loop]]],
    local: Correlation,
    experiment: Experiment,
) -> Result:
    there, seed = paper(NAME), experiment.settings.seed
    first = there["inits"][0]
    resampler, prompts = Resampler(seed), list(range(compared.report.prompts))
    grown = {
        init: amplification(compared.states(of["init"]), loops[init]["init"][0], seed) for init, of in names.items()
    }
    covered = {
        init: _relative(compared.difference(of["static"], of["on-policy"], "js"), compared.figure(of["static"], "js"))
        for init, of in names.items()
    }
    of = names[first]
    delay = compared.difference(of["static"], of[UNANCHORED], "first_fork")
    harm = compared.gain(of["static"], of[UNANCHORED])
    accuracy = compared.gain(of["static"], of["on-policy"])
    measures = {name: over_seeds(of_seeds, prompts) for name, of_seeds in loops[first].items()}
    anchored = measures["static"], measures["on-policy"]
    closed = guarded(resampler.difference(*anchored), differing(*anchored))
    behind = [over_seeds(loops[first][name], prompts, only_behind=True) for name in ("static", UNANCHORED)]
    moved = guarded(resampler.difference(*behind), differing(*behind))
    moved = _relative(moved, resampler.estimate(behind[0]))
    label = compared.report.labels[compared.measure].name
    closed_there, accuracy_there = (
        paper_interval(there[name]) for name in ("closed_loop_with_anchor", "accuracy_with_anchor")
    )
    numbers = there["correlation"]
    claims = [
        Claim(
            "(a) Divergence behind a fork is larger than at the same state",
            ", ".join(f"{ratio} times with {init}" for init, ratio in there["amplification"].items()),
            ", ".join(f"{shown(one.ratio)} times with {init}" for init, one in grown.items()),
            all_of([above(one.ratio, 1.0) for one in grown.values()]),
        ),
        Claim(
            "(b) Calibration on quantized-policy states lowers on-policy divergence more than on static states",
            ", ".join(f"{change}% with {init}" for init, change in there["coverage"].items()),
            ", ".join(f"{shown(one, 1, True)}% with {init}" for init, one in covered.items()),
            all_of([below(one) for one in covered.values()]),
        ),
        Claim(
            "(c) Uniform on-policy calibration without an anchor delays the first fork",
            f"by {there['fork_delay']} tokens",
            f"by {shown(delay, 2, True)} tokens",
            above(delay),
        ),
        Claim(
            f"(c) ... but changes divergence behind the fork by less than {BARELY:g}%",
            "it barely changes",
            f"by {shown(moved, 1, True)}%",
            within(moved, BARELY),
        ),
        Claim(
            "(c) ... and lowers accuracy",
            f"by {-there['accuracy_without_anchor']} points",
            f"{shown(harm, 2, True)} ({label}, more is better)",
            below(harm),
        ),
        Claim(
            "(c) With the anchor, closed-loop JS falls against static calibration",
            shown(closed_there, 4, True),
            shown(closed, 4, True),
            below(closed),
        ),
        Claim(
            f"(c) ... and accuracy stays within {COMPARABLE:g} points of it",
            shown(accuracy_there, 1, True),
            f"{shown(accuracy, 2, True)} ({label})",
            within(accuracy, COMPARABLE),
        ),
        Claim(
            f"Local JS says little of the branch consequence: correlations below {WEAK}",
            f"Pearson {numbers['pearson']}, Spearman {numbers['spearman']:.3f}, top-20% overlap {numbers['overlap']}%",
            f"Pearson {shown(local.pearson, 3)}, Spearman {shown(local.spearman, 3)}, overlap "
            f"{shown(scaled(local.overlap, 100), 1)}%",
            all_of([below(local.pearson, WEAK), below(local.spearman, WEAK)]),
        ),
    ]
    rows = []
    for init, each in names.items():
        for name, candidate in each.items():
            of_seeds = loops[init][name]
            rows.append(
                [
                    init,
                    name,
                    shown(compared.figure(candidate, "js"), 4),
                    shown(resampler.estimate(over_seeds(of_seeds, prompts)), 4),
                    shown(resampler.estimate(over_seeds(of_seeds, prompts, only_behind=True)), 4),
                    shown(compared.figure(candidate, "first_fork"), 2),
                    shown(compared.figure(candidate, compared.measure), 2),
                ]
            )
    heads = ("init", "calibrated on", "same-state JS", "closed-loop JS", "behind the fork", "first fork", label)
    settings = experiment.settings.describe() | {
        "calibration prompts": _bank_size(experiment),
        "held-out prompts": len(prompts),
        "init": list(names),
    }
    differs = [
        *differing_setup(settings, "Qwen2.5-VL-7B-Instruct", "a bank of 64 examples and 120 others of ScienceQA-IMG"),
        "The same prompts calibrate the inits, their updates and the bank; the others judge. "
        f"{local.states} candidate states with valid branches are in the correlation.",
        "Behind a fork JS is that of D on its own response to Q on its own, the mean over the tokens that both have; "
        "the paper does not say how it accumulates.",
        "Static states are those of D's own responses to the same prompts, a fixed text; the paper's are of its captions. "
        "Both kinds have equal weights and the same objective.",
        "MASQuant is its merged form, which folds. (c) starts from QIG; the paper does not say where.",
        f"Thresholds are ours: {WEAK} of a correlation, {COMPARABLE:g} points, {BARELY:g}%.",
        "Percentages are of the mean of static calibration.",
    ]
    marks = [
        mark
        for init, each in names.items()
        for name, candidate in each.items()
        for group, one in (
            ("same state", compared.figure(candidate, "js")),
            ("behind the fork", resampler.estimate(over_seeds(loops[init][name], prompts, only_behind=True))),
        )
        for mark in as_mark(f"{init}: {name}", group, one)
    ]
    title = "95% intervals over prompts; closed loop: each model on its own response"
    return Result(NAME, TITLE, claims, [Table(title, heads, rows)], differs, Picture(TITLE, "JS", marks), settings)


def _relative(change: Interval, base: Interval) -> Interval:
    """The change in percent of the base."""
    return scaled(change, 100 / base.value) if base.value else Interval(None)
