"""Seconds of each step of the cycle on a CPU, their growth, and the tree of branches beside naive branching.

    python benchmarks/cpu_cycle.py [--json FILE]

A random Qwen2.5-VL of moderate size, images that make prompts of about 400 tokens, 64 response tokens, H = 4. It takes
about two minutes. Exit code 1 if the tree is not at least ten times as fast as naive branching.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onptq.bank import States, Trajectory
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import find_source
from onptq.cycle.branch import branch
from onptq.cycle.calibrate import calibrate
from onptq.cycle.compare import compare
from onptq.cycle.divergence import js_divergence
from onptq.cycle.follow import follow
from onptq.cycle.risk import score, select
from onptq.data.prompts import Media, Prompt
from onptq.engine.prefixes import Prefixes, whole_prompts
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch, encode
from onptq.models.processing import ModelInputs, PromptProcessor
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import CalibrateConfig, RiskConfig, SelectConfig
from onptq.zoo.random import write_random

TARGET = 10.0  # the tree must be at least this much faster than naive branching
CELL = 28  # pixels of an image token's side
SHAPES = ((20, 18), (18, 20), (24, 15), (15, 24))  # of images: 360 tokens each, beside about 40 of text
CRITICAL_PER_PROMPT = 2  # the paper's density: 256 critical states of 128 prompts
PROMPTS, TOKENS, HORIZONS = (4, 8, 16), (16, 32, 64), (2, 4, 8)
MOST_SECONDS = 4.0  # after which nothing is measured again
PHASES = ("Encode", "Follow", "Compare", "Branch", "Calibrate")

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """One setting and the seconds of every phase measured there."""

    prompts: int
    tokens: int
    horizon: int
    seconds: dict[str, float] = field(default_factory=dict)
    states: int = 0
    candidates: int = 0


@dataclass(frozen=True)
class Naive:
    """Naive branching measured on a sample of candidates, against the tree on all of them."""

    sampled: int
    candidates: int
    tree_ms: float  # per candidate
    naive_ms: float  # per candidate, through transformers' own forward, towers included
    naive_encoded_ms: float  # per candidate, on the encoded prompt: what the tree saves apart from the towers
    largest_difference: float  # of A_t, tree against naive

    @property
    def ratio(self) -> float:
        return self.naive_ms / self.tree_ms

    @property
    def ratio_encoded(self) -> float:
        return self.naive_encoded_ms / self.tree_ms


@dataclass(frozen=True)
class Walk:
    """The results of the cycle's steps at one setting."""

    encoded: Sequence[EncodedPrompt]
    prefixes: Prefixes
    trajectories: Sequence[Trajectory]
    states: States


@dataclass(frozen=True)
class Bench:
    policy: Policy
    theta: Theta
    inputs: Sequence[ModelInputs]
    repeats: int

    def point(self, prompts: int, tokens: int, horizon: int) -> tuple[Point, Walk]:
        """Every phase at one setting: Calibrate once, the others as often as `repeats` and MOST_SECONDS allow."""
        runs: dict[str, list[float]] = {phase: [] for phase in PHASES}
        while len(runs["Encode"]) < self.repeats and sum(map(sum, runs.values())) < MOST_SECONDS:
            walk = self._walk(prompts, tokens, horizon, runs)
        chosen = select(score(walk.states, RiskConfig()), SelectConfig(budget=CRITICAL_PER_PROMPT * prompts))
        cfg = CalibrateConfig()
        _, elapsed = timed(lambda: calibrate(self.policy, walk.encoded, walk.trajectories, chosen, self.theta, cfg))
        runs["Calibrate"].append(elapsed)
        self.freeze()
        seconds = {phase: statistics.median(values) for phase, values in runs.items()}
        return Point(prompts, tokens, horizon, seconds, len(chosen), int(chosen.candidates.sum())), walk

    def freeze(self) -> None:
        self.policy.freeze(self.theta, keep="floats")

    def _walk(self, prompts: int, tokens: int, horizon: int, runs: Mapping[str, list[float]]) -> Walk:
        def measured(phase: str, action: Callable[[], T]) -> T:
            result, seconds = timed(action)
            runs[phase].append(seconds)
            return result

        encoded = measured("Encode", lambda: [self._encode(ordinal) for ordinal in range(prompts)])
        prefixes = Prefixes(self.policy, encoded, max_tokens=tokens)
        trajectories = measured("Follow", lambda: follow(prefixes))
        compared = measured("Compare", lambda: compare(prefixes, trajectories))
        states = measured("Branch", lambda: branch(prefixes, trajectories, compared, horizon=horizon))
        return Walk(encoded, prefixes, trajectories, states)

    def _encode(self, ordinal: int) -> EncodedPrompt:
        return encode(self.policy, [self.inputs[ordinal]], [ordinal])[0]

    def horizon(self, walk: Walk, horizon: int) -> Point:
        """Branch at another H; the other steps do not depend on it."""
        runs: list[float] = []
        while len(runs) < self.repeats and sum(runs) < MOST_SECONDS:
            runs.append(timed(lambda: branch(walk.prefixes, walk.trajectories, walk.states, horizon=horizon))[1])
        seconds, candidates = {"Branch": statistics.median(runs)}, int(walk.states.candidates.sum())
        return Point(len(walk.encoded), walk.prefixes.max_tokens, horizon, seconds, len(walk.states), candidates)

    def naive(self, walk: Walk, tree: Point, sample: int) -> Naive:
        """Branch a sample of the candidates by prefilling each branch again."""
        states, candidates = walk.states, np.flatnonzero(walk.states.candidates)
        rows = candidates[np.linspace(0, len(candidates) - 1, min(sample, len(candidates))).astype(int)]

        def consequence(row: int, branch_of: Callable[[int, Sequence[int], int], Tensor]) -> float:
            prompt, t = int(states.prompt[row]), int(states.t[row])
            prefix = walk.trajectories[prompt].tokens[: t - 1]
            pair = (branch_of(prompt, prefix, int(column[row])) for column in (states.reference, states.competitor))
            return float(js_divergence(*pair).mean())

        def through_transformers(prompt: int, prefix: Sequence[int], forced: int) -> Tensor:
            return branch_through_transformers(self.policy, self.inputs[prompt], prefix, forced, tree.horizon)

        def on_encoded_prompt(prompt: int, prefix: Sequence[int], forced: int) -> Tensor:
            return branch_on_encoded_prompt(self.policy, walk.encoded[prompt], prefix, forced, tree.horizon)

        def measured(branch_of: Callable[[int, Sequence[int], int], Tensor]) -> tuple[list[float], float]:
            consequence(int(rows[0]), branch_of)  # warm up
            runs = [timed(partial(consequence, int(row), branch_of)) for row in rows]
            return [value for value, _ in runs], 1000 * statistics.median(seconds for _, seconds in runs)

        (consequences, plain), (on_encoded, encoded) = measured(through_transformers), measured(on_encoded_prompt)
        difference = float(np.abs(np.array([consequences, on_encoded]) - states.consequence[rows]).max())
        return Naive(
            len(rows), len(candidates), 1000 * tree.seconds["Branch"] / len(candidates), plain, encoded, difference
        )


