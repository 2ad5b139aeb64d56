"""SignRound: whether each weight rounds up or down, learned block by block by signed gradient descent.

AutoRound's recipe: an offset in [-1/2, 1/2] for every weight and a ratio for every scale, both moved by the sign of the gradient
of the block's output error, 8 prompts a step, rates falling linearly to zero. A block reads the output of the quantized blocks
before it; its target is its output in the dense model. It ends with the best of the evaluated iterates, so that on its own
prompts it is never worse than it began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from onptq import kernels
from onptq.bank import Trajectory
from onptq.methods.guards import not_finite
from onptq.methods.layerwise import Stream, answered_sequences
from onptq.methods.linears import dense_weight
from onptq.methods.resume import BlockStore, keep, restore
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import OFFSET_RANGE, Learned, Theta, ratio_range

STEPS = 200  # of each block
BATCH = 8  # prompts a step
EVALUATIONS = 3  # of the error over all prompts, by which the best iterate is chosen
INTERVALS = 10  # equal parts of the steps; one lies between two evaluations


def signround(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    init: Theta | None = None,
    steps: int = STEPS,
    settled: bool = False,
    store: BlockStore | None = None,
) -> Theta:
    """SignRound's theta on the prompts and responses, the dense model's own greedy ones by default."""
    sequences = answered_sequences(policy, prompts, responses)
    return signround_on(policy, sequences, advance, init=init, steps=steps, settled=settled, store=store)


@torch.no_grad()
def signround_on(
    policy: Policy,
    sequences: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    init: Theta | None = None,
    steps: int = STEPS,
    settled: bool = False,
    store: BlockStore | None = None,
) -> Theta:
    """SignRound's theta on whole sequences.

    `init` gives smoothing and ratios; by default nothing is smoothed and the range is full. `settled` gives codes instead of
    offsets, a quarter of the bytes.
    """
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device) if init is None else init.freed()
    if not policy.scheme.quantizes_weights:
        return theta
    dense, quantized = (_streams(policy, sequences) for _ in "DQ")
    with policy.lent():
        policy.attach(theta)
        for block in policy.gathered_blocks():
            with policy.speaking("D"):
                for stream, led in zip(dense, quantized, strict=True):
                    led.led(stream, block)
            with policy.speaking("Q"):
                if not restore(store, theta, block):
                    targets = [stream.hidden for stream in dense]
                    schemes = {path: policy.scheme.of(path) for path in map(block.path, block.linears)}
                    bounds = {path: ratio_range(one) for path, one in schemes.items() if one.quantizes_weights}
                    if bounds:
                        _Learner(theta, block, quantized, targets, bounds).learn(steps)
                    if settled:
                        policy.settle_block(theta, block)
                    keep(store, theta, block)
                    advance(1)
                for stream in quantized:
                    stream.advance(block)
    return theta


def _streams(policy: Policy, sequences: Sequence[EncodedPrompt]) -> list[Stream]:
    """Streams of sequences of similar length, so that little of a batch is padding."""
    ordered = sorted(sequences, key=lambda one: one.length)
    return [Stream(policy, ordered[first : first + BATCH]) for first in range(0, len(ordered), BATCH)]


def evaluated_steps(steps: int) -> list[int]:
    """The steps after which the error over all prompts is evaluated: the last, and others before it, when rates are small."""
    return list(range(steps, 0, -max(1, steps // INTERVALS)))[:EVALUATIONS]


class _Learner:
    """Signed gradient descent on one block's part of theta, in place."""

    def __init__(
        self,
        theta: Theta,
        block: Block,
        streams: Sequence[Stream],
        targets: Sequence[Tensor],
        bounds: Mapping[str, tuple[float, float]],
    ) -> None:
        self.theta, self.streams, self.targets, self.block = theta, streams, targets, block
        self.names = [name for name in block.linears if block.path(name) in bounds]  # those whose weights are rounded
        self.paths = [block.path(name) for name in self.names]
        self.ranges = (*(OFFSET_RANGE for _ in self.paths), *(bounds[path] for path in self.paths))
        self.tokens = sum(int(stream.real.sum()) for stream in streams)
        self.least, self.best = math.inf, Theta()

    def learn(self, steps: int) -> None:
        self._consider(0)
        linears = []
        for name, path in zip(self.names, self.paths, strict=True):
            weight, ratio = dense_weight(self.block, name), self.theta.linears[path].ratio
            linears.append(Learned(ratio.clone(), torch.zeros(weight.shape, device=weight.device)))
        self.theta.linears.update(zip(self.paths, linears, strict=True))
        learned = [linear.offset for linear in linears] + [linear.ratio for linear in linears]
        evaluated = evaluated_steps(steps)
        order = torch.Generator().manual_seed(self.block.index)
        for step in range(steps):
            if step % len(self.streams) == 0:
                queue = torch.randperm(len(self.streams), generator=order).tolist()
            self._descend(learned, queue.pop(), (1 - step / steps) / steps)
            if step + 1 in evaluated:
                self._consider(step + 1)
        self.theta.linears.update(self.best.linears)

    def _descend(self, learned: Sequence[Tensor], index: int, rate: float) -> None:
        for parameter in learned:
            parameter.requires_grad_()
        with torch.enable_grad():
            gradients = torch.autograd.grad(self._error(index), learned, allow_unused=True)
        for parameter, gradient, bounds in zip(learned, gradients, self.ranges, strict=True):
            parameter.requires_grad_(False)
            if gradient is not None:  # of an expert without tokens
                signed_step(parameter, gradient, rate, *bounds)

    def _consider(self, step: int) -> None:
        """Remember the block's part of theta if its error over all prompts is the least so far."""
        errors = torch.stack([self._error(index) for index in range(len(self.streams))])
        for stream, each in zip(self.streams, errors.isfinite().tolist(), strict=True):
            if not each:
                raise not_finite(f"errors of layers.{self.block.index} after step {step}", stream.sequences)
        error = float(errors.double().sum()) / self.tokens
        if error < self.least:
            self.least = error
            self.best = Theta(linears={path: self.theta.linears[path] for path in self.paths}).clone()

    def _error(self, index: int) -> Tensor:
        stream = self.streams[index]
        difference = stream.run(self.block).float() - self.targets[index].float()
        return (difference.square() * stream.real[..., None]).sum()  # indexing by `real` would wait for the GPU


def signed_step(parameter: Tensor, gradient: Tensor, rate: float, low: float, high: float) -> None:
    """Move the parameter against the gradient's sign, in place, within its bounds."""
    if kernels.fit(parameter, gradient, dtypes={torch.float32}):
        from onptq.kernels import descent

        descent.signed_step(parameter, gradient.contiguous(), rate, low, high)
    else:
        parameter.sub_(gradient.sign(), alpha=rate).clamp_(low, high)
