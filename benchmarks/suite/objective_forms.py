"""Which form of the objective, and do on-policy states help? Arms that differ in one choice, held out against one another.

    python -m benchmarks.suite.objective_forms OUT --model MODEL --scheme W4A8
    python -m benchmarks.suite.objective_forms OUT                  # the table of what OUT holds

All arms share theta^(0), prompts and steps. Each is judged on test prompts that no arm has seen, on the states its own rollouts
visit; differences are paired by prompt, with a bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap

from benchmarks.suite.instructions import instructions
from onptq.bank import MISMATCH, States
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import find_source
from onptq.cycle.branch import branch
from onptq.cycle.calibrate import Holdout, calibrate, order_seed
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.risk import score, select
from onptq.cycle.rounds import bank_figures
from onptq.data.prompts import Prompt
from onptq.engine.prefixes import Prefixes
from onptq.methods import METHODS
from onptq.models.encoding import EncodedPrompt, encode
from onptq.models.processing import PromptProcessor
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe

ENERGY, LITERAL = "calibrate.normalize=energy", "calibrate.normalize=none"
EVERY, UNIFORM = "select.budget=1000000", "select.rule=all"

# Changes of the paper's recipe
ARMS: dict[str, tuple[str, ...]] = {
    "start": ("rounds=0",),
    "static, energy": (ENERGY, "calibrate.gamma=0"),
    "static, literal": (LITERAL, "calibrate.gamma=0"),
    "onptq, energy": (ENERGY,),
    "onptq, literal": (LITERAL,),
    "onptq, energy, gamma 1": (ENERGY, "calibrate.gamma=1"),
    "onptq, energy, K 1024": (ENERGY, "select.budget=1024"),
    "onptq, energy, every candidate": (ENERGY, EVERY),
    "onptq, energy, every candidate, gamma 1": (ENERGY, EVERY, "calibrate.gamma=1"),
    "onptq, literal, every candidate, gamma 1": (LITERAL, EVERY, "calibrate.gamma=1"),
    "uniform, energy": (ENERGY, UNIFORM),
    "uniform, energy, gamma 1": (ENERGY, UNIFORM, "calibrate.gamma=1"),
    "uniform, literal, gamma 1": (LITERAL, UNIFORM, "calibrate.gamma=1"),
}
REPLICATES = 2000


def main() -> None:
    args = _parse()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.model is not None:
        _run_arms(args)
    judged = {path.stem: States.read(path) for path in sorted(args.out.glob("*.parquet"))}
    report = table(judged)
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    print(markdown(report))


def _run_arms(args: argparse.Namespace) -> None:
    source = find_source(args.model)
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    policy = load_policy(source, args.scheme, device=args.device, dtype=args.dtype)
    groups = [instructions(0, 18), instructions(18, 20), instructions(20, 20 + args.test_topics)]
    calibration, holdout, test = (_encode(policy, processor, group, 1000 * n) for n, group in enumerate(groups))
    start = METHODS[args.init](policy, calibration, lambda blocks: None)
    for name in args.arms or ARMS:
        recipe = Recipe.preset("paper", [f"scheme={args.scheme}", *args.overrides, *ARMS[name]])
        theta = _train(policy, calibration, holdout, start, recipe) if recipe.rounds else start
        states = _judge(policy, theta, test, recipe.follow.max_tokens)
        states.write(args.out / f"{name}.parquet")
        print(name, json.dumps(judged_figures(states)), flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="one scheme, start and seed; arms can be added by several processes")
    parser.add_argument("--model")
    parser.add_argument("--scheme", default="W4A8")
    parser.add_argument("--init", default="search", choices=sorted(METHODS))
    parser.add_argument("--arms", nargs="*", choices=sorted(ARMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--test-topics", type=int, default=20)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    args = parser.parse_args()
    args.overrides.append(f"seed={args.seed}")
    return args


def _encode(policy: Policy, processor: PromptProcessor, prompts: Sequence[Prompt], base: int) -> list[EncodedPrompt]:
    return encode(policy, processor.ahead(prompts), count(base))


def _train(
    policy: Policy, prompts: Sequence[EncodedPrompt], holdout: Sequence[EncodedPrompt], theta: Theta, recipe: Recipe
) -> Theta:
    tokens = recipe.follow.max_tokens
    prefixes, held_out = Prefixes(policy, prompts, max_tokens=tokens), Prefixes(policy, holdout, max_tokens=tokens)
    for k in range(recipe.rounds):
        policy.freeze(theta, keep="floats")
        prefixes.forget("Q")
        held_out.forget("Q")
        trajectories = follow(prefixes)
        states = compare(prefixes, trajectories)
        if recipe.calibrate.gamma:
            states = branch(prefixes, trajectories, states, horizon=recipe.branch.horizon)
            states = select(score(states, recipe.risk), recipe.select, risk=recipe.risk, seed=recipe.seed + k)
        apart = follow(held_out)
        judge = Holdout(holdout, apart, compare(held_out, apart))
        seed = order_seed(recipe.seed, k)
        theta = calibrate(
            policy, prompts, trajectories, states, theta, recipe.calibrate, holdout=judge, seed=seed
        ).theta
    return theta


def _judge(policy: Policy, theta: Theta, test: Sequence[EncodedPrompt], max_tokens: int) -> States:
    policy.freeze(theta, keep="floats")
    prefixes = Prefixes(policy, test, max_tokens=max_tokens)
    return compare(prefixes, follow(prefixes))


def judged_figures(states: States) -> dict[str, float]:
    figures = bank_figures(states)
    return {name: figures[name] for name in ("kl", "mismatch_percent", "erosion", "first_fork")}


def table(judged: Mapping[str, States]) -> dict[str, Any]:
    """Each arm's figures, and its paired difference to the static arm with the energy-normalized loss."""
    control = next((name for name in judged if name == "static, energy"), next(iter(judged)))
    rows = {
        name: {"figures": judged_figures(states), "against": paired(states, judged[control])}
        for name, states in judged.items()
    }
    return {"control": control, "arms": rows}


