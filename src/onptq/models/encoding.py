"""Encoded prompts: the towers run here, once per prompt, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onptq.models.attention import trusted_attention
from onptq.models.family import TEXT
from onptq.models.language_model import LanguageModel
from onptq.models.masks import mutual_runs
from onptq.models.processing import ModelInputs
from onptq.models.structure import Structure
from onptq.models.windows import windows_at_once

CHUNK_PROMPTS = 32  # encoded in one forward
CHUNK_ROWS = 8192  # tokens, patches and audio frames in one forward
Numbered = tuple[ModelInputs, int]  # with its ordinal


@dataclass(frozen=True)
class EncodedPrompt:
    """The part of one prompt that D, Q, branches and updates share."""

    ordinal: int
    ids: Tensor  # [P]
    embeds: Tensor  # [P, d], image and audio features already in place; behind them what layers read of their own
    positions: Tensor  # [A, P]: three axes under M-RoPE, else one
    modality: Tensor  # [P] 0 text, 1 image, 2 audio
    deepstack: Tensor | None = None  # [n, P_visual, d]
    deepstack_at: Tensor | None = None  # [P_visual] where they are added
    runs: Tensor | None = None  # [types, P] runs of tokens that see one another both ways, as `mutual_runs` gives them

    @property
    def length(self) -> int:
        return self.ids.shape[0]

    @property
    def next_position(self) -> int:
        """Response tokens count on from the largest position on any axis."""
        return int(self.positions.max()) + 1

    def extended(self, ids: Tensor, embeds: Tensor) -> EncodedPrompt:
        """The prompt followed by response tokens: ids [T], embeds [T, d]."""
        following = torch.arange(len(ids), device=self.ids.device) + self.next_position
        return replace(
            self,
            ids=torch.cat((self.ids, ids)),
            embeds=torch.cat((self.embeds, embeds)),
            positions=torch.cat((self.positions, following.expand(self.positions.shape[0], -1)), dim=1),
            modality=torch.cat((self.modality, self.modality.new_zeros(len(ids)))),
            runs=None if self.runs is None else functional.pad(self.runs, (0, len(ids))),
        )


class _DecoderReached(Exception):
    """Unwinds the model's forward once its decoder is called."""


def encode(
    model: LanguageModel,
    inputs: Iterable[ModelInputs],
    ordinals: Iterable[int] | None = None,
    advance: Callable[[int], None] = lambda prompts: None,
) -> list[EncodedPrompt]:
    """The prompts in the order given, encoded by D in chunks that bound memory; by default numbered from zero."""
    return list(encode_each(model, inputs, ordinals, advance))


def encode_each(
    model: LanguageModel,
    inputs: Iterable[ModelInputs],
    ordinals: Iterable[int] | None = None,
    advance: Callable[[int], None] = lambda prompts: None,
) -> Iterator[EncodedPrompt]:
    """The prompts of `encode`, a chunk in memory at a time."""
    numbers = count() if ordinals is None else iter(ordinals)
    for chunk in _chunks(inputs):
        with model.speaking("D"):
            encoded = _encode_chunk(model, [(one, next(numbers)) for one in chunk])
        yield from encoded
        advance(len(chunk))


def _encode_chunk(model: LanguageModel, chunk: Sequence[Numbered]) -> list[EncodedPrompt]:
    """One forward for all prompts that have the same kinds of input and can stand side by side."""
    alike: dict[tuple[frozenset[str], int | None], list[int]] = {}
    for index, (inputs, _) in enumerate(chunk):
        alike.setdefault((frozenset(inputs.tensors), index if inputs.alone else None), []).append(index)
    encoded: dict[int, EncodedPrompt] = {}
    for indices in alike.values():
        prompts = _encode_alike(model.model, model.structure, [chunk[index] for index in indices])
        encoded.update(zip(indices, prompts, strict=True))
    return [encoded[index] for index in range(len(chunk))]


@torch.no_grad()
def _encode_alike(model: nn.Module, structure: Structure, prompts: Sequence[Numbered]) -> list[EncodedPrompt]:
    device = structure.embedding.weight.device
    tensors = {name: tensor.to(device) for name, tensor in _side_by_side([inputs for inputs, _ in prompts]).items()}
    handed = _decoder_arguments(model, structure, tensors)
    embeds = handed.get("inputs_embeds")
    if embeds is None:
        embeds = structure.embed(tensors["input_ids"])
    else:
        embeds = structure.widened(embeds, handed.get("per_layer_inputs"))
    positions = _positions(handed.get("position_ids"), structure, tensors["input_ids"])
    features, seen = handed.get("deepstack_visual_embeds"), handed.get("visual_pos_masks")
    stacked = None if not features else torch.stack([feature.to(embeds.dtype) for feature in features])
    encoded, taken = [], 0
    for row, (inputs, ordinal) in enumerate(prompts):
        length, deepstack, at = inputs.length, None, None
        if stacked is not None and seen is not None:
            at = seen[row].nonzero()[:, 0]
            deepstack = stacked[:, taken : taken + len(at)].clone()
            taken += len(at)
        prompt = EncodedPrompt(
            ordinal=ordinal,
            ids=tensors["input_ids"][row, :length].clone(),  # clones, lest a prompt keep its neighbours' memory
            embeds=embeds[row, :length].clone(),
            positions=positions[:, row, :length].clone(),
            modality=inputs.modality.to(device),
            deepstack=deepstack,
            deepstack_at=at,
            runs=mutual_runs(handed.get("attention_mask"), structure, row, length),
        )
        encoded.append(prompt)
    return encoded


