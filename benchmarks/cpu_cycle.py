"""How long each step of the cycle takes on a CPU, how it grows, and what the tree of branches saves against naive branching.

    python benchmarks/cpu_cycle.py [--json FILE]

A random Qwen2.5-VL of moderate size, pictures that make prompts of about 400 tokens, 64 response tokens, H = 4. About three
minutes on two cores. Fails if the tree is not at least ten times as fast as naive branching.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onptq.bank import States, Trajectory
from onptq.cycle.branch import branch
from onptq.cycle.calibrate import calibrate
from onptq.cycle.compare import compare
from onptq.cycle.divergence import js_divergence
from onptq.cycle.follow import follow
from onptq.cycle.prefixes import Prefixes, causal_mask
from onptq.cycle.risk import score, select
from onptq.data.prompts import Media, Prompt
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.loading import find_source
from onptq.models.processing import ModelInputs, PromptProcessor
from onptq.policy import Policy, load_policy
from onptq.quantizer.theta import Theta
from onptq.recipe import CalibrateConfig, RiskConfig, SelectConfig
from onptq.zoo.random import write_random

TARGET = 10.0  # the tree must be at least this much faster than naive branching
CELL = 28  # pixels of an image token's side
SHAPES = ((20, 18), (18, 20), (24, 15), (15, 24))  # 360 image tokens each, and some 40 of text
CRITICAL_PER_PROMPT = 2  # the paper's density: 256 critical states of 128 prompts
PROMPTS, TOKENS, HORIZONS = (4, 8, 16), (16, 32, 64), (2, 4, 8)
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
class Bench:
    policy: Policy
    theta: Theta
    inputs: Sequence[ModelInputs]
    repeats: int

    def encode(self, count: int) -> list[EncodedPrompt]:
        return [self.policy.encode(one.tensors, one.modality, n) for n, one in enumerate(self.inputs[:count])]

    def prefixes(self, prompts: Sequence[EncodedPrompt], tokens: int) -> Prefixes:
        self.policy.freeze(self.theta, keep_dequantized=True)
        return Prefixes(self.policy, prompts, max_tokens=tokens)

    def point(self, prompts: int, tokens: int, horizon: int) -> Point:
        """Every phase at one setting; short phases are repeated and their median taken."""
        seen: dict[str, list[float]] = {phase: [] for phase in PHASES}

        def measured(phase: str, action: Callable[[], T]) -> T:
            result, seconds = timed(action)
            seen[phase].append(seconds)
            return result

        for _ in range(self.repeats):
            encoded = measured("Encode", lambda: self.encode(prompts))
            prefixes = self.prefixes(encoded, tokens)
            trajectories = measured("Follow", lambda: follow(prefixes))  # noqa: B023 - called at once
            states = measured("Compare", lambda: compare(prefixes, trajectories))  # noqa: B023
            states = measured("Branch", lambda: branch(prefixes, trajectories, states, horizon=horizon))  # noqa: B023
        chosen = select(score(states, RiskConfig()), SelectConfig(budget=CRITICAL_PER_PROMPT * prompts))
        measured("Calibrate", lambda: self.calibrate(encoded, trajectories, chosen))
        seconds = {phase: statistics.median(values) for phase, values in seen.items()}
        return Point(prompts, tokens, horizon, seconds, len(states), int(states.candidates.sum()))

    def calibrate(
        self, prompts: Sequence[EncodedPrompt], trajectories: Sequence[Trajectory], states: States
    ) -> None:
        calibrate(self.policy, prompts, trajectories, states, self.theta, CalibrateConfig())

    def horizons(self, prompts: int, tokens: int) -> Iterator[Point]:
        """Only Branch depends on H."""
        prefixes = self.prefixes(self.encode(prompts), tokens)
        trajectories = follow(prefixes)
        states = compare(prefixes, trajectories)
        for horizon in HORIZONS:
            runs = [timed(lambda: branch(prefixes, trajectories, states, horizon=horizon))[1] for _ in range(self.repeats)]  # noqa: B023
            seconds = {"Branch": statistics.median(runs)}
            yield Point(prompts, tokens, horizon, seconds, len(states), int(states.candidates.sum()))

    def naive(self, prompts: int, tokens: int, horizon: int, sample: int) -> Naive:
        encoded = self.encode(prompts)
        prefixes = self.prefixes(encoded, tokens)
        trajectories = follow(prefixes)
        compared = compare(prefixes, trajectories)
        runs = [timed(lambda: branch(prefixes, trajectories, compared, horizon=horizon)) for _ in range(self.repeats)]
        states, tree = runs[0][0], statistics.median(seconds for _, seconds in runs)
        candidates = np.flatnonzero(states.candidates)
        rows = candidates[np.linspace(0, len(candidates) - 1, min(sample, len(candidates))).astype(int)]

        def consequence(row: int, forward: Callable[[int, Sequence[int], int, int], Tensor]) -> float:
            prompt, prefix = int(states.prompt[row]), trajectories[states.prompt[row]].tokens[: states.t[row] - 1]
            pair = [forward(prompt, prefix, int(token), horizon) for token in (states.reference[row], states.competitor[row])]
            return float(js_divergence(*pair).mean())

        def through_transformers(prompt: int, prefix: Sequence[int], forced: int, horizon: int) -> Tensor:
            return branch_through_transformers(self.policy, self.inputs[prompt], prefix, forced, horizon)

        def on_encoded_prompt(prompt: int, prefix: Sequence[int], forced: int, horizon: int) -> Tensor:
            return branch_on_encoded_prompt(self.policy, encoded[prompt], prefix, forced, horizon)

        seconds, found = [], []
        for forward in (through_transformers, on_encoded_prompt):
            consequence(int(rows[0]), forward)  # warm up
            values, elapsed = timed(lambda: [consequence(int(row), forward) for row in rows])  # noqa: B023
            seconds.append(1000 * elapsed / len(rows))
            found.append(values)
        difference = float(np.abs(np.array(found) - states.consequence[rows]).max())
        return Naive(len(rows), len(candidates), 1000 * tree / len(candidates), *seconds, difference)


@torch.no_grad()
def branch_through_transformers(
    policy: Policy, inputs: ModelInputs, prefix: Sequence[int], forced: int, horizon: int
) -> Tensor:
    """Prefill prompt and prefix, decode greedily with transformers' own cache, prefill all of it for D: logits [H, V]."""
    model, tokens = policy.model, [forced]
    with policy.speaking("Q"):
        arguments = extended(inputs, [*prefix, forced])
        length = arguments["input_ids"].shape[1]
        out = model(**arguments, use_cache=True, logits_to_keep=1)
        while len(tokens) < horizon:
            token = out.logits[0, -1:].argmax(-1, keepdim=True)  # [1, 1]
            tokens.append(int(token))
            if len(tokens) < horizon:
                length += 1
                mask = torch.ones(1, length, dtype=torch.long)
                out = model(
                    input_ids=token, attention_mask=mask, past_key_values=out.past_key_values, use_cache=True
                )
    with policy.speaking("D"):
        logits: Tensor = model(**extended(inputs, [*prefix, *tokens]), use_cache=False, logits_to_keep=horizon).logits[0]
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
        return batch, Tokens(batch.embeds, batch.positions, causal_mask(batch.real, 0), batch.deepstack)

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


