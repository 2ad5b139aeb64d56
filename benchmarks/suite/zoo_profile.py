"""Whether an embedded model is a fair benchmark: how sure it is, and the damage of each scheme before calibration.

    python -m benchmarks.suite.zoo_profile zoo:qwen2.5-vl+outliers --out profile.json
    python -m benchmarks.suite.zoo_profile zoo:qwen2.5-vl --schemes W4A8 W3A8 --methods rtn smoothquant search --items 500

On-policy figures are on captions of held-out images, scores on items of the test split.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onptq.bank import MISMATCH, States, Trajectory
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import find_source
from onptq.cycle.branch import branch
from onptq.cycle.compare import compare, padded_responses
from onptq.cycle.rounds import bank_figures
from onptq.data.prompts import Prompt
from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import rollouts
from onptq.evaluate.answers import EncodedItems, answer
from onptq.evaluate.scores import compare_answers, score
from onptq.methods import run as run_method
from onptq.models.encoding import EncodedPrompt, encode
from onptq.models.processing import PromptProcessor
from onptq.quantizer.policy import Policy
from onptq.registry import METHODS
from onptq.zoo.suite import CAPTION_TOKENS, items, prompts, tasks_of

SCHEMES = ("W8A8", "W4A16", "W4A8", "W4A6", "W3A8", "W3A6", "W4A4")
SURE = 0.7  # a state whose dense top-1 probability is below this is a close call
HORIZON = 4


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    report = measure(args.model, args.schemes, args.methods, args.prompts, args.items)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(markdown(report))


def measure(
    model: str, schemes: Sequence[str], methods: Sequence[str], prompt_count: int, item_count: int
) -> dict[str, Any]:
    source = find_source(model)
    family = source.family.name
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    calibration, heldout = (prompts(family, split, prompt_count, "captions") for split in ("calibration", "held-out"))
    tested = [item for task in tasks_of(family) for item in items(family, task, "test", item_count)]
    report: dict[str, Any] = {"model": model, "prompts": prompt_count, "items": item_count, "quantized": {}}
    for scheme in schemes:
        policy = load_policy(source, scheme, dtype="float32")
        encoded, unseen = (_encode(policy, processor, group) for group in (calibration, heldout))
        questions = EncodedItems(policy, processor, tested)
        if "dense" not in report:
            dense = answer(questions, "D")
            report["dense"] = confidence(policy, unseen) | {"scores": score(tested, dense).to_dict()}
        for method in methods:
            policy.freeze(run_method(method, policy, encoded, lambda blocks: None), keep="floats")
            given = answer(questions, "Q")
            report["quantized"][f"{scheme} {method}"] = {
                "on_policy": on_policy(policy, unseen),
                "scores": score(tested, given).to_dict(),
                "changes": compare_answers(tested, dense, given).to_dict(),
            }
            sys.stderr.write(f"{model} {scheme} {method}\n")
    return report


@torch.no_grad()
def confidence(policy: Policy, prompts: Sequence[EncodedPrompt]) -> dict[str, float]:
    """How sure D is in the states of its own rollouts, and how long these are."""
    prefixes = Prefixes(policy, prompts, max_tokens=CAPTION_TOKENS)
    trajectories = rollouts(prefixes, "D")
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}
    top = []
    for index, batch in enumerate(prefixes.batches):
        response = padded_responses(batch, by_prompt)
        hidden = prefixes.teacher_force(index, "D", response)[1]
        for row, prompt in enumerate(batch.prompts):
            visited = hidden[row, : len(by_prompt[prompt.ordinal].tokens)]
            top.append(policy.logits(visited).softmax(-1).amax(-1).cpu().numpy())
    sure = np.concatenate(top)
    return {
        "states": len(sure),
        "close_calls_percent": 100 * float((sure < SURE).mean()),
        "mean_top1": float(sure.mean()),
        "tokens": float(np.mean([len(trajectory.tokens) for trajectory in trajectories])),
        "finished_percent": 100 * float(np.mean([trajectory.finished for trajectory in trajectories])),
    }


def on_policy(policy: Policy, prompts: Sequence[EncodedPrompt]) -> dict[str, float]:
    """Figures of Q's own captions, and the consequence of its forks."""
    prefixes = Prefixes(policy, prompts, max_tokens=CAPTION_TOKENS)
    trajectories: list[Trajectory] = rollouts(prefixes, "Q")
    states: States = branch(prefixes, trajectories, compare(prefixes, trajectories), horizon=HORIZON)
    forks = (states.kind == MISMATCH) & (states.horizon > 0)
    later = float(states.consequence[forks].mean()) if forks.any() else 0.0
    return bank_figures(states) | {"fork_consequence": later}


def markdown(report: dict[str, Any]) -> str:
    dense = report["dense"]
    tasks = list(dense["scores"]["tasks"])
    lines = [
        f"{report['model']}: dense top-1 probability below {SURE} in {dense['close_calls_percent']:.1f}% of "
        f"{dense['states']} caption states; captions of {dense['tokens']:.1f} tokens, {dense['finished_percent']:.0f}% ended",
        "",
        f"| scheme, method | mismatch % | KL | erosion | A at forks | flips % | {' | '.join(tasks)} |",
        "|---" * (6 + len(tasks)) + "|",
        f"| dense | | | | | | {_scores(dense['scores'], tasks)} |",
    ]
    for name, one in report["quantized"].items():
        figures = one["on_policy"]
        lines.append(
            f"| {name} | {figures['mismatch_percent']:.1f} | {figures['kl']:.4f} | {figures['erosion']:.3f} | "
            f"{figures['fork_consequence']:.3f} | {one['changes']['flips']['percent']:.1f} | {_scores(one['scores'], tasks)} |"
        )
    return "\n".join(lines)


def _scores(scores: dict[str, Any], tasks: Sequence[str]) -> str:
    return " | ".join(f"{scores['tasks'][task]['percent']:.1f}" for task in tasks)


def _encode(policy: Policy, processor: PromptProcessor, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
    return encode(policy, processor.ahead(prompts), [prompt.ordinal for prompt in prompts])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--methods", nargs="+", default=("rtn", "smoothquant"), choices=sorted(METHODS))
    parser.add_argument("--prompts", type=int, default=64, help="held-out captions, and as many to calibrate on")
    parser.add_argument("--items", type=int, default=200, help="test items per task")
    parser.add_argument("--out", type=Path, help="the whole report as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
