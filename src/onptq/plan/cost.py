"""How long each phase takes: operations and bytes from the shapes, divided by the rates measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from onptq.checkpoint.write import storage_format
from onptq.cycle.branch import ROW_TOKENS, TREE_TOKENS
from onptq.methods.layerwise import RESPONSE_TOKENS
from onptq.methods.search import RATIOS, SAMPLE_TOKENS, STRENGTHS
from onptq.plan.machine import Machine
from onptq.plan.memory import WIDE, Kept
from onptq.plan.parts import Shapes
from onptq.plan.work import Work
from onptq.schemes import Scheme

# Linears of a 7B decoder took 325.0 of the 447.4 ms of an eager forward over 16,384 tokens on an H200 (bf16).
LINEAR_SHARE = 0.73
DECIDE_PASSES = 30  # [states, V] float32: two log-softmaxes, two divergences, three argmaxes
INTEGER_RATE = 1.45  # of int8 products, beside those in 16 bits: 2.1 instead of 3.1 ms for gate_proj there
DENSE_OPERATIONS = 50  # started per block and forward
REPLAYED = 6e-6  # seconds of a small operation in a replayed graph, from Follow of a 7B model on an H200
# Per second, none of them probed: typical of one NVMe disk, measured on the host of an H200, and on one core of an EPYC.
WRITTEN_BYTES, REREAD_BYTES = 1.0e9, 7.0e9
HASHED_BYTES, PACKED_CODES, UNPACKED_CODES = 1.2e9, 2.0e8, 3.7e8
PROCESSED_PATCHES = 4.2e4  # of pictures that Pillow decodes and resizes and numpy cuts up, on one core; per second


@dataclass(frozen=True)
class Passes:
    """How often all of an operand is read or written, and how many operations a block starts in one forward."""

    rounding: float  # activations of a linear, in the compute dtype: abs, amax, divide, clamp, round, multiply
    live: float  # a weight under theta, as float32: smooth, abs, amax, divide, clamp, round, multiply
    backward: float  # the same weight
    offset: float  # its offset, as float32: read twice, its gradient written, sign, difference, clamp
    tried: float  # a weight rounded once more, and the error of its output, as float32
    dequantized: float  # codes to weights, in the compute dtype
    quantized_operations: int
    live_operations: int


PLAIN = Passes(10, 14, 36, 15, 16, 4, 120, 260)  # counted in the modules
KERNELS = Passes(3, 1.5, 2.5, 10, 2, 1.5, 47, 82)  # and in the kernels, which read weights and gradients in 16 bits


@dataclass(frozen=True)
class Cost:
    """Seconds by phase, all rounds together."""

    shapes: Shapes
    work: Work
    scheme: Scheme
    machine: Machine
    kept: Kept
    checkpoint_bytes: Sequence[int]  # of each shard
    output_bytes: int

    def phases(self) -> Mapping[str, float]:
        work = self.work
        phases = {"Load": self.load(), "Encode": self.encode(), "Initialize": self.initialize()}
        if work.recipe.rounds:
            phases |= {"Follow": self.follow(), "Compare": self.compare()}
            phases |= {"Branch": self.branch()} if work.candidates else {}
            phases |= {"Calibrate": self.calibrate()}
        return phases | {"Export": self.export(), "Verify": self.verify()}

    @property
    def compute(self) -> int:
        return self.machine.dtype.itemsize

    @property
    def passes(self) -> Passes:
        return KERNELS if self.machine.on_gpu else PLAIN

    def dense(
        self,
        tokens: int,
        forwards: int,
        keys: float,
        operations: int = DENSE_OPERATIONS,
        launch: float | None = None,
        integers: bool = False,
    ) -> float:
        """`tokens` in `forwards` calls through the decoder, each token seeing `keys` others on average."""
        shapes, machine = self.shapes, self.machine
        products = 2 * shapes.linears / (INTEGER_RATE if integers else 1)
        flops = tokens * (products + 4 * shapes.query * keys * shapes.layers)
        read = forwards * shapes.linears * (1 if integers else self.compute)
        started = forwards * shapes.layers * operations * (machine.launch if launch is None else launch)
        return max(flops / machine.flops, read / machine.bandwidth) / LINEAR_SHARE + started

    def decode(self, tokens: int, forwards: int, keys: float, quantized: bool) -> float:
        """A rollout's forwards, which a GPU replays without the host."""
        launch = REPLAYED if self.machine.on_gpu else None
        return (self.quantized if quantized else self.dense)(tokens, forwards, keys, launch=launch)

    def quantized(self, tokens: int, forwards: int, keys: float, launch: float | None = None) -> float:
        """The same for Q in a rollout: activations are rounded on the way, weights made where they are not kept."""
        moved, linears = self.rounded_activations(tokens), self.shapes.linears
        if self.kept.weights == "codes":
            moved += forwards * linears * self.compute * self.passes.dequantized
        if self.kept.weights == "nothing":
            moved += forwards * linears * WIDE * self.passes.live
        started = self.passes.quantized_operations
        integers = self.kept.weights == "integers"
        return self.dense(tokens, forwards, keys, started, launch, integers) + moved / self.machine.bandwidth

    def rounded_activations(self, tokens: int) -> float:
        if not self.scheme.quantizes_activations:
            return 0.0
        widths = 5 * self.shapes.hidden + self.shapes.query + self.shapes.ffn
        return tokens * widths * self.shapes.layers * self.compute * self.passes.rounding

    def head(self, states: int, passes: int) -> float:
        """Logits of `states`, and so many passes over them."""
        shapes, machine = self.shapes, self.machine
        flops = 2 * states * shapes.vocabulary * shapes.hidden
        return flops / machine.flops + states * shapes.vocabulary * WIDE * passes / machine.bandwidth

    def load(self) -> float:
        """Hashed first, by all cores, and then read once more."""
        whole = sum(self.checkpoint_bytes)
        hashed = whole / self.machine.cores / HASHED_BYTES
        return max(hashed, whole / self.machine.reading) + self.reread(whole)

    def reread(self, size: int) -> float:
        """What was read or written shortly before, and is still in memory if that holds it."""
        return size / (REREAD_BYTES if size < self.machine.host_free else self.machine.reading)

    def encode(self) -> float:
        """Processors and towers, once per prompt: every patch or frame meets every parameter."""
        units = self.work.every * self.work.media_tokens * self.shapes.patches
        towers = 2 * units * (self.shapes.vision + self.shapes.audio) / self.machine.flops / LINEAR_SHARE
        return towers + units / PROCESSED_PATCHES

    def initialize(self) -> float:
        work = self.work
        if work.recipe.init == "rtn" or not work.prompts:
            return self.folding()
        batches = ceil(work.prompts / max(1, work.batch_tokens // work.answered))
        rollouts = self.dense(work.prompts * work.prompt_tokens, batches, work.prompt_tokens / 2)
        rollouts += self.decode(work.prompts * RESPONSE_TOKENS, batches * RESPONSE_TOKENS, work.answered, False)
        searched = 0.0 if work.recipe.init == "signround" else self.search()
        return rollouts + searched + (self.signround() if work.start_rounds else 0.0)

    def search(self) -> float:
        work, shapes = self.work, self.shapes
        passes = self.dense(work.prompts * work.answered, work.prompts, work.answered / 2)
        tried = len(STRENGTHS) + 1 + len(RATIOS) + 1
        sampled = min(SAMPLE_TOKENS, work.prompts * work.answered)
        flops, moved = 2 * sampled * shapes.linears * tried, tried * shapes.linears * WIDE * self.passes.tried
        return passes + flops / self.machine.flops + moved / self.machine.bandwidth

    def signround(self) -> float:
        """Blocks one after the other, which together are the decoder: every block takes all of its steps and looks."""
        work, batches = self.work, self.work.start_batches
        every = work.prompts * work.answered
        learned = self.learning(work.start_steps * every // batches, work.start_steps, work.answered)
        learned += work.start_steps * self.shapes.linears * WIDE * self.passes.offset / self.machine.bandwidth
        looks = work.start_looks + 1  # the last of these is Q's stream going on to the next block
        judged = self.live(looks * every, looks * batches, work.answered)
        return learned + judged + self.dense(every, batches, work.answered / 2)

    def folding(self) -> float:
        return self.shapes.linears * WIDE * PLAIN.live / self.machine.bandwidth

    def follow(self) -> float:
        """Prefill and one forward per response token, batch by batch; held-out prompts before each round and at the end."""
        work = self.work
        once = self.folding() + self._rollouts(work.prompts, work.batches)
        held_out = self._rollouts(work.holdout, work.held_out_batches)
        return work.banks * once + (work.recipe.rounds + 1) * held_out

    def _rollouts(self, prompts: int, batches: int) -> float:
        work = self.work
        prefill = self.quantized(prompts * work.prompt_tokens, batches, work.prompt_tokens / 2)
        decode = self.decode(prompts * work.response_tokens, batches * work.response_tokens, work.length, True)
        return prefill + decode + self.head(prompts * work.response_tokens, 1)

    def compare(self) -> float:
        work = self.work
        runs = (
            (work.banks, work.prompts, work.batches),
            (work.recipe.rounds + 1, work.holdout, work.held_out_batches),
        )
        seconds = 0.0
        for times, prompts, batches in runs:
            tokens = prompts * work.response_tokens
            both = self.dense(tokens, batches, work.length) + self.quantized(tokens, batches, work.length)
            prefill = self.dense(prompts * work.prompt_tokens, batches, work.prompt_tokens / 2)
            seconds += times * (both + self.head(2 * tokens, DECIDE_PASSES // 2)) + prefill
        return seconds

    def branch(self) -> float:
        """Q takes horizon - 1 steps over all branches of a batch at once, D reads them in one forward."""
        work, horizon = self.work, self.work.recipe.branch.horizon
        share = max(1, min(TREE_TOKENS // work.rows, ROW_TOKENS) // (2 * horizon))
        forests = work.batches * ceil(work.candidates / max(1, work.prompts) / share)
        grown, read = 2 * work.candidates * (horizon - 1), 2 * work.candidates * horizon
        once = self.quantized(grown, forests * (horizon - 1), work.length + ROW_TOKENS)
        once += self.dense(read, forests, work.length + ROW_TOKENS)
        return work.banks * (once + self.head(grown, 1) + self.head(read, DECIDE_PASSES // 2))

    def calibrate(self) -> float:
        work, calibrate = self.work, self.work.recipe.calibrate
        length = work.length if work.decisions else work.prompt_tokens
        tokens = calibrate.epochs * work.prompts * length
        learned = self.learning(tokens, work.micro_batches, length)
        if work.recipe.settles and not self.scheme.group_size:
            learned -= (
                2 * tokens * self.shapes.linears / self.machine.flops
            )  # settled rows need no gradient of a weight
        if calibrate.checkpointing:
            learned += self.live(tokens, work.micro_batches, length)  # once more inside backward
        judged = self.live(work.judgements * work.micro_batch * work.length, work.judgements, work.length)
        targets = self.dense(work.every * length, work.every, length / 2)
        states = self.head(5 * calibrate.epochs * work.decisions, DECIDE_PASSES)
        return work.recipe.rounds * (learned + judged + targets + states)

    def learning(self, tokens: int, forwards: int, length: int) -> float:
        """A live forward and its backward."""
        backward = 2 * self.live(tokens, 0, length)  # the gradients of inputs and of weights are a product each
        moved = forwards * self.shapes.linears * WIDE * self.passes.backward
        return self.live(tokens, forwards, length) + backward + moved / self.machine.bandwidth

    def live(self, tokens: int, forwards: int, length: int) -> float:
        """A forward that is differentiable in theta: every weight is smoothed and rounded anew."""
        moved = self.rounded_activations(tokens) + forwards * self.shapes.linears * WIDE * self.passes.live
        return self.dense(tokens, forwards, length / 2, self.passes.live_operations) + moved / self.machine.bandwidth

    def export(self) -> float:
        packing = 0.0 if self.machine.on_gpu else self.packed / PACKED_CODES
        return packing + self.reread(sum(self.checkpoint_bytes)) + self.output_bytes / WRITTEN_BYTES

    def verify(self) -> float:
        forward = 2 * self.dense(2 * self.work.prompt_tokens, 2, self.work.prompt_tokens / 2)
        return self.reread(self.output_bytes) + self.packed / UNPACKED_CODES + forward

    @property
    def packed(self) -> int:
        return self.shapes.linears if storage_format(self.scheme) == "pack-quantized" else 0