def run(bench: Bench, sample: int, report: Callable[[str], None]) -> dict[str, object]:
    middle, longest, horizon = PROMPTS[1], TOKENS[-1], HORIZONS[1]
    report("warming up")
    bench.point(PROMPTS[0], TOKENS[0], horizon)
    points: dict[tuple[int, int], Point] = {}
    settings = chain(((prompts, longest) for prompts in PROMPTS), ((middle, tokens) for tokens in TOKENS))
    for prompts, tokens in dict.fromkeys(settings):
        report(f"{prompts} prompts, {tokens} tokens, H = {horizon}")
        points[prompts, tokens] = bench.point(prompts, tokens, horizon)
    report("horizons")
    horizons = list(bench.horizons(middle, longest))
    report("tree against naive branching")
    naive = bench.naive(middle, longest, horizon, sample)
    return {
        "prompt_tokens": [one.length for one in bench.inputs],
        "threads": torch.get_num_threads(),
        "scheme": str(bench.policy.scheme),
        "base": asdict(points[middle, longest]),
        "prompts": [asdict(points[prompts, longest]) for prompts in PROMPTS],
        "tokens": [asdict(points[middle, tokens]) for tokens in TOKENS],
        "horizons": [asdict(point) for point in horizons],
        "branch": asdict(naive) | {"ratio": naive.ratio, "ratio_encoded": naive.ratio_encoded},
    }


def show(console: Console, result: dict[str, object]) -> None:
    base, naive = result["base"], result["branch"]
    console.print(
        f"{base['prompts']} prompts of {statistics.mean(result['prompt_tokens']):.0f} tokens, "
        f"{base['tokens']} response tokens, H = {base['horizon']}, {result['scheme']}, {result['threads']} threads: "
        f"{base['states']} states, {base['candidates']} candidates"
    )
    table = Table("phase", "seconds", *(f"{n} prompts" for n in PROMPTS), *(f"{n} tokens" for n in TOKENS), *(f"H = {n}" for n in HORIZONS))
    for phase in PHASES:
        sweeps = (growth(result[name], phase) for name in ("prompts", "tokens", "horizons"))
        table.add_row(phase, f"{base['seconds'][phase]:.2f}", *chain.from_iterable(sweeps))
    console.print(table)
    console.print("Growth is relative to the smallest setting; only Branch depends on H, and Encode on nothing but prompts.")
    console.print(
        f"Branch, per candidate: tree {naive['tree_ms']:.2f} ms; naive {naive['naive_ms']:.1f} ms, {naive['ratio']:.0f} times as "
        f"long; naive on the encoded prompt {naive['naive_encoded_ms']:.1f} ms, {naive['ratio_encoded']:.0f} times as long "
        f"({naive['sampled']} of {naive['candidates']} candidates sampled; largest difference of A_t {naive['largest_difference']:.1e})"
    )


def growth(points: Sequence[Mapping[str, dict[str, float]]], phase: str) -> list[str]:
    seconds = [point["seconds"].get(phase) for point in points]
    return ["" if value is None or seconds[0] is None else f"{value / seconds[0]:.2f}x" for value in seconds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number to FILE")
    parser.add_argument("--scheme", default="W4A8")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the median is taken (not of Calibrate)")
    parser.add_argument("--sample", type=int, default=12, help="candidates that are branched naively")
    arguments = parser.parse_args()
    console = Console()
    with console.status("making a model") as status:
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
