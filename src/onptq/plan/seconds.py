"""Seconds of each phase: the tokens and forwards of a recipe at the rates of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from onptq.checkpoint.packing import storage_format
from onptq.cycle.branch import ROW_TOKENS
from onptq.engine.budget import Held
from onptq.methods.layerwise import RESPONSE_TOKENS
from onptq.methods.search import RATIOS, SAMPLE_TOKENS, STRENGTHS
from onptq.models.sharding import Layout
from onptq.models.structure import LINEARS
from onptq.plan.machine import Gpu
from onptq.plan.parts import Shapes
from onptq.plan.work import Work
from onptq.schemes import Scheme

# On an H200: the share of the data sheet's rate that eager forwards of a 7B decoder reach, and the seconds that the
# host takes to start the kernels of a block and that a graph takes to replay them.
SHARE_OF_PEAK, STARTED, REPLAYED = 0.5, 1e-3, 3e-4
WEIGHT_PASSES = 3  # over a 16-bit weight that is read, rounded by a kernel and multiplied
LOGIT_PASSES = 15  # over float32 logits: softmax, divergence, argmax
HOST_BYTES, SHARE_OF_LINK = (
    25e9,
    0.5,
)  # assumed: a second from a host to a GPU, and of the data sheet's rate between GPUs
LEARNING = 3  # GEMMs of a forward and its backward for each of the forward: gradients of inputs and of weights
# Per second, typical of one NVMe disk and of one core.
READ_BYTES, WRITTEN_BYTES, PACKED_CODES, PROCESSED_PATCHES = 4e9, 1e9, 3e8, 4e4


@dataclass(frozen=True)
class Pace:
    """Seconds that one block takes for a forward, whatever its tokens, and for each token."""

    forward: float
    token: float

    def __mul__(self, times: float) -> Pace:
        return self.scaled(times, times)

    def scaled(self, forward: float, token: float) -> Pace:
        return Pace(forward * self.forward, token * self.token)


@dataclass(frozen=True)
class Rates:
    """Paces of a device for a block of the model, and for its head."""

    dense: Pace  # D
    quantized: Pace  # Q, frozen
    decoding: Pace  # Q, one token of every row at a time
    rounding: Pace  # Q whose weights theta rounds anew: forward and backward
    learning: Pace  # Q as Calibrate learns it: the same, or settled codes under theta's scales
    state: float  # the logits of one state and a divergence of them
    slowdown: float = (
        1.0  # of the run's threads beside a single undisturbed one; above 1 other processes hold the cores
    )


def gathering(gpu: Gpu, shapes: Shapes, layout: Layout, gpus: int, settled: bool) -> float:
    """Seconds until a block is whole on a GPU, with its settled codes: what the others have of it, and their parts from their
    hosts."""
    block = (2 + settled) * shapes.block
    received = 0.0 if layout == "whole" else block * (1 - 1 / gpus) / (SHARE_OF_LINK * gpu.link * 1e9)
    return received + (block / gpus / HOST_BYTES if layout == "offloaded" else 0.0)


def datasheet_rates(
    gpu: Gpu, shapes: Shapes, keep: Held, layout: Layout = "whole", gpus: int = 1, settled: bool = False
) -> Rates:
    """The rates of a GPU that is not here, in 16 bits. `keep` says what is held of Q's weights."""
    flops, bandwidth = SHARE_OF_PEAK * gpu.bf16 * 1e12, gpu.bandwidth * 1e9
    read = 2 * shapes.block / bandwidth
    gathered = gathering(gpu, shapes, layout, gpus, settled)
    routed = shapes.active < shapes.block
    started = STARTED * (shapes.modules / len(LINEARS) if routed else 1)  # experts one after another
    replayed = started if routed or layout != "whole" else REPLAYED  # which experts is not known in advance
    dense = Pace(started + read + gathered, 2 * shapes.active / flops)
    token = dense.token * (gpu.bf16 / gpu.int8 if keep == "integers" else 1)
    weights = read if keep in ("integers", "floats") else WEIGHT_PASSES * read
    rounding = Pace(started + WEIGHT_PASSES * read, dense.token) * LEARNING  # of a block that is whole already
    learning = Pace(rounding.forward + 2 * gathered, rounding.token)
    weights += gathered
    state = shapes.vocabulary * (2 * shapes.hidden / flops + LOGIT_PASSES * 4 / bandwidth)
    return Rates(dense, Pace(started + weights, token), Pace(replayed + weights, token), rounding, learning, state)