@torch.no_grad()
def branch_through_transformers(
    policy: Policy, inputs: ModelInputs, prefix: Sequence[int], forced: int, horizon: int
) -> Tensor:
    """Prefill prompt and prefix, decode greedily with transformers' own cache, prefill all of it for D: logits [H,
    V]."""
    model, tokens = policy.model, [forced]
    with policy.speaking("Q"):
        out = model(**extended(inputs, [*prefix, forced]), use_cache=True, logits_to_keep=1)
        while len(tokens) < horizon:
            token = out.logits[0, -1:].argmax(-1, keepdim=True)  # [1, 1]
            tokens.append(int(token))
            if len(tokens) < horizon:
                out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
    with policy.speaking("D"):
        logits: Tensor = model(**extended(inputs, [*prefix, *tokens]), use_cache=False, logits_to_keep=horizon).logits[
            0
        ]
    return logits.float()


@torch.no_grad()
def branch_on_encoded_prompt(
    policy: Policy, prompt: EncodedPrompt, prefix: Sequence[int], forced: int, horizon: int
) -> Tensor:
    """The same without the vision tower: everything starts from the encoded prompt."""
    tokens = [forced]

    def read(ids: Sequence[int]) -> tuple[PromptBatch, Tokens]:
        fed = torch.tensor(ids)
        batch = PromptBatch.of([prompt.extended(fed, policy.embed(fed))])
        return batch, whole_prompts(batch)

    with policy.speaking("Q"):
        batch, whole = read([*prefix, forced])
        cache = policy.cache(1, batch.width + horizon)
        hidden = policy.run(whole, cache)[:, -1]
        while len(tokens) < horizon:
            token = policy.logits(hidden).argmax(-1)
            tokens.append(int(token))
            if len(tokens) < horizon:
                place = batch.response_positions(len(tokens) - 1)[:, :, -1:]
                mask = torch.ones(1, 1, 1, cache.length + 1, dtype=torch.bool)
                hidden = policy.run(Tokens(policy.embed(token[None]), place, mask), cache)[:, -1]
    with policy.speaking("D"):
        return policy.logits(policy.run(read([*prefix, *tokens])[1])[0, -horizon:])


def extended(inputs: ModelInputs, response: Sequence[int]) -> Mapping[str, Tensor]:
    tensors, ids = dict(inputs.tensors), torch.tensor([response])
    tail = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
    return tensors | {name: torch.cat((tensors[name], tail[name]), dim=1) for name in tail.keys() & tensors.keys()}