def paired(states: States, control: States) -> dict[str, tuple[float, float, float]]:
    """Difference of each mean over states, and its 95% interval over prompts."""
    columns = {
        "kl": lambda bank: bank.kl,
        "mismatch_percent": lambda bank: 100.0 * (bank.kind == MISMATCH),
        "erosion": lambda bank: bank.erosion,
    }
    return {name: _interval(column(states), states, column(control), control) for name, column in columns.items()}


def _interval(mine: Any, states: States, theirs: Any, control: States) -> tuple[float, float, float]:
    sums = [_per_prompt(values, bank) for values, bank in ((mine, states), (theirs, control))]
    samples = (sums[0][0], sums[0][1], sums[1][0], sums[1][1])

    def difference(a: Any, n: Any, b: Any, m: Any, axis: int = -1) -> Any:
        return a.sum(axis) / n.sum(axis) - b.sum(axis) / m.sum(axis)

    if all(np.array_equal(a, b) for a, b in zip(sums[0], sums[1], strict=True)):
        return 0.0, 0.0, 0.0
    found = bootstrap(
        samples,
        difference,
        paired=True,
        vectorized=True,
        n_resamples=REPLICATES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = found.confidence_interval
    return float(difference(*samples)), float(low), float(high)


def _per_prompt(values: Any, bank: States) -> tuple[Any, Any]:
    _, index = np.unique(bank.prompt, return_inverse=True)
    return np.bincount(index, values), np.bincount(index).astype(float)


def markdown(report: Mapping[str, Any]) -> str:
    head = f"| arm | KL | mismatch % | erosion | first fork | KL - {report['control']} | mismatch | erosion |"
    lines = [head, "|---" * 8 + "|"]
    for name, row in report["arms"].items():
        figures, against = row["figures"], row["against"]
        cells = [
            f"{figures['kl']:.4f}",
            f"{figures['mismatch_percent']:.2f}",
            f"{figures['erosion']:.4f}",
            f"{figures['first_fork']:.1f}",
        ]
        cells += [f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]" for mean, low, high in against.values()]
        lines.append("| " + " | ".join((name, *cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    with torch.no_grad():
        main()