@dataclass(frozen=True)
class Seconds:
    """Seconds by phase, all rounds together."""

    shapes: Shapes
    work: Work
    scheme: Scheme
    rates: Rates
    read_bytes: int  # of the checkpoint
    written_bytes: int
    on_gpu: bool

    def phases(self) -> Mapping[str, float]:
        """The seconds of every phase that the recipe has, in the order of the run."""
        phases: dict[str, Callable[[], float]] = {
            "Load": lambda: 2 * self.read_bytes / READ_BYTES,  # to hash, then to load
            "Encode": self.encode,
            "Initialize": self.initialize,
            "Follow": self.follow,
            "Compare": self.compare,
            "Branch": self.branch,
            "Calibrate": self.calibrate,
            "Export": lambda: self.written_bytes / WRITTEN_BYTES + (0.0 if self.on_gpu else self.packing()),
            "Verify": lambda: self.written_bytes / READ_BYTES + self.packing(),
        }
        return {name: phases[name]() for name in self.work.phases}

    def decoder(self, pace: Pace, tokens: float, forwards: float) -> float:
        """`tokens` in `forwards` calls through all blocks."""
        return self.shapes.layers * (forwards * pace.forward + tokens * pace.token)

    def packing(self) -> float:
        """All codes, packed or unpacked on the host."""
        return self.shapes.linears / PACKED_CODES if storage_format(self.scheme) == "pack-quantized" else 0.0

    def encode(self) -> float:
        """Processor and towers: every patch or frame meets every parameter of a tower once."""
        units = self.work.every * self.work.media_tokens * self.shapes.patches
        towers = units * (self.shapes.vision + self.shapes.audio) / self.shapes.block
        return towers * self.rates.dense.token + units / PROCESSED_PATCHES

    def initialize(self) -> float:
        work, rates, every = self.work, self.rates, self.work.init_prompts * self.work.answered
        if work.recipe.init == "rtn":
            return self.decoder(rates.rounding, 0, 1 / LEARNING)
        batches = ceil(every / work.recipe.compute.batch_tokens)
        seconds = self.decoder(rates.dense, work.init_prompts * work.prompt_tokens, batches)
        seconds += self.decoder(rates.decoding, work.init_prompts * RESPONSE_TOKENS, batches * RESPONSE_TOKENS)
        if work.recipe.init != "signround":
            tried = len(STRENGTHS) + len(RATIOS) + 2
            seconds += self.decoder(rates.dense, every, work.init_prompts)
            seconds += self.decoder(rates.rounding, tried * min(SAMPLE_TOKENS, every), tried) / LEARNING
        if work.start_rounds:
            steps, passes = (
                work.start_steps,
                work.start_evaluations + 2,
            )  # hidden states of D and of Q for the next block
            seconds += self.decoder(rates.rounding, steps * work.start_rows * work.answered, steps)
            seconds += (
                self.decoder(rates.rounding, passes * every, passes * work.init_prompts / work.start_rows) / LEARNING
            )
        return seconds

    def _everybody(self, once: Callable[[float, float], float]) -> float:
        """`once(prompts, batches)`: calibration prompts in every round, held-out ones whenever they are followed."""
        work = self.work
        return work.banks * once(*self._own(work.followed)) + work.held_out_passes * once(*self._own(work.holdout))

    def _own(self, prompts: int) -> tuple[float, float]:
        """Prompts and batches of the busiest process."""
        batches = self.work.batches(prompts)
        share = self.work.share(batches)
        return share * prompts, share * batches

    def follow(self) -> float:
        work, rates = self.work, self.rates

        def once(prompts: float, batches: float) -> float:
            tokens = prompts * work.response_tokens
            prefill = self.decoder(rates.quantized, prompts * work.prompt_tokens, batches)
            decoded = self.decoder(rates.decoding, tokens, batches * work.response_tokens)
            return prefill + decoded + tokens * rates.state / 2

        return self._everybody(once) + work.banks * self.decoder(rates.rounding, 0, 1 / LEARNING)

    def compare(self) -> float:
        """D and Q over the responses; D reads the prompts too, once."""
        work, rates = self.work, self.rates

        def once(prompts: float, batches: float) -> float:
            tokens = prompts * work.response_tokens
            both = (self.decoder(pace, tokens, batches) for pace in (rates.dense, rates.quantized))
            return sum(both) + 2 * tokens * rates.state

        prompts, batches = self._own(work.every)
        prefill = self.decoder(rates.dense, prompts * work.prompt_tokens, batches)
        return self._everybody(once) + prefill

    def branch(self) -> float:
        """Q takes horizon - 1 steps over all branches of a batch at once; D reads them in one forward.

        Where blocks carry states, both follow the responses token by token, and the branches of each token are run by
        themselves."""
        work, rates, horizon = self.work, self.rates, self.work.recipe.branch.horizon
        grown, read = 2 * work.candidates * (horizon - 1), 2 * work.candidates * horizon
        batches = work.batches(work.followed)
        trees = ceil(read / (work.rows * ROW_TOKENS)) + batches
        if self.shapes.recurrent:
            steps, fed = batches * work.response_tokens, work.followed * work.response_tokens
            seconds = self.decoder(rates.decoding, 2 * fed + grown, steps * (horizon + 1))
            seconds += self.decoder(rates.dense, read, steps)
        else:
            seconds = self.decoder(rates.quantized, grown, trees * (horizon - 1))
            seconds += self.decoder(rates.dense, read, trees)
        return work.banks * work.share(batches) * (seconds + (grown / 2 + read) * rates.state)

    def calibrate(self) -> float:
        """Updates, which run every block once more where they checkpoint; evaluations; D's hidden states as targets."""
        work, rates, calibrate = self.work, self.rates, self.work.recipe.calibrate
        length = work.length if work.decisions else work.prompt_tokens
        read = calibrate.epochs * work.followed
        updates = self.decoder(rates.learning, read * length, read / work.micro_batch)
        evaluations = self.decoder(rates.learning, work.judged * work.length, work.judged / work.micro_batch) / LEARNING
        updates = updates * (1 + calibrate.checkpointing / LEARNING)
        updates += 2 * LEARNING * calibrate.epochs * work.decisions * rates.state
        held_out = work.dealt(work.holdout)
        sequences = work.target_share * work.followed + held_out * work.holdout
        seconds = work.dealt(work.batch) * updates + held_out * evaluations
        return work.recipe.rounds * (seconds + self.decoder(rates.dense, sequences * length, sequences))