def timed(action: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


def make_bench(scheme: str, repeats: int) -> Bench:
    with tempfile.TemporaryDirectory() as name:
        folder = write_random("qwen2.5-vl", Path(name), prompts=1, layers=4, hidden=256, ffn=512, vocab=1024)
        source = find_source(folder)
        processor = PromptProcessor.from_folder(folder, source.family, source.config)
        policy = load_policy(source, scheme, device="cpu", dtype=torch.float32)
    policy.eos = frozenset()  # rollouts of full length, so that points differ in nothing but their setting
    inputs = [processor(draw_prompt(ordinal)) for ordinal in range(max(PROMPTS))]
    return Bench(policy, Theta.rtn(policy.structure.blocks, policy.scheme), inputs, repeats)


def draw_prompt(ordinal: int) -> Prompt:
    from PIL import Image

    columns, rows = SHAPES[ordinal % len(SHAPES)]
    noise = np.random.default_rng(ordinal).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize((columns * CELL, rows * CELL), Image.Resampling.BILINEAR).save(out, "PNG")
    data = out.getvalue()
    content = [{"type": "image"}, {"type": "text", "text": f"Describe picture {ordinal} in a few words."}]
    media = Media(None, hashlib.sha256(data).hexdigest(), data)
    return Prompt(ordinal, f"p{ordinal}", [{"role": "user", "content": content}], (media,))


def run(bench: Bench, sample: int, report: Callable[[str], None]) -> dict[str, Any]:
    middle, longest, usual = PROMPTS[1], TOKENS[-1], HORIZONS[1]
    report("warm up")
    bench.freeze()
    bench.point(PROMPTS[0], TOKENS[0], usual)
    points: dict[tuple[int, int], Point] = {}
    for prompts, tokens in {(prompts, longest) for prompts in PROMPTS} | {(middle, tokens) for tokens in TOKENS}:
        report(f"{prompts} prompts, {tokens} tokens, H = {usual}")
        points[prompts, tokens], walk = bench.point(prompts, tokens, usual)
        if (prompts, tokens) == (middle, longest):
            base = walk
    report("horizons")
    horizons = [bench.horizon(base, horizon) for horizon in HORIZONS]
    report("tree against naive branching")
    naive = bench.naive(base, points[middle, longest], sample)
    return {
        "prompt_tokens": statistics.mean(one.length for one in bench.inputs),
        "threads": torch.get_num_threads(),
        "scheme": str(bench.policy.scheme),
        "base": asdict(points[middle, longest]),
        "prompts": [asdict(points[prompts, longest]) for prompts in PROMPTS],
        "tokens": [asdict(points[middle, tokens]) for tokens in TOKENS],
        "horizons": [asdict(point) for point in horizons],
        "branch": asdict(naive) | {"ratio": naive.ratio, "ratio_encoded": naive.ratio_encoded},
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    base, naive = result["base"], result["branch"]
    console.print(
        f"{base['prompts']} prompts of {result['prompt_tokens']:.0f} tokens, {base['tokens']} response tokens, "
        f"H = {base['horizon']}, {result['scheme']}, {result['threads']} thread(s): "
        f"{base['states']} states, {base['candidates']} candidates"
    )
    sweeps = {"prompts": PROMPTS, "tokens": TOKENS, "horizons": HORIZONS}
    table = Table("", "seconds", *(f"{sweep} {' '.join(map(str, values))}" for sweep, values in sweeps.items()))
    for phase in PHASES:
        table.add_row(phase, f"{base['seconds'][phase]:.2f}", *(growth(result[sweep], phase) for sweep in sweeps))
    console.print(table)
    console.print("Growth is relative to the smallest setting of each sweep; only Branch depends on H.")
    console.print(
        f"Branch, per candidate: tree {naive['tree_ms']:.2f} ms; naive {naive['naive_ms']:.0f} ms, "
        f"{naive['ratio']:.0f} times as long; naive without the vision tower {naive['naive_encoded_ms']:.0f} ms, "
        f"{naive['ratio_encoded']:.0f} times as long. {naive['sampled']} of {naive['candidates']} candidates were "
        f"branched naively; their A_t differ from the tree's by at most {naive['largest_difference']:.1e}."
    )


def growth(points: Sequence[Mapping[str, Any]], phase: str) -> str:
    seconds = [point["seconds"][phase] for point in points if phase in point["seconds"]]
    return "  ".join(f"{value / seconds[0]:.2f}" for value in seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number to FILE")
    parser.add_argument("--scheme", default="W4A8")
    # Threads of one GEMM wait for each other: on a busy machine two are slower than one.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--repeats", type=int, default=3, help="most runs of a short phase, of which the median is taken"
    )
    parser.add_argument("--sample", type=int, default=6, help="candidates that are branched naively")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    with console.status("write a model") as status:
        result = run(make_bench(arguments.scheme, arguments.repeats), arguments.sample, status.update)
    show(console, result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    fast_enough = min(result["branch"]["ratio"], result["branch"]["ratio_encoded"]) >= TARGET
    if not fast_enough:
        console.print(f"[red]the tree is less than {TARGET:g} times as fast as naive branching[/red]")
    return 0 if fast_enough else 1


if __name__ == "__main__":
    sys.exit(main())
