"""MASQuant, merged: one smoothing vector for all modalities, trained block by block; it folds.

Training begins with SmoothQuant's scales, alpha 0.5, and minimizes the error of the block's output: AdamW on the scales (not on
their logarithms), one prompt a step, two epochs. The quantized block reads the output of the quantized blocks before it; its
target is the dense block's output in the dense model. The error is absolute, and an image's tokens count half. down_proj is
never smoothed, rows have their full range, and prompts are used without responses.

The scales of the modalities differ only in their largest inputs, so merged, as the largest of them, they are SmoothQuant's. They
fold into the norms, and v -> o into one scale per KV channel (the original scales o_proj's input when it runs). The original's
full form, with scales per modality and low-rank branches beside the linears, changes the graph and folds into no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onptq.methods.guards import require_finite_error
from onptq.methods.layerwise import Stream, observing
from onptq.methods.linears import by_query_head, quantized_linears, replaced
from onptq.methods.resume import BlockStore, keep, restore
from onptq.methods.smoothquant import ALPHA, FLOOR, weight_maxima
from onptq.models.encoding import EncodedPrompt
from onptq.models.family import AUDIO, IMAGE, TEXT
from onptq.models.structure import Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, pair_key

SMOOTHED = ("norm_qkv", "v_o", "norm_gate_up")
EPOCHS = 2
RATE = 5e-2
SCALE_FLOOR = 1e-2
TOKEN_WEIGHTS = {TEXT: 1.0, IMAGE: 0.5, AUDIO: 1.0}  # of a token's error, by modality


@torch.no_grad()
def masquant(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    epochs: int = EPOCHS,
    store: BlockStore | None = None,
) -> Theta:
    """MASQuant's theta on the prompts."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    dense, quantized = ([Stream(policy, [prompt]) for prompt in prompts] for _ in "DQ")
    with policy.speaking("D"):
        for block in policy.gathered_blocks():
            largest = advance_and_measure(dense, quantized, block)
            if not restore(store, theta, block):
                scales = {
                    pair: _initial_scales(block, pair, x_max)
                    for pair, x_max in largest.items()
                    if pair in block.producers
                }
                _train(policy, theta, block, scales, quantized, [stream.hidden for stream in dense], epochs)
                keep(store, theta, block)
                advance(1)
            with replaced(block, quantized_linears(policy, theta, block, block.pairs)):
                for stream in quantized:
                    stream.advance(block)
    return theta


def _train(
    policy: Policy,
    theta: Theta,
    block: Block,
    scales: dict[str, Tensor],
    quantized: Sequence[Stream],
    targets: Sequence[Tensor],
    epochs: int,
) -> None:
    """Train the scales of one block, by pair, and put their logarithms into theta, in place."""
    optimizer = torch.optim.AdamW([scale.requires_grad_() for scale in scales.values()], lr=RATE, weight_decay=0.0)
    for epoch in range(epochs):
        for step, (stream, target) in enumerate(zip(quantized, targets, strict=True), epoch * len(quantized)):
            with torch.enable_grad():
                theta.smoothing.update({pair_key(block, pair): scale.log() for pair, scale in scales.items()})
                with replaced(block, quantized_linears(policy, theta, block, block.pairs)):
                    loss = balanced_error(stream.run(block), target, modality_of(stream))
            require_finite_error(float(loss), f"layers.{block.index} at prompt {stream.sequences[0].ordinal}", step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            for scale in scales.values():
                scale.data.clamp_(min=SCALE_FLOOR)
    for pair, scale in scales.items():
        u = scale.detach().log()
        theta.smoothing[pair_key(block, pair)] = u - u.mean()


def balanced_error(output: Tensor, target: Tensor, modality: Tensor) -> Tensor:
    """(sum over text |d| + sum over audio |d| + 0.5 sum over images |d|) / all."""
    weight = torch.tensor([TOKEN_WEIGHTS[kind] for kind in (TEXT, IMAGE, AUDIO)], device=output.device)[modality]
    return (weight * (output - target).float().abs().mean(-1)).mean()


def modality_of(stream: Stream) -> Tensor:
    """The modality of each token of a stream of one sequence, [1, S]."""
    return stream.sequences[0].modality.long()[None]


def advance_and_measure(dense: Sequence[Stream], quantized: Sequence[Stream], block: Block) -> dict[str, Tensor]:
    """Take the dense streams through the block, whose router decides for the quantized ones, too; return amax|x| over all
    tokens at each pair's consumers, [I]."""
    largest: dict[str, Tensor] = {}

    def observe(_: Block, pair: str, x: Tensor) -> None:
        x_max = x.abs().flatten(0, -2).amax(0).float()
        largest[pair] = torch.maximum(largest[pair], x_max) if pair in largest else x_max

    with observing([block], observe, SMOOTHED):
        for stream, led in zip(dense, quantized, strict=True):
            led.led(stream, block)
    return largest


def _initial_scales(block: Block, pair: str, x_max: Tensor) -> Tensor:
    """SmoothQuant's scales, not normalized: their size matters to AdamW."""
    x_max, w_max = by_query_head(x_max, block, pair).amax(0), weight_maxima(block, pair)
    return x_max.clamp(min=FLOOR).pow(ALPHA) / w_max.clamp(min=FLOOR).pow(1 - ALPHA)
