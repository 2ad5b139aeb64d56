"""The parts of a checkpoint that a run quantizes or copies, by config.json and safetensors headers; no weight is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onptq.checkpoint.companions import companion_bytes
from onptq.checkpoint.exportable import output_bytes
from onptq.checkpoint.folder import Checkpoint, StoredTensor
from onptq.checkpoint.names import Decoder, matches
from onptq.checkpoint.source import Source
from onptq.checkpoint.write import HEAD
from onptq.models.family import Family, text_config, thinker_config
from onptq.schemes import Scheme

LINEARS, EMBEDDINGS, VISION, AUDIO, OTHER_MODELS, OTHER = (
    "decoder linears",
    "embeddings and head",
    "vision tower",
    "audio tower",
    "other models",
    "norms and the rest",
)
Tensors = dict[str, StoredTensor]


@dataclass(frozen=True)
class Part:
    """One part of the checkpoint: how many modules it has, and its bytes now and in the output."""

    name: str
    quantized: bool
    modules: int
    parameters: int
    bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Shapes:
    """The sizes of a checkpoint that decide what a run takes. Counts of parameters, unless a comment says otherwise."""

    layers: int  # blocks
    attending: int  # blocks with keys and values
    recurrent: int  # numbers in the recurrent states of all blocks, of one sequence
    hidden: int  # width
    ffn: int  # width; of a layer with experts that of all a token goes to
    query: int  # width of all query heads together
    kv: int  # width of all key heads together
    head_dim: int  # width of one head
    vocabulary: int  # tokens
    linears: int  # of the whole decoder
    block: int  # linears of the largest block
    active: int  # of these, what one token meets
    modules: int  # how many linears that block has
    largest: int  # largest linear
    loaded: int  # everything the run loads; other models of the checkpoint are not
    vision: int
    audio: int
    scales: int  # quantization scales: one per row or group
    deepstack: int  # levels of visual features that are added after the first blocks
    patches: int  # patches of an image that become one token


@dataclass(frozen=True)
class Parts:
    """The decoder's place, and the parts that are quantized or copied."""

    decoder: Decoder
    parts: tuple[Part, ...]
    shapes: Shapes
    unmatched: tuple[str, ...]  # ignore patterns that match no tensor
    output_bytes: int  # weights and companion files as written


def find_parts(source: Source, scheme: Scheme) -> Parts:
    """The parts of a checkpoint. Raises where it is damaged or has no decoder."""
    family, checkpoint, decoder = source.family, source.whole, source.decoder
    grouped = _by_part(checkpoint, decoder, family)
    written = output_bytes(source, scheme)
    saved = checkpoint.weight_bytes - written
    parts = tuple(
        Part(
            name,
            name == LINEARS and scheme.quantizes_weights,
            len({key.rpartition(".")[0] for key in tensors}),
            _parameters(tensors),
            stored := sum(tensor.nbytes for tensor in tensors.values()),
            stored - (saved if name == LINEARS else 0),
        )
        for name, tensors in grouped.items()
        if tensors
    )
    shapes = _shapes(checkpoint, decoder, scheme, grouped, source.config)
    unmatched = tuple(_unmatched(checkpoint, family))
    return Parts(decoder, parts, shapes, unmatched, written + companion_bytes(source.folder))


def _by_part(checkpoint: Checkpoint, decoder: Decoder, family: Family) -> dict[str, Tensors]:
    linears = {decoder.prefix + name for name in decoder.linears}
    towers = {pattern: AUDIO if "audio" in pattern else VISION for pattern in family.towers}
    grouped: dict[str, Tensors] = {name: {} for name in (LINEARS, EMBEDDINGS, VISION, AUDIO, OTHER_MODELS, OTHER)}
    for key, tensor in checkpoint.tensors.items():
        module = key.rpartition(".")[0]
        tower = next((part for pattern, part in towers.items() if matches(key, f"re:{pattern}")), None)
        if module in linears:
            part = LINEARS
        elif key.startswith(family.other_models):
            part = OTHER_MODELS
        elif tower is not None:
            part = tower
        elif module == f"{decoder.prefix}embed_tokens" or module.endswith("lm_head"):
            part = EMBEDDINGS
        else:
            part = OTHER
        grouped[part][key] = tensor
    return grouped