def _side_by_side(prompts: Sequence[ModelInputs]) -> dict[str, Tensor]:
    """One batch: rows, images and audio one after another, tokens and frames padded on the right."""
    joined = {}
    for name in prompts[0].tensors:
        width = max(inputs.tensors[name].shape[-1] for inputs in prompts)
        padded = []
        for inputs in prompts:
            tensor = inputs.tensors[name]
            missing, filler = width - tensor.shape[-1], 0
            if missing and name == "input_ids":  # models look for placeholders in the padding too, so it is text
                filler = int(tensor[0, inputs.modality == TEXT][0])
            padded.append(functional.pad(tensor, (0, missing), value=filler))
        joined[name] = torch.cat(padded)
    return joined


def _decoder_arguments(model: nn.Module, structure: Structure, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arguments that the checkpoint's own forward calls its decoder with: features merged, positions derived."""
    handed: dict[str, Any] = {}

    def listen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handed.update(kwargs)
        raise _DecoderReached

    _forget_positions(model)
    hook = structure.decoder.register_forward_pre_hook(listen, with_kwargs=True)
    at_once = windows_at_once(model) if tensors["input_ids"].is_cuda else nullcontext()
    try:
        with trusted_attention(), at_once:
            model(**tensors, use_cache=False)
    except _DecoderReached:
        pass
    finally:
        hook.remove()
        _forget_positions(model)
    return handed


def _chunks(inputs: Iterable[ModelInputs]) -> Iterator[list[ModelInputs]]:
    """Chunks of at most CHUNK_PROMPTS prompts and CHUNK_ROWS rows, or of one prompt: memory stays bounded for big images."""
    chunk: list[ModelInputs] = []
    tokens = media = 0  # of the longest prompt, and of all
    for one in inputs:
        patches, frames = one.tensors.get("pixel_values", ()), one.tensors.get("feature_attention_mask")
        seen = len(patches) + (0 if frames is None else frames.numel())
        rows = (len(chunk) + 1) * max(tokens, one.length) + media + seen
        if chunk and (len(chunk) == CHUNK_PROMPTS or rows > CHUNK_ROWS or one.alone or chunk[-1].alone):
            yield chunk
            chunk, tokens, media = [], 0, 0
        chunk.append(one)
        tokens, media = max(tokens, one.length), media + seen
    if chunk:
        yield chunk


def _forget_positions(model: nn.Module) -> None:
    """Rope offsets that the model remembers from the previous prompt must not leak into the next."""
    for module in model.modules():
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None  # type: ignore[assignment]


def _positions(given: Tensor | None, structure: Structure, ids: Tensor) -> Tensor:
    """[A, B, P] for ids [B, P]."""
    axes = structure.axes
    if given is None:
        given = torch.arange(ids.shape[1], device=ids.device)
    elif given.ndim == 3 and given.shape[0] == 4:  # transformers puts plain text positions in front of the three axes
        given = given[1:]
    return given.expand(axes, *ids.shape)


@dataclass(frozen=True)
class PromptBatch:
    """Prompts side by side, padded on the right."""

    prompts: tuple[EncodedPrompt, ...]
    embeds: Tensor  # [B, P, d]
    positions: Tensor  # [A, B, P]
    real: Tensor  # [B, P] which slots hold a token
    next_position: Tensor  # [B]
    deepstack: tuple[Tensor, ...] = ()
    runs: Tensor | None = None  # [types, B, P]

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
        types = max((len(prompt.runs) for prompt in prompts if prompt.runs is not None), default=0)
        runs = torch.zeros(types, size, width, dtype=torch.long, device=device) if types else None
        for row, prompt in enumerate(prompts):
            if runs is not None and prompt.runs is not None:
                runs[:, row, : prompt.length] = prompt.runs
        next_position = torch.tensor([prompt.next_position for prompt in prompts], device=device)
        return cls(tuple(prompts), embeds, positions, real, next_position, deepstack, runs)

    @property
    def width(self) -> int:
        return self.embeds.shape[1]

    def response_positions(self, count: int) -> Tensor:
        """Positions of response tokens 1..count, [A, B, count]."""
        steps = torch.arange(count, device=self.embeds.device)
        return (self.next_position[:, None] + steps).expand(self.positions.shape[0], -1, -1)
