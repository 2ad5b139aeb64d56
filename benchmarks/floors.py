"""Floors of a run: the operations and bytes that every phase needs in any implementation, and this device's two rates.

Each input is read once and each output written once, in the compute dtype; all prompts are one batch; nothing is
computed twice (no recomputation in backward). A phase cannot be faster than the larger of operations over the matrix
rate and bytes over the bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from onptq.methods.layerwise import RESPONSE_TOKENS
from onptq.methods.search import RATIOS, SAMPLE_TOKENS, STRENGTHS
from onptq.plan.parts import Shapes
from onptq.plan.work import Work

BACKWARD = 2  # GEMMs for each of the forward: gradients of inputs and of weights, which theta needs


@dataclass(frozen=True)
class Floor:
    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Floor) -> Floor:
        return Floor(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Floor:
        return Floor(self.flops * times, self.bytes * times)


@dataclass(frozen=True)
class Counts:
    """Measured numbers of a run: lengths averaged over its prompts, states and candidates averaged over its rounds."""

    prompt_tokens: float
    media_tokens: float
    response_tokens: float
    candidates: float


@dataclass(frozen=True)
class Rates:
    flops: float  # per second, of a large GEMM of random matrices
    bandwidth: float  # bytes per second, read and written by a large copy


@dataclass(frozen=True)
class Floors:
    shapes: Shapes
    work: Work
    counts: Counts
    compute: int  # bytes of a number
    written: int  # bytes of the checkpoint

    def phases(self) -> Mapping[str, Floor]:
        cycle = {"Follow": self.follow(), "Compare": self.compare(), "Branch": self.branch()}
        return {
            "Load": Floor(bytes=self.shapes.loaded * self.compute),
            "Encode": self.encode(),
            "Initialize": self.initialize(),
            **(cycle | {"Calibrate": self.calibrate()} if self.work.recipe.rounds else {}),
            "Export": Floor(bytes=self.shapes.linears * self.compute + self.written),
        }

    def tokens(self) -> Mapping[str, float]:
        """The tokens of tokens per second: encoded, answered, generated, compared, read by D in branches, trained
        on."""
        work, counts = self.work, self.counts
        written = counts.response_tokens * (work.banks * work.prompts + self._evaluations * work.holdout)
        return {
            "Encode": work.every * counts.prompt_tokens,
            "Initialize": work.prompts * (counts.prompt_tokens + RESPONSE_TOKENS),
            "Follow": written,
            "Compare": written,
            "Branch": work.banks * counts.candidates * 2 * work.recipe.branch.horizon,
            "Calibrate": work.recipe.rounds * work.recipe.calibrate.epochs * work.prompts * self._length,
        }

    @property
    def _length(self) -> float:
        return self.counts.prompt_tokens + self.counts.response_tokens

    @property
    def _evaluations(self) -> int:
        """Times that held-out prompts are followed and compared: before every round and at the end."""
        return self.work.recipe.rounds + 1

    def decoder(self, tokens: float, forwards: float, keys: float) -> Floor:
        """`tokens` in `forwards` reads of the weights, each token seeing `keys` others; of experts those of one token."""
        shapes = self.shapes
        met = shapes.linears * shapes.active / shapes.block
        flops = tokens * (2 * met + 4 * shapes.query * keys * shapes.layers)
        return Floor(flops, forwards * met * self.compute)

    def head(self, states: float, forwards: float = 1) -> Floor:
        size = self.shapes.vocabulary * self.shapes.hidden
        return Floor(2 * states * size, forwards * size * self.compute)

    def prefill(self, prompts: float) -> Floor:
        tokens = self.counts.prompt_tokens
        return self.decoder(prompts * tokens, 1, tokens / 2)

    def decode(self, prompts: float, steps: float) -> Floor:
        """One token of every prompt at a time, each reading the keys and values of all before it."""
        shapes, length = self.shapes, self.counts.prompt_tokens + steps / 2
        cached = prompts * steps * length * 2 * shapes.layers * shapes.kv * self.compute
        return self.decoder(prompts * steps, steps, length) + self.head(prompts * steps, steps) + Floor(bytes=cached)

    def encode(self) -> Floor:
        towers = self.shapes.vision + self.shapes.audio
        units = self.work.every * self.counts.media_tokens * self.shapes.patches
        return Floor(2 * units * towers, towers * self.compute)

    def initialize(self) -> Floor:
        work, shapes = self.work, self.shapes
        if work.recipe.init == "rtn" or not work.prompts:
            return Floor(bytes=2 * shapes.linears * self.compute)
        answered = self.counts.prompt_tokens + RESPONSE_TOKENS
        every = self.decoder(work.prompts * answered, 1, answered / 2)
        total = self.prefill(work.prompts) + self.decode(work.prompts, RESPONSE_TOKENS) + every
        if work.recipe.init != "signround":
            tried = len(STRENGTHS) + 1 + len(RATIOS) + 1
            sampled = min(SAMPLE_TOKENS, work.prompts * answered)
            total += self.decoder(sampled, 1, 0) * tried
        if work.start_rounds:
            steps = self.decoder(work.start_rows * answered, 1, answered / 2) * work.start_steps
            total += Floor(steps.flops * (1 + BACKWARD), steps.bytes * 2) + every * (work.start_evaluations + 1)
        return total

    def follow(self) -> Floor:
        steps = self.counts.response_tokens
        once = self.prefill(self.work.prompts) + self.decode(self.work.prompts, steps)
        held_out = self.prefill(self.work.holdout) + self.decode(self.work.holdout, steps)
        return once * self.work.banks + held_out * (self._evaluations if self.work.holdout else 0)

    def compare(self) -> Floor:
        """D and Q over the responses. The prompts are cached: by Q since Follow, by D since its first time."""
        work = self.work
        total = self.prefill(work.prompts) + self.prefill(work.holdout) * bool(work.holdout)
        for times, prompts in ((work.banks, work.prompts), (self._evaluations if work.holdout else 0, work.holdout)):
            states = prompts * self.counts.response_tokens
            total += (self.decoder(states, 1, self._length) + self.head(states)) * (2 * times)
        return total

    def branch(self) -> Floor:
        candidates, horizon = self.counts.candidates, self.work.recipe.branch.horizon
        if not candidates:
            return Floor()
        grown, read = 2 * candidates * (horizon - 1), 2 * candidates * horizon
        once = self.decoder(grown, horizon - 1, self._length) + self.head(grown, horizon - 1)
        return (once + self.decoder(read, 1, self._length) + self.head(read)) * self.work.banks

    def calibrate(self) -> Floor:
        work, calibrate, length = self.work, self.work.recipe.calibrate, self._length
        steps = calibrate.epochs * -(-work.prompts // calibrate.batch)
        forward = self.decoder(calibrate.epochs * work.prompts * length, steps, length / 2)
        states = self.head(calibrate.epochs * work.decisions, steps)
        learned = Floor((forward.flops + states.flops) * (1 + BACKWARD), (forward.bytes + states.bytes) * 2)
        judged = calibrate.evaluations + 1 if calibrate.keep == "best" and work.holdout else 0
        held_out = self.decoder(work.holdout * length, 1, length / 2) * judged
        targets = self.decoder(work.every * length, 1, length / 2)
        return (learned + held_out + targets) * work.recipe.rounds


def measure_rates(device: torch.device, dtype: torch.dtype, width: int, copied: int) -> Rates:
    """Medians over GEMMs of `width` x `width` random matrices and over copies of `copied` bytes."""
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    source = torch.randint(-128, 128, (copied,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    product = median_seconds(lambda: torch.mm(left, right, out=out), device)
    copy = median_seconds(lambda: target.copy_(source), device)
    return Rates(2 * width**3 / product, 2 * copied / copy)


def median_seconds(operation: Callable[[], object], device: torch.device, repeats: int = 9) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        operation()
    seconds = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        operation()
        wait()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