def _shapes(
    checkpoint: Checkpoint,
    decoder: Decoder,
    scheme: Scheme,
    grouped: Mapping[str, Tensors],
    config: Mapping[str, Any],
) -> Shapes:
    weights = {name: checkpoint.tensors[f"{decoder.prefix}{name}.weight"] for name in decoder.linears}
    first: dict[str, tuple[int, ...]] = {}
    for name, weight in weights.items():
        first.setdefault(name.rpartition(".")[2], weight.shape)
    attending = sum(name.endswith(".o_proj") for name in weights)
    text, vision = text_config(config), thinker_config(config).get("vision_config") or {}
    blocks = [_Block.of(index, weights, text) for index in range(decoder.layers)]
    block = max(blocks, key=lambda one: one.linears)
    embeddings = checkpoint.tensors.get(f"{decoder.prefix}embed_tokens.weight")
    query = first["o_proj"][1]
    key, kernel = int(text.get("linear_key_head_dim") or 0), int(text.get("linear_conv_kernel_dim") or 0)
    state = first["out_proj"][1] * key + first["in_proj_qkv"][0] * kernel if "out_proj" in first else 0
    count = {name: _parameters(tensors) for name, tensors in grouped.items()}
    return Shapes(
        layers=decoder.layers,
        attending=attending,
        recurrent=(decoder.layers - attending) * state,
        hidden=first["o_proj"][0],
        ffn=max(one.ffn for one in blocks),
        query=query,
        kv=first["k_proj"][0] if "k_proj" in first else (first["qkv_proj"][0] - query) // 2,
        head_dim=int(text.get("head_dim") or query // int(text.get("num_attention_heads") or 1)),
        vocabulary=embeddings.shape[0] if embeddings else int(text.get("vocab_size", 0)),
        linears=sum(one.linears for one in blocks),
        block=block.linears,
        active=block.active,
        modules=block.modules,
        largest=max(weight.numel for weight in weights.values()),
        loaded=sum(count.values()) - count[OTHER_MODELS],
        vision=count[VISION],
        audio=count[AUDIO],
        scales=sum(math.prod(scheme.of(name).scale_shape(*weight.shape)) for name, weight in weights.items()),
        deepstack=len(vision.get("deepstack_visual_indexes") or ()),
        patches=int(vision.get("spatial_merge_size", 2)) ** 2,
    )


@dataclass(frozen=True)
class _Block:
    """The sizes of one block."""

    linears: int
    active: int
    modules: int
    ffn: int

    @classmethod
    def of(cls, index: int, weights: Tensors, text: Mapping[str, Any]) -> _Block:
        own = {name: weight for name, weight in weights.items() if name.startswith(f"layers.{index}.")}
        routed = [name for name in own if ".experts." in name]
        experts = len(routed) // 3
        share = min(1.0, int(text.get("num_experts_per_tok") or 1) / experts) if experts else 0.0
        counts = {name: weight.numel * (share if name in routed else 1) for name, weight in own.items()}
        widths = (weight.shape[1] * counts[name] / weight.numel for name, weight in own.items() if "down_proj" in name)
        return cls(sum(one.numel for one in own.values()), round(sum(counts.values())), len(own), round(sum(widths)))


def _unmatched(checkpoint: Checkpoint, family: Family) -> Iterator[str]:
    """Ignore patterns without a tensor, but for the head, which may be tied, and other models, which may be absent."""
    for pattern in family.ignore:
        if pattern not in (HEAD, *family.other_patterns) and not any(
            matches(key, pattern) for key in checkpoint.tensors
        ):
            yield pattern


def _parameters(tensors: Tensors) -> int:
    return sum(tensor.numel for tensor in tensors.values())
