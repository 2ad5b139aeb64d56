"""Theorem 1 and the pair identity on real states, and how well OnPTQ's quantities track their two factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onptq.bank import Column
from onptq.evaluate.statistics import Interval
from onptq.reproduce.banks import Bank, bank_of_init
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.probes import ACTIONS, COLUMNS, Actions, action_values, likely_actions
from onptq.reproduce.record import Cell, Claim, Picture, Result, Table, Verdict, above, as_mark, shown
from onptq.reproduce.resampling import mean, resampled, spearman
from onptq.reproduce.settings import FAR

NAME, TITLE, SCHEME = "theory", "Theorem 1 and the pair identity on real states (Section 4.4, Appendix B)", "W4A8"
EXACT = 1e-9  # what rounding in float64 may leave of an identity


@dataclass(frozen=True)
class Theory:
    """What holds at how many states."""

    states: int
    violations: int  # of Theorem 1
    largest: float  # |J_Q - J_D| over the bound, at its largest
    tightness: Interval  # the same ratio, its mean over the states where the bound is above zero
    identity: float  # the largest error of the pair identity
    log_odds: float  # the largest difference of a margin and the pair's log odds
    covered: Interval  # the probability that the actions hold, mean of both models
    tracked: Mapping[str, Interval]  # Spearman correlations, by "quantity, factor"


def theory(bank: Bank, actions: Actions, seed: int = 0) -> Theory:
    """Everything over all states, the policies restricted to the given actions and normalized."""
    states = bank.states
    dense, quant = (each / each.sum(1, keepdims=True) for each in (actions.dense, actions.quant))
    deviation = np.abs(((quant - dense) * actions.value).sum(1))
    span = actions.value.max(1) - actions.value.min(1)
    bound = 0.5 * np.abs(quant - dense).sum(1) * span
    pair = [each[:, :2] / each[:, :2].sum(1, keepdims=True) for each in (actions.dense, actions.quant)]
    value = actions.value[:, :2]
    left = np.abs(((pair[1] - pair[0]) * value).sum(1))
    right = np.abs(pair[1][:, 0] - pair[0][:, 0]) * np.abs(value[:, 0] - value[:, 1])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(bound > EXACT, deviation / bound, np.nan)
        odds = np.log(pair[0][:, 0]) - np.log(pair[0][:, 1])
    known = np.isfinite(ratio)
    apart = np.abs(value[:, 0] - value[:, 1])
    statistics = {
        "tightness": mean(np.nan_to_num(ratio), known),
        "covered": mean(0.5 * (actions.dense.sum(1) + actions.quant.sum(1))),
        "Erosion, TV": spearman(states.erosion, actions.tv),
        "Erosion, TV, of candidates alone": spearman(states.erosion, actions.tv, states.candidates),
        "JS, TV": spearman(states.js, actions.tv),
        "Consequence, span": spearman(states.consequence, span),
        "Consequence, value difference of the pair": spearman(states.consequence, apart),
    }
    intervals = dict(zip(statistics, resampled(list(statistics.values()), states.prompt, seed), strict=True))
    return Theory(
        len(states),
        int((deviation > bound + EXACT).sum()),
        float(np.nanmax(ratio)) if known.any() else 0.0,
        intervals.pop("tightness"),
        float(np.abs(left - right).max()),
        float(np.nanmax(np.abs(odds - states.margin_dense)[np.isfinite(odds)], initial=0.0)),
        intervals.pop("covered"),
        intervals,
    )


def run(experiment: Experiment) -> Result:
    scheme = experiment.settings.scheme or SCHEME
    with bank_of_init(experiment, scheme) as init:
        session, bank = init.session, init.bank

        def values() -> dict[str, Column]:
            init.speak()
            prefixes, states = session.prefixes(), bank.states
            actions = likely_actions(prefixes, bank.trajectories, states)
            tokens = actions["tokens"].reshape(-1, ACTIONS)
            total = (1 + ACTIONS // 2) * len(states)
            with session.reporter.phase("Values of actions", total=total, unit="states") as bar:
                value = action_values(
                    prefixes, bank.trajectories, states, tokens, FAR, session.policy().eos, bar.advance
                )
            return actions | {"value": value.ravel()}

        columns = session.run.step("actions.parquet", COLUMNS, values)
    shaped = {name: columns[name].reshape(-1, ACTIONS) for name in ("dense", "quant", "value")}
    actions = Actions(**shaped, tv=columns["tv"][::ACTIONS])
    return result(theory(bank, actions, experiment.settings.seed), experiment.settings.describe())


def result(measured: Theory, settings: Mapping[str, Any]) -> Result:
    tracked = measured.tracked
    holds: Verdict = "holds" if not measured.violations else "does not hold"
    exact: Verdict = "holds" if measured.identity < EXACT else "does not hold"
    claims = [
        Claim(
            "Theorem 1: the deviation is at most TV times span, at any state",
            "proved",
            f"{measured.violations} violations at {measured.states} states; deviation over bound is {shown(measured.tightness)} "
            f"on average, {measured.largest:.2f} at most",
            holds,
        ),
        Claim(
            "On two actions the deviation is exactly shifted mass times value difference",
            "proved",
            f"largest error {measured.identity:.1g}",
            exact,
        ),
        *(
            Claim(
                f"{name} tracks the decision factor, TV",
                "named as a proxy, not measured",
                f"Spearman {shown(tracked[f'{name}, TV'])}{more}",
                above(tracked[f"{name}, TV"]),
            )
            for name, more in (
                ("Erosion", f"; of candidates alone {shown(tracked['Erosion, TV, of candidates alone'])}"),
                ("JS", ""),
            )
        ),
        Claim(
            "Consequence tracks the span of future values",
            "named as a proxy, not measured",
            f"Spearman {shown(tracked['Consequence, span'])}",
            above(tracked["Consequence, span"]),
        ),
    ]
    rows: list[list[Cell]] = [
        ["states", measured.states],
        ["violations of Theorem 1", measured.violations],
        ["deviation over bound, mean", shown(measured.tightness, 3)],
        ["deviation over bound, largest", f"{measured.largest:.3f}"],
        ["pair identity, largest error", f"{measured.identity:.1g}"],
        ["dense margin against log odds of the pair, largest difference", f"{measured.log_odds:.1g}"],
        ["probability that the actions hold", shown(measured.covered, 3)],
    ]
    rows += [[f"Spearman of {name}", shown(interval, 3)] for name, interval in tracked.items()]
    differs = [
        f"The paper proves this and measures nothing. Model: {settings['model']}, {settings['held-out prompts']} prompts; "
        f"theta is that of `{settings['init']}`.",
        f"Policies are restricted to {ACTIONS} actions (reference, competitor and the likeliest others) and normalized; "
        "the theorem holds for them as they are, and the span over them is at most that over the vocabulary.",
        f"The utility is ours: the share of D's own next {FAR} tokens that the response says too, from 0 to 1. "
        "Q continues every action greedily.",
        "TV is taken over the whole vocabulary where it is tracked.",
        "Candidates are mismatches and near misses: the states whose erosion OnPTQ uses. All other states have none.",
    ]
    marks = [mark for name, interval in tracked.items() for mark in as_mark(name, "Spearman", interval)]
    table = Table("Theorem 1 on real states, 95% intervals over prompts", ("", "here"), rows)
    return Result(NAME, TITLE, claims, [table], differs, Picture(TITLE, "Spearman", marks), settings)
