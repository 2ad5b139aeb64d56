"""Checkpoints with the shapes of published models and random weights, for measuring speed and memory."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from onptq.checkpoint.shards import ShardWriter, header_room
from onptq.errors import OnPTQError
from onptq.registry import FAMILIES
from onptq.zoo.configs import Dims, Towers, model_config, preprocessor_config
from onptq.zoo.random import (
    LOGIT_STD,
    TOKENS,
    draw_weights,
    generation_config,
    silent_ids,
    tensor_shapes,
    write_json,
)
from onptq.zoo.tokens import QWEN, write_tokenizer

USUAL_VOCABULARY = 1024  # the vocabulary that LOGIT_STD is for
TOKENIZER_SIZE = 4096  # at most: further ids have no text


@dataclass(frozen=True)
class Published:
    """Shapes of a published model. Omni's talker and vocoder, which are not loaded, are small."""

    family: str
    dims: Dims
    towers: Towers
    pixels: tuple[int, int]  # least and most of an image


_QWEN2_5 = Dims(28, 3584, 18944, 28, 4, 152064, False, "bfloat16", context=128000)
_QWEN3 = Dims(36, 4096, 12288, 32, 8, 151936, False, "bfloat16", rope_theta=5e6, context=262144)
_QWEN3_TOWERS = Towers(1152, 16, 4304, deep_depth=27, deepstack=(8, 16, 24), positions=2304)
_QWEN3_MIXTURE = Dims(
    48, 2048, 6144, 32, 4, 151936, False, "bfloat16", 5e6, 262144, width=128, experts=128, active=8, expert_ffn=768
)
_WINDOWED = Towers(1280, 16, 3420, 32, 112, (7, 15, 23, 31))

PUBLISHED = {
    "qwen2.5-vl-7b": Published("qwen2.5-vl", _QWEN2_5, _WINDOWED, (56 * 56, 12845056)),
    "qwen3-vl-8b": Published("qwen3-vl", _QWEN3, _QWEN3_TOWERS, (65536, 16777216)),
    "qwen3-vl-30b-a3b": Published("qwen3-vl-moe", _QWEN3_MIXTURE, _QWEN3_TOWERS, (65536, 16777216)),
    "qwen2.5-omni-7b": Published(
        "qwen2.5-omni",
        replace(_QWEN2_5, context=32768),
        replace(_WINDOWED, audio_layers=32, audio_heads=20, audio_ffn=5120, audio_window=100, talker_vocab=8448),
        (56 * 56, 12845056),
    ),
}


def find_published(name: str) -> Published:
    if name not in PUBLISHED:
        raise OnPTQError(f"unknown shape {name!r}: expected one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def write_published(
    shape: Published,
    folder: Path,
    *,
    layers: int | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    advance: Callable[[int], None] = lambda tensors: None,
) -> Path:
    """Write a checkpoint of that shape, or of its first `layers` decoder blocks, tensor by tensor, drawn on `device`.

    `folder` appears when the checkpoint is complete. Responses do not end early, and the likeliest token has the same
    probability as in small vocabularies.
    """
    if folder.exists():
        raise OnPTQError(f"{folder} exists: expected a new folder")
    dims = replace(shape.dims, layers=layers or shape.dims.layers, dtype=dtype or shape.dims.dtype)
    tokens = TOKENS.get(shape.family, QWEN)
    stage = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    ids = write_tokenizer(stage, tokens, min(dims.vocab, TOKENIZER_SIZE))
    modalities = FAMILIES[shape.family].modalities
    settings = preprocessor_config(shape.family, "audio" in modalities, shape.pixels)
    write_json(stage / "config.json", model_config(shape.family, dims, ids, shape.towers))
    write_json(stage / "generation_config.json", generation_config(tokens, ids))
    write_json(stage / "preprocessor_config.json", settings)
    # The largest of V normal numbers grows with sqrt(log V). So does the deviation that keeps its share of the softmax.
    logit_std = LOGIT_STD * math.sqrt(max(1.0, math.log(dims.vocab) / math.log(USUAL_VOCABULARY)))
    silent = silent_ids(tokens, ids, dims.tie)
    with ShardWriter(stage, header_room(tensor_shapes(stage, shape.family))) as shards:
        for name, weight in draw_weights(stage, shape.family, dims, silent, seed, logit_std=logit_std, device=device):
            shards.add(name, weight)
            advance(1)
        shards.close()
    return stage.rename(folder)
