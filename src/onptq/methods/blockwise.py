"""Learned weight clipping and learned smoothing, one block at a time, by the error of the block's output.

OmniQuant's recipe: a block reads what the quantized blocks before it emit and is to emit what it does in the dense model; AdamW,
one prompt a step; a clip of sigmoid(c) per row or group from c = 4, and the scales themselves (not their logarithms) of
norm -> qkv, norm -> gate/up and v -> o from SmoothQuant's; down_proj is not smoothed. A block begins with the better of smoothed
and unsmoothed and ends with the best iterate, so that on its own prompts it is never worse than plain rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from onptq.bank import Trajectory
from onptq.methods.guards import require_finite_error
from onptq.methods.layerwise import Stream, answered_sequences
from onptq.methods.linears import by_query_head
from onptq.methods.resume import BlockStore, keep, restore
from onptq.methods.smoothquant import ALPHA, migrated, weight_maxima
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Free, Theta, pair_key

SMOOTHED = ("norm_qkv", "norm_gate_up", "v_o")
STEPS = 1280  # of each block: the authors' 10 epochs of 128 prompts
EVALUATIONS = 10  # of the error over all prompts, by which the best iterate is chosen
LR_CLIP = 1e-2
LR_SCALE = 5e-3
CLIP_LOGIT = 4.0
SCALE_FLOOR = 1e-2


@torch.no_grad()
def blockwise(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    steps: int = STEPS,
    store: BlockStore | None = None,
) -> Theta:
    """OmniQuant's theta on the prompts and responses, the dense model's own greedy ones by default."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    sequences = answered_sequences(policy, prompts, responses)
    dense, quantized = ([Stream(policy, [sequence]) for sequence in sequences] for _ in "DQ")
    with policy.lent():
        policy.attach(theta)
        for block in policy.gathered_blocks():
            restored = restore(store, theta, block)
            with policy.speaking("D"):
                migration = {} if restored else _migration(dense, block)
                for stream in dense:
                    stream.advance(block)
            with policy.speaking("Q"):
                if not restored:
                    _Learner(theta, block, quantized, [stream.hidden for stream in dense]).learn(migration, steps)
                    keep(store, theta, block)
                    advance(1)
                for stream in quantized:
                    stream.advance(block)
    return theta


def _migration(streams: Sequence[Stream], block: Block) -> dict[str, Tensor]:
    """SmoothQuant's log s of the inputs of the block's linears, by pair key."""
    largest: dict[str, Tensor] = {}
    for stream in streams:
        inputs = stream.inputs(block)
        for pair in (pair for pair in SMOOTHED if pair in block.producers):
            x_max = inputs[pair].abs().flatten(0, -2).amax(0).float()
            largest[pair] = torch.maximum(largest[pair], x_max) if pair in largest else x_max
    return {
        pair_key(block, pair): migrated(by_query_head(x_max, block, pair).amax(0), weight_maxima(block, pair), ALPHA)
        for pair, x_max in largest.items()
    }


class _Learner:
    """AdamW on one block's part of theta, in place."""

    def __init__(self, theta: Theta, block: Block, streams: Sequence[Stream], targets: Sequence[Tensor]) -> None:
        self.theta, self.block, self.streams, self.targets = theta, block, streams, targets
        self.best: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}  # smoothing, ratio
        self.least = math.inf

    def learn(self, migration: dict[str, Tensor], steps: int) -> None:
        self._consider(migration, 0)
        self.theta.smoothing.update(migration)
        self._consider(migration, 0)
        unit = max(self.least, torch.finfo(torch.float32).tiny)
        scales = {key: u.exp().requires_grad_() for key, u in self.best[0].items()}
        clips = {path: torch.full_like(ratio, CLIP_LOGIT).requires_grad_() for path, ratio in self.best[1].items()}
        rates = ((scales, LR_SCALE), (clips, LR_CLIP))
        optimizer = torch.optim.AdamW(
            [{"params": [*part.values()], "lr": rate} for part, rate in rates], weight_decay=0.0
        )
        for step in range(steps):
            with torch.enable_grad():
                self._place(scales, clips)
                loss = self._error(step % len(self.targets)) / unit  # of order one: Adam's epsilon must not matter
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            for scale in scales.values():
                scale.clamp_(min=SCALE_FLOOR)
            if (step + 1) % max(1, steps // EVALUATIONS) == 0 or step + 1 == steps:
                self._place(scales, clips)
                self._consider(scales, step + 1)
        self.theta.smoothing.update(self.best[0])
        self.theta.linears.update({path: Free(ratio) for path, ratio in self.best[1].items()})

    def _place(self, scales: dict[str, Tensor], clips: dict[str, Tensor]) -> None:
        self.theta.smoothing.update({key: scale.log() for key, scale in scales.items()})
        self.theta.linears.update({path: Free(F.logsigmoid(clip)) for path, clip in clips.items()})

    def _consider(self, smoothed: Iterable[str], step: int) -> None:
        """Remember the block's part of theta if its error over all prompts is the least so far."""
        error = sum(float(self._error(index)) for index in range(len(self.targets))) / len(self.targets)
        require_finite_error(error, f"layers.{self.block.index}", step)
        if error < self.least:
            paths = map(self.block.path, self.block.linears)
            self.best = (
                {key: self.theta.smoothing[key] for key in smoothed},
                {path: self.theta.linears[path].ratio for path in paths},
            )
            self.least = error

    def _error(self, index: int) -> Tensor:
        return F.mse_loss(self.streams[index].run(self.block).float(), self.targets[index].float())
