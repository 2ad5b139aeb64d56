"""A prompt, encoded once for everybody: the towers run here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from onptq.models.structure import Structure


@dataclass(frozen=True)
class EncodedPrompt:
    """What D, Q, branches and updates share of one prompt."""

    ordinal: int
    ids: Tensor  # [P]
    embeds: Tensor  # [P, d], image and audio features already in place
    positions: Tensor  # [A, P]: three axes under M-RoPE, else one
    modality: Tensor  # [P] 0 text, 1 image, 2 audio
    deepstack: Tensor | None = None  # [n, P_visual, d]
    deepstack_at: Tensor | None = None  # [P_visual] where they are added

    @property
    def length(self) -> int:
        return self.ids.shape[0]

    @property
    def next_position(self) -> int:
        """Response tokens count on from the largest position on any axis."""
        return int(self.positions.max()) + 1

    def extended(self, ids: Tensor, embeds: Tensor) -> EncodedPrompt:
        """The prompt with response tokens ids [T], embeds [T, d] behind it."""
        steps = torch.arange(len(ids), device=self.ids.device) + self.next_position
        return replace(
            self,
            ids=torch.cat((self.ids, ids)),
            embeds=torch.cat((self.embeds, embeds)),
            positions=torch.cat((self.positions, steps.expand(self.positions.shape[0], -1)), dim=1),
            modality=torch.cat((self.modality, self.modality.new_zeros(len(ids)))),
        )


class _AtTheDoor(Exception):
    """Unwinds the model's forward once its decoder has been handed everything it needs."""


@torch.no_grad()
def encode(
    model: nn.Module, structure: Structure, inputs: Mapping[str, Tensor], modality: Tensor, ordinal: int
) -> EncodedPrompt:
    """Run the checkpoint's own forward up to the decoder's door: transformers merges the features and derives positions."""
    handed: dict[str, Any] = {}

    def listen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handed.update(kwargs)
        raise _AtTheDoor

    device = structure.embedding.weight.device
    tensors = {name: tensor.to(device) for name, tensor in inputs.items()}
    _forget_positions(model)
    hook = structure.decoder.register_forward_pre_hook(listen, with_kwargs=True)
    try:
        model(**tensors, use_cache=False)
    except _AtTheDoor:
        pass
    finally:
        hook.remove()
        _forget_positions(model)
    ids = tensors["input_ids"][0]
    embeds = handed.get("inputs_embeds")
    if embeds is None:
        embeds = structure.embedding(tensors["input_ids"])
    features, at = handed.get("deepstack_visual_embeds"), handed.get("visual_pos_masks")
    stacked = None if not features else torch.stack([feature.to(embeds.dtype) for feature in features])
    return EncodedPrompt(
        ordinal=ordinal,
        ids=ids,
        embeds=embeds[0].detach(),
        positions=_positions(handed.get("position_ids"), structure, ids),
        modality=modality.to(device),
        deepstack=stacked,
        deepstack_at=None if stacked is None or at is None else at[0].nonzero()[:, 0],
    )


def _forget_positions(model: nn.Module) -> None:
    """Rope offsets that the model remembers from the previous prompt must not leak into the next."""
    for module in model.modules():
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None  # type: ignore[assignment]


def _positions(given: Tensor | None, structure: Structure, ids: Tensor) -> Tensor:
    axes = 3 if _is_mrope(structure) else 1
    if given is None:
        return torch.arange(len(ids), device=ids.device).expand(axes, -1)
    given = given[:, 0] if given.ndim == 3 else given  # [A, P] or [1, P]
    if given.shape[0] == 4:  # transformers puts plain text positions in front of the three axes
        given = given[1:]
    return given.expand(axes, -1).contiguous()


def _is_mrope(structure: Structure) -> bool:
    rope = getattr(structure.decoder.config, "rope_parameters", None) or {}
    return "mrope_section" in rope


@dataclass(frozen=True)
class PromptBatch:
    """Prompts side by side, padded on the right."""

    prompts: tuple[EncodedPrompt, ...]
    embeds: Tensor  # [B, P, d]
    positions: Tensor  # [A, B, P]
    real: Tensor  # [B, P] which slots hold a token
    next_position: Tensor  # [B]
    deepstack: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, prompts: Sequence[EncodedPrompt]) -> PromptBatch:
        width, first = max(prompt.length for prompt in prompts), prompts[0]
        size, device = len(prompts), first.embeds.device
        embeds = first.embeds.new_zeros(size, width, first.embeds.shape[-1])
        positions = first.positions.new_zeros(first.positions.shape[0], size, width)
        real = torch.zeros(size, width, dtype=torch.bool, device=device)
        depth = max((len(prompt.deepstack) for prompt in prompts if prompt.deepstack is not None), default=0)
        deepstack = tuple(torch.zeros_like(embeds) for _ in range(depth))
        for row, prompt in enumerate(prompts):
            embeds[row, : prompt.length] = prompt.embeds
            positions[:, row, : prompt.length] = prompt.positions
            real[row, : prompt.length] = True
            if prompt.deepstack is not None:
                for level, feature in zip(deepstack, prompt.deepstack, strict=True):
                    level[row, prompt.deepstack_at] = feature
        next_position = torch.tensor([prompt.next_position for prompt in prompts], device=device)
        return cls(tuple(prompts), embeds, positions, real, next_position, deepstack)

    @property
    def width(self) -> int:
        return self.embeds.shape[1]

    def response_positions(self, count: int) -> Tensor:
        """Positions of response tokens 1..count, [A, B, count]."""
        steps = torch.arange(count, device=self.embeds.device)
        return (self.next_position[:, None] + steps).expand(self.positions.shape[0], -1, -1)
