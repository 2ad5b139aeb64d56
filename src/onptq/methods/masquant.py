"""MASQuant, merged: one smoothing vector for all modalities, trained block by block; it folds. `masquant_full` is the other form.

Training starts from SmoothQuant's scales, alpha 0.5, and goes by the error of the block's output: AdamW on the scales themselves
(not their logarithms), one prompt a step, two epochs. The quantized block reads what the quantized blocks before it emit and is
to emit what the dense block emits in the dense model; the error is absolute, and a picture's tokens count half. down_proj is
never smoothed, rows keep their full range, and prompts are used without responses.

The scales of the modalities differ only in their largest inputs, so merged, as the largest of them, they are SmoothQuant's. They
fold into the norms, and v -> o into one scale per KV channel (the original scales o_proj's input when it runs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from onptq.methods.activations import listening
from onptq.methods.layerwise import IN_ORDER, Answer, Stream, quantized_linears, replaced
from onptq.methods.linears import by_query_head
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
COUNTS = {TEXT: 1.0, IMAGE: 0.5, AUDIO: 1.0}  # weight of a token's error, by modality


def masquant(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    epochs: int = EPOCHS,
) -> Theta:
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    dense, quantized = open_each(policy, prompts), open_each(policy, prompts)
    with torch.no_grad(), policy.speaking("D"):
        for block in policy.structure.blocks:
            scales = _merged_scales(block, advance_and_measure(dense, block))

            def answers(_: Tensor, block: Block = block, scales: dict[str, Tensor] = scales) -> dict[str, Answer]:
                theta.smoothing.update({pair_key(block, pair): scale.log() for pair, scale in scales.items()})
                return quantized_linears(policy, theta, block, IN_ORDER)

            train_scales(block, scales.values(), answers, quantized, dense, epochs)
            for pair, scale in scales.items():
                u = scale.detach().log()
                theta.smoothing[pair_key(block, pair)] = u - u.mean()
            with replaced(block, quantized_linears(policy, theta, block, IN_ORDER)):
                for stream in quantized:
                    stream.advance(block)
            advance(1)
    return theta


def train_scales(
    block: Block,
    scales: Iterable[Tensor],
    answers: Callable[[Tensor], dict[str, Answer]],
    quantized: Sequence[Stream],
    dense: Sequence[Stream],
    epochs: int,
) -> None:
    """In place. `answers` makes the block's linears out of the scales for tokens of given modalities [1, S]; the dense
    streams have already passed the block."""
    trained = [scale.requires_grad_() for scale in scales]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    for _ in range(epochs):
        for stream, target in zip(quantized, dense, strict=True):
            modality = modality_of(stream)
            with torch.enable_grad(), replaced(block, answers(modality)):
                loss = balanced_error(stream.run(block), target.hidden, modality)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            for scale in trained:
                scale.data.clamp_(min=SCALE_FLOOR)


def balanced_error(found: Tensor, wanted: Tensor, modality: Tensor) -> Tensor:
    """(sum over text |d| + sum over sound |d| + 0.5 sum over pictures |d|) / all."""
    weight = torch.tensor([COUNTS[kind] for kind in (TEXT, IMAGE, AUDIO)], device=found.device)[modality]
    return (weight * (found - wanted).float().abs().mean(-1)).mean()


def open_each(policy: Policy, prompts: Sequence[EncodedPrompt]) -> list[Stream]:
    return [Stream(policy, [prompt]) for prompt in prompts]


def modality_of(stream: Stream) -> Tensor:
    return stream.sequences[0].modality.long()[None]


def advance_and_measure(streams: Sequence[Stream], block: Block) -> dict[str, Tensor]:
    """Take the dense streams through the block: amax|x| of each modality at each pair's consumers, [3, I]; 0 if absent."""
    largest: dict[str, Tensor] = {}
    for stream in streams:
        modality = modality_of(stream)

        def hear(_: Block, pair: str, x: Tensor, modality: Tensor = modality) -> None:
            masked = [torch.where((modality == kind)[..., None], x.abs(), 0) for kind in (TEXT, IMAGE, AUDIO)]
            found = torch.stack([values.flatten(0, -2).amax(0).float() for values in masked])
            largest[pair] = torch.maximum(largest[pair], found) if pair in largest else found

        with listening([block], hear, SMOOTHED):
            stream.advance(block)
    return largest


def smoothquant_scales(x_max: Tensor, w_max: Tensor) -> Tensor:
    return x_max.clamp(min=FLOOR).pow(ALPHA) / w_max.clamp(min=FLOOR).pow(1 - ALPHA)


def _merged_scales(block: Block, largest: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        pair: smoothquant_scales(by_query_head(x.amax(0), block, pair).amax(0), weight_maxima(block, pair))
        for pair, x in largest.items()
    }
