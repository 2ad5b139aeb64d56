"""Forms of the objective: variants of the paper's recipe, each with one other choice, in one comparison.

    python -m benchmarks.suite.objective_forms OUT --model MODEL --scheme W4A8

All variants share theta^(0), prompts and steps. They are compared on test prompts that no variant has seen, each on the
states of its own rollouts. OUT/report.md has all figures. The same command continues after a kill; another one adds
variants.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suite.instructions import instructions
from onptq.evaluate.candidates import MethodCandidate
from onptq.evaluate.comparison import REPORT_TEXT, compare_models
from onptq.evaluate.report import sentence
from onptq.evaluate.summary import Report
from onptq.progress import RichReporter
from onptq.recipe import Recipe

ENERGY, LITERAL = "calibrate.normalize=energy", "calibrate.normalize=none"
EVERY, UNIFORM = "select.budget=1000000", "select.rule=all"
INIT, CONTROL = "init", "static, energy"

# Changes of the paper's recipe
VARIANTS: dict[str, tuple[str, ...]] = {
    CONTROL: (ENERGY, "calibrate.gamma=0"),
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
CALIBRATION_TOPICS, HOLDOUT_TOPICS = 18, 2  # the topics after them are for testing
HOLDOUT = instructions(CALIBRATION_TOPICS, CALIBRATION_TOPICS + HOLDOUT_TOPICS)
CALIBRATION = instructions(0, CALIBRATION_TOPICS)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    first_test = CALIBRATION_TOPICS + HOLDOUT_TOPICS
    report = compare_models(
        args.model,
        [variant(name, args.scheme, args.init, args.changes) for name in args.variants],
        args.out,
        prompts=instructions(first_test, first_test + args.test_topics),
        calibration=CALIBRATION,
        holdout=HOLDOUT,
        recipe=_recipe(args.scheme, args.changes),
        reporter=RichReporter(),
    )
    print("\n".join(against_control(report)))
    print(f"All figures: {args.out / REPORT_TEXT}")


def variant(name: str, scheme: str, init: str, changes: Sequence[str]) -> MethodCandidate:
    """The candidate of that name. INIT is theta^(0) itself, named like a method so that all others start from its
    file."""
    if name == INIT:
        return MethodCandidate(f"{init}:{scheme}", _recipe(scheme, [*changes, f"method={init}", "rounds=0"]))
    return MethodCandidate(name, _recipe(scheme, [f"init={init}", *changes, *VARIANTS[name]]))


def against_control(report: Report) -> list[str]:
    """One sentence for every pair with the static variant."""
    return [sentence(pair, report) for pair in report.pairs if CONTROL in (pair.first, pair.second)]


def _recipe(scheme: str, changes: Sequence[str]) -> Recipe:
    sizes = (f"data.prompts={len(CALIBRATION)}", f"data.holdout={len(HOLDOUT)}")
    return Recipe.preset("paper", [f"scheme={scheme}", *sizes, *changes])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [INIT, *VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the comparison: one model and scheme")
    parser.add_argument("--model", required=True)
    parser.add_argument("--scheme", default="W4A8")
    parser.add_argument("--init", default="search", help="base method of theta^(0)")
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--test-topics", type=int, default=20)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="FIELD=VALUE")
    args = parser.parse_args(argv)
    args.changes += [f"seed={args.seed}", f"compute.device={args.device}", f"compute.dtype={args.dtype}"]
    return args


if __name__ == "__main__":
    main()
