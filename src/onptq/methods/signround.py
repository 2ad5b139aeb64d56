"""SignRound: whether each weight rounds up or down, learned block by block by signed gradient descent.

AutoRound's recipe: an offset in [-1/2, 1/2] for every weight and a ratio for every step, both moved by the sign of the gradient
of the block's output error, 8 prompts a step, rates falling linearly to nothing. A block reads what the quantized blocks before
it emit, is to emit what it does in the dense model, and keeps the best it had: on its own prompts it is never worse than its
start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onptq import kernels
from onptq.bank import Trajectory
from onptq.methods.layerwise import Stream, answer_prompts
from onptq.methods.linears import dense_weight
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import LINEARS, Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import OFFSET_RANGE, RATIO_RANGE, Learned, Theta

STEPS = 200  # of each block
BATCH = 8  # prompts a step
APART = 10  # parts of the steps; between two looks lies one
LOOKS = 3  # how often the error over all prompts is taken, to keep the best


@torch.no_grad()
def signround(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    start: Theta | None = None,
    steps: int = STEPS,
    settled: bool = False,
) -> Theta:
    """Responses are the dense model's own greedy ones unless they are given. `start` gives smoothing and step ratios; by default
    there is no smoothing, and the range is full. `settled` leaves codes instead of offsets, a quarter of the bytes."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device) if start is None else start.freed()
    if not policy.scheme.quantizes_weights:
        return theta
    sequences = [one.sequence for one in answer_prompts(policy, prompts, responses)]
    dense, quantized = (_streams(policy, sequences) for _ in "DQ")
    with policy.lent():
        policy.attach(theta)
        for block in policy.structure.blocks:
            with policy.speaking("D"):
                for stream in dense:
                    stream.advance(block)
            with policy.speaking("Q"):
                _Learner(theta, block, quantized, [stream.hidden for stream in dense]).learn(steps)
                if settled:
                    policy.settle_block(theta, block)
                for stream in quantized:
                    stream.advance(block)
            advance(1)
    return theta


def _streams(policy: Policy, sequences: Sequence[EncodedPrompt]) -> list[Stream]:
    """Those of like length go together, so that little of a batch is padding."""
    ordered = sorted(sequences, key=lambda one: one.length)
    return [Stream(policy, ordered[first : first + BATCH]) for first in range(0, len(ordered), BATCH)]


def looks(steps: int) -> list[int]:
    """The steps after which a block looks at its error over all prompts: the last and others before it, when rates are small."""
    return list(range(steps, 0, -max(1, steps // APART)))[:LOOKS]


class _Learner:
    """Works on one block's share of theta, in place."""

    def __init__(self, theta: Theta, block: Block, streams: Sequence[Stream], targets: Sequence[Tensor]) -> None:
        self.theta, self.streams, self.targets, self.block = theta, streams, targets, block
        self.paths = [block.path(name) for name in LINEARS]
        self.tokens = sum(int(stream.real.sum()) for stream in streams)
        self.least, self.best = math.inf, Theta()

    def learn(self, steps: int) -> None:
        self._consider()
        linears = []
        for name, path in zip(LINEARS, self.paths, strict=True):
            weight, ratio = dense_weight(self.block, name), self.theta.linears[path].ratio
            linears.append(Learned(ratio.clone(), torch.zeros(weight.shape, device=weight.device)))
        self.theta.linears.update(zip(self.paths, linears, strict=True))
        learned = [linear.offset for linear in linears] + [linear.ratio for linear in linears]
        considered = looks(steps)
        order = torch.Generator().manual_seed(self.block.index)
        for step in range(steps):
            if step % len(self.streams) == 0:
                queue = torch.randperm(len(self.streams), generator=order).tolist()
            self._descend(learned, queue.pop(), (1 - step / steps) / steps)
            if step + 1 in considered:
                self._consider()
        self.theta.linears.update(self.best.linears)

    def _descend(self, learned: Sequence[Tensor], index: int, rate: float) -> None:
        for parameter in learned:
            parameter.requires_grad_()
        with torch.enable_grad():
            gradients = torch.autograd.grad(self._error(index), learned)
        ranges = (OFFSET_RANGE,) * len(self.paths) + (RATIO_RANGE,) * len(self.paths)
        for parameter, gradient, bounds in zip(learned, gradients, ranges, strict=True):
            signed_step(parameter.requires_grad_(False), gradient, rate, *bounds)

    def _consider(self) -> None:
        """Keep the block's share of theta if no other had a smaller error over all prompts."""
        errors = torch.stack([self._error(index) for index in range(len(self.streams))])
        error = float(errors.double().sum()) / self.tokens
        if error < self.least:
            self.least = error
            self.best = Theta(linears={path: self.theta.linears[path] for path in self.paths}).clone()

    def _error(self, index: int) -> Tensor:
        stream = self.streams[index]
        difference = stream.run(self.block).float() - self.targets[index].float()
        return (difference.square() * stream.real[..., None]).sum()  # choosing the real ones would wait for the GPU


def signed_step(parameter: Tensor, gradient: Tensor, rate: float, low: float, high: float) -> None:
    """The parameter moves against the gradient's sign, in place, and stays between its bounds."""
    if kernels.fit(parameter, gradient, dtypes={torch.float32}):
        from onptq.kernels import descent

        descent.signed_step(parameter, gradient.contiguous(), rate, low, high)
    else:
        parameter.sub_(gradient.sign(), alpha=rate).clamp_(low, high)
