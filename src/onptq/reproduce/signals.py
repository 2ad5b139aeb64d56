"""Table 10: how well each signal of a state predicts its mismatch and its future consequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onptq.bank import Column
from onptq.evaluate.statistics import Interval
from onptq.reproduce.banks import Bank, bank_of_init
from onptq.reproduce.common import differing_setup
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.paper_rows import paper
from onptq.reproduce.probes import COLUMNS, hidden_errors
from onptq.reproduce.record import Claim, Picture, Result, Table, above, as_mark, below, shown
from onptq.reproduce.resampling import auroc, difference, resampled, spearman

NAME, TITLE, SCHEME = "signals", "Single signals: mismatch and future consequence (Table 10)", "W4A8"
UNINFORMATIVE = 0.6  # an AUROC below this says little


@dataclass(frozen=True)
class Signals:
    """By signal, the AUROC for mismatch and the Spearman correlation with the consequence at H = 16."""

    states: int
    auroc: Mapping[str, Interval]
    spearman: Mapping[str, Interval]
    auroc_lead: Interval  # of JS over the best other signal
    spearman_lead: Interval  # of the consequence over the best other signal


def signals(bank: Bank, hidden: Column, seed: int = 0) -> Signals:
    """Every signal over the states with valid branches; `hidden` is the hidden error of each of them."""
    usable = bank.usable
    states, mismatch = usable.states, usable.mismatch
    columns = {
        "hidden error": hidden[bank.valid],
        "JS": states.js,
        "erosion": states.erosion,
        "consequence": states.consequence,
        "risk": states.risk,
    }
    detects = {name: auroc(column, mismatch) for name, column in columns.items()}
    follows = {name: spearman(column, usable.far) for name, column in columns.items()}
    every = np.arange(len(states))

    def lead(of: Mapping[str, Any], name: str) -> Any:
        others = {other: of[other](every) for other in of if other != name}
        best = max(others, key=lambda other: -np.inf if np.isnan(others[other]) else others[other])
        return difference(of[best], of[name])

    statistics = [*detects.values(), *follows.values(), lead(detects, "JS"), lead(follows, "consequence")]
    intervals = resampled(statistics, states.prompt, seed)
    count = len(columns)
    return Signals(
        len(states),
        dict(zip(columns, intervals[:count], strict=True)),
        dict(zip(columns, intervals[count : 2 * count], strict=True)),
        *intervals[2 * count :],
    )


def run(experiment: Experiment) -> Result:
    scheme = experiment.settings.scheme or SCHEME
    with bank_of_init(experiment, scheme) as init:
        session, bank = init.session, init.bank

        def errors() -> dict[str, Column]:
            init.speak()
            with session.reporter.phase("Hidden errors", total=len(session.prompts), unit="prompts") as bar:
                error = hidden_errors(session.prefixes(), bank.trajectories, bank.states, bar.advance)
            return {"error": error}

        hidden = session.run.step("hidden.parquet", COLUMNS, errors)["error"]
    return result(signals(bank, hidden, experiment.settings.seed), experiment.settings.describe())


def result(measured: Signals, settings: Mapping[str, Any]) -> Result:
    there = paper(NAME)["rows"]
    claims = [
        Claim(
            "Same-state JS predicts current mismatches best of all signals",
            f"AUROC {there['JS'][0]:.3f}; the next, risk, {there['risk'][0]:.3f}",
            f"AUROC {shown(measured.auroc['JS'], 3)}; ahead of the best other by {shown(measured.auroc_lead, 3, True)}",
            above(measured.auroc_lead),
        ),
        Claim(
            "Branch consequence follows future consequence best of all signals",
            f"Spearman {there['consequence'][1]:.3f}; the next, risk, {there['risk'][1]:.3f}",
            f"Spearman {shown(measured.spearman['consequence'], 3)}; ahead of the best other by "
            f"{shown(measured.spearman_lead, 3, True)}",
            above(measured.spearman_lead),
        ),
        Claim(
            f"Hidden error says little of mismatch: AUROC below {UNINFORMATIVE}",
            f"{there['hidden error'][0]:.3f}",
            shown(measured.auroc["hidden error"], 3),
            below(measured.auroc["hidden error"], UNINFORMATIVE),
        ),
    ]
    rows = [
        [name, there[name][0], shown(measured.auroc[name], 3), there[name][1], shown(measured.spearman[name], 3)]
        for name in measured.auroc
    ]
    heads = ("signal", "mismatch AUROC, paper", "here", "future Spearman, paper", "here")
    marks = [
        mark
        for group, of in (("mismatch AUROC", measured.auroc), ("future Spearman", measured.spearman))
        for name, interval in of.items()
        for mark in as_mark(name, group, interval)
    ]
    differs = [
        *differing_setup(settings, "Qwen2.5-VL-7B-Instruct", "767 states of 32 prompts", graded=False),
        f"{measured.states} states of the init have valid branches.",
        "The future is the consequence at H = 16. Its first four tokens are those of the branch consequence itself.",
        f"The threshold {UNINFORMATIVE} is ours.",
    ]
    table = Table("Signals of a state, 95% intervals over prompts", heads, rows)
    return Result(NAME, TITLE, claims, [table], differs, Picture(TITLE, "", marks), settings)
