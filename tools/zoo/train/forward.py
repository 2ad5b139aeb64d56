"""The forward of training: that of the transformers model, for images of one size and right-padded rows.

A row is `<|im_start|>user\\n`, an image or none, audio or none, then text. So everything but the number of audio tokens
has a fixed place, positions and rotary tables are constants, and no row or image is treated by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.zoo.train.blocks import (
    DecoderBlock,
    Linear,
    PlainBlock,
    Rotary,
    WindowedBlock,
    decode,
    hear,
    layer_norm,
    rms_norm,
    see_plain,
    see_windowed,
    token_losses,
)

GRID = 8  # patches along a side of every image
MERGED = GRID // 2
IMAGE_TOKENS = MERGED * MERGED
MEDIA_AT = 4  # <|im_start|>, user, newline, start of vision or audio
AUDIO_AT = MEDIA_AT + IMAGE_TOKENS + 2  # after an image: its end and the audio clip's start lie between
FRAMES = 400  # mel frames of the longest audio clip
AUDIO_TOKENS = FRAMES // 4


@dataclass(frozen=True)
class Rows:
    """A batch on the device. Images are uint8 [B, side, side, 3], blank where `seen` is false."""

    ids: Tensor  # [B, L]
    seen: Tensor  # [B] bool: the row has an image
    images: Tensor | None
    mel: Tensor | None = None  # [B, bins, FRAMES], 0 beyond an audio clip's end
    frames: Tensor | None = None  # [B], 0 where the row has no audio


@dataclass(frozen=True)
class Seen:
    tokens: Tensor  # [B, IMAGE_TOKENS, H]
    deep: tuple[Tensor, ...] = ()  # DeepStack: added after the first decoder layers


def position_ids(length: int) -> Tensor:
    """M-RoPE positions [3, 2, length] of rows without and with an image: time, height, width. Audio clips count as
    text."""
    text = torch.arange(length)
    line, column = torch.meshgrid(torch.arange(MERGED), torch.arange(MERGED), indexing="ij")
    patch = torch.stack([torch.zeros_like(line), line, column]).flatten(1) + MEDIA_AT  # [3, IMAGE_TOKENS]
    before = text[:MEDIA_AT].expand(3, -1)
    after = torch.arange(length - MEDIA_AT - IMAGE_TOKENS).expand(3, -1) + MEDIA_AT + MERGED
    return torch.stack([text.expand(3, -1), torch.cat([before, patch, after], 1)], 1)


def audio_tokens(frames: Tensor) -> Tensor:
    """Tokens of an audio clip of so many mel frames: halved by the second convolution and by the pooling."""
    return torch.div(frames + 1, 2, rounding_mode="floor") // 2


class Forward:
    """A forward with the parameters of a transformers model of one of the three families; the model itself is not
    called."""

    def __init__(self, model: Any, statistics: Mapping[str, Any], compiled: bool = False) -> None:
        """`statistics`: preprocessor_config.json, for the mean and deviation of the pixels."""
        inner, text = _parts(model)
        self.embedding: nn.Embedding = text.embed_tokens
        self.head: Tensor = model.get_output_embeddings().weight
        self.norm: Tensor = text.norm.weight
        self.eps: float = text.norm.variance_epsilon
        self.head_dim: int = text.layers[0].self_attn.head_dim
        self.layers = [DecoderBlock.of(layer) for layer in text.layers]
        self.device = self.embedding.weight.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self._rotary_module = text.rotary_emb
        self._rotary: dict[int, Rotary] = {}
        wrap = _compile if compiled else _leave
        self._decode, self._losses = wrap(decode), wrap(token_losses)
        self.vision = Vision(inner.visual, statistics, wrap, self.dtype)
        self.audio = Audio(inner.audio_tower, wrap, self.dtype) if hasattr(inner, "audio_tower") else None

    def logits(self, rows: Rows) -> Tensor:
        hidden, _ = self.hidden(rows)
        return F.linear(rms_norm(hidden, self.norm, self.eps), self.head)

    def losses(self, rows: Rows, spots: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Cross-entropy [K] of the tokens that follow `spots` of the flattened rows, and the audio tokens."""
        hidden, audio = self.hidden(rows)
        states = hidden.flatten(0, 1).index_select(0, spots)
        return self._losses(states, self.norm, self.eps, self.head, targets), audio

    def hidden(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """The residual stream [B, L, H] before the last norm, and the audio tokens [B, AUDIO_TOKENS, H]."""
        x = self.embedding(rows.ids).to(self.dtype)
        seen = None if rows.images is None else self.vision(rows.images)
        if seen is not None:
            x = _insert(x, seen.tokens, rows.seen)
        audio = None
        if self.audio is not None and rows.mel is not None and rows.frames is not None:
            audio = self.audio(rows.mel, rows.frames)
            x = _insert_audio(x, audio, audio_tokens(rows.frames), rows.seen)
        cos, sin = self._tables(rows.ids.shape[1])
        rotary = (cos[rows.seen.long()], sin[rows.seen.long()])
        for index, layer in enumerate(self.layers):
            x = self._decode(x, layer, rotary, self.head_dim, self.eps)
            if seen is not None and index < len(seen.deep):
                x = _insert(x, x[:, MEDIA_AT : MEDIA_AT + IMAGE_TOKENS] + seen.deep[index], rows.seen)
        return x, audio

    def _tables(self, length: int) -> Rotary:  # [2, L, head width]: without and with an image
        if length not in self._rotary:
            probe = torch.zeros(1, device=self.device)
            cos, sin = self._rotary_module(probe, position_ids(length).to(self.device))
            self._rotary[length] = (cos.clone(), sin.clone())
        return self._rotary[length]


class Vision:
    """The vision tower, for images of GRID x GRID patches, which are one attention window."""

    def __init__(
        self, tower: Any, statistics: Mapping[str, Any], wrap: Callable[[Any], Any], dtype: torch.dtype
    ) -> None:
        self.tower = tower
        self.dtype = dtype
        self.deepstack: list[int] = list(getattr(tower, "deepstack_visual_indexes", ()))
        self.blocks: list[Any]
        if hasattr(tower, "pos_embed"):
            self.blocks, self._see = [PlainBlock.of_vision(block) for block in tower.blocks], wrap(see_plain)
        else:
            self.blocks, self._see = [WindowedBlock.of(block) for block in tower.blocks], wrap(see_windowed)
        self.head_dim: int = tower.blocks[0].attn.head_dim
        device = tower.patch_embed.proj.weight.device
        deviation = torch.tensor(statistics["image_std"], device=device) * 255
        self._scale = 1 / deviation
        self._shift = -torch.tensor(statistics["image_mean"], device=device) * 255 / deviation
        places = _block_order().to(device)  # [patches, 2]
        cos, sin = tower.rotary_pos_emb(torch.zeros(1, device=device), places)
        self._rotary = (cos.clone()[None], sin.clone()[None])
        if hasattr(tower, "pos_embed"):
            self._corners, self._weights = _interpolation(places, tower.num_grid_per_side)

    def __call__(self, images: Tensor) -> Seen:
        x = self._embed(images)
        deep = []
        for index, block in enumerate(self.blocks):
            x = self._see(x, block, self._rotary, self.head_dim)
            if index in self.deepstack:
                deep.append(self._merge(x, self.tower.deepstack_merger_list[self.deepstack.index(index)]))
        return Seen(self._merge(x, self.tower.merger), tuple(deep))

    def _embed(self, images: Tensor) -> Tensor:
        """Patches in the order of merging. Both frames of a patch are the image, so their weights are added first."""
        batch, side = images.shape[:2]
        size = side // GRID
        pixels = images.float() * self._scale + self._shift
        cut = pixels.view(batch, MERGED, 2, size, MERGED, 2, size, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
        patches = cut.reshape(batch, GRID * GRID, -1).to(self.dtype)
        proj = self.tower.patch_embed.proj
        x = F.linear(patches, proj.weight.sum(2).flatten(1), proj.bias).to(self.dtype)
        if hasattr(self.tower, "pos_embed"):
            table = self.tower.pos_embed.weight
            x = x + (table[self._corners] * self._weights[..., None]).sum(1).to(self.dtype)
        return x

    def _merge(self, x: Tensor, merger: Any) -> Tensor:
        batch = x.shape[0]
        if hasattr(merger, "ln_q"):
            flat = rms_norm(x, merger.ln_q.weight, merger.ln_q.variance_epsilon).view(batch, IMAGE_TOKENS, -1)
            first, second = Linear.of(merger.mlp[0]), Linear.of(merger.mlp[2])
        else:
            wide = x.view(batch, IMAGE_TOKENS, -1) if merger.use_postshuffle_norm else x
            flat = layer_norm(wide, Linear.of(merger.norm), merger.norm.eps).view(batch, IMAGE_TOKENS, -1)
            first, second = Linear.of(merger.linear_fc1), Linear.of(merger.linear_fc2)
        return F.linear(F.gelu(F.linear(flat, *first)), *second)


class Audio:
    """The audio tower of Omni, for audio clips of one chunk."""

    def __init__(self, tower: Any, wrap: Callable[[Any], Any], dtype: torch.dtype) -> None:
        self.tower = tower
        self.dtype = dtype
        self.blocks = [PlainBlock.of_audio(layer) for layer in tower.layers]
        self.head_dim: int = tower.layers[0].self_attn.head_dim
        self._hear = wrap(hear)

    def __call__(self, mel: Tensor, frames: Tensor) -> Tensor:  # [B, AUDIO_TOKENS, H]
        tower = self.tower
        steps = torch.arange(mel.shape[2], device=mel.device)
        x = F.gelu(F.conv1d(mel.to(self.dtype), tower.conv1.weight, tower.conv1.bias, padding=1))
        x = x * (steps < frames[:, None])[:, None]
        x = F.gelu(F.conv1d(x, tower.conv2.weight, tower.conv2.bias, stride=2, padding=1)).transpose(1, 2)
        x = (x + tower.positional_embedding.positional_embedding[: x.shape[1]]).to(self.dtype)
        # A row without an audio clip attends to one frame of silence rather than to nothing, which would be NaN.
        lengths = torch.div(frames + 1, 2, rounding_mode="floor").clamp(min=1)
        mask = (steps[: x.shape[1]] < lengths[:, None])[:, None, None]
        for block in self.blocks:
            x = self._hear(x, block, mask, self.head_dim)
        pooled = (x[:, 0::2] + x[:, 1::2]) / 2
        return F.linear(layer_norm(pooled, Linear.of(tower.ln_post), tower.ln_post.eps), *Linear.of(tower.proj))


def _parts(model: Any) -> tuple[Any, Any]:
    """The module with the towers and the one with the language model: before transformers 5.18 Omni's thinker is
    both."""
    if hasattr(model.model, "language_model"):
        return model.model, model.model.language_model
    return model, model.model


def _insert(x: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """Put an image's tokens into their place in the rows that have one."""
    end = MEDIA_AT + IMAGE_TOKENS
    chosen = torch.where(where[:, None, None], tokens.to(x.dtype), x[:, MEDIA_AT:end])
    return torch.cat([x[:, :MEDIA_AT], chosen, x[:, end:]], 1)


def _insert_audio(x: Tensor, tokens: Tensor, counts: Tensor, seen: Tensor) -> Tensor:
    """Put each audio clip's tokens after the image, or where an image would be. Slices, not indices: their gradient is
    fast."""
    length = x.shape[1]
    starts = torch.where(seen, AUDIO_AT, MEDIA_AT)[:, None]
    slots = torch.arange(length, device=x.device) - starts
    inside = (slots >= 0) & (slots < counts[:, None])
    after, instead = (F.pad(tokens, (0, 0, at, length))[:, :length] for at in (AUDIO_AT, MEDIA_AT))
    placed = torch.where(seen[:, None, None], after, instead).to(x.dtype)
    return torch.where(inside[..., None], placed, x)


def _block_order() -> Tensor:
    """Row and column of each patch in the order of the tokens they merge into, [patches, 2]."""
    line, column = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    places = torch.stack([line, column], -1).view(MERGED, 2, MERGED, 2, 2)
    return places.transpose(1, 2).reshape(-1, 2)


def _interpolation(places: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The four learned positions around each patch, and their shares: bilinear, corners on corners."""
    spot = places.float() * (side - 1) / (GRID - 1)
    low = spot.floor().long().clamp(max=side - 1)
    high = (low + 1).clamp(max=side - 1)
    share = spot - low
    corners, weights = [], []
    for row, row_share in ((low, 1 - share), (high, share)):
        for column, column_share in ((low, 1 - share), (high, share)):
            corners.append(row[:, 0] * side + column[:, 1])
            weights.append(row_share[:, 0] * column_share[:, 1])
    return torch.stack(corners, 1), torch.stack(weights, 1)


def _compile(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


def _leave(function: Any) -> Any:
    return function
