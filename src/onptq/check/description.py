"""A description of a checkpoint: parts, number formats, maker, companion files, servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onptq.check.folder_checks import GENERATION, SPEAKERS, TOKENIZERS, chat_template
from onptq.check.inspected import Inspected
from onptq.checkpoint.folder import Checkpoint, split_name
from onptq.checkpoint.packing import storage_format
from onptq.checkpoint.provenance import CARD, read_front_matter, read_mapping
from onptq.checkpoint.quantization import COMPRESSED, Quantization
from onptq.checkpoint.served import Served
from onptq.checkpoint.serving import serving
from onptq.models.processing import SETTINGS_FILES

LANGUAGE, EMBEDDINGS, HEAD = "language model", "embeddings", "lm_head"
_WRAPPERS = {"model", "thinker", "language_model", "text_model"}
_PARTS = {
    "layers": LANGUAGE,
    "norm": LANGUAGE,
    "embed_tokens": EMBEDDINGS,
    "visual": "vision tower",
    "vision_tower": "vision tower",
    "vision_model": "vision tower",
    "audio_tower": "audio tower",
    "multi_modal_projector": "projector",
}
_COMPANIONS = {
    "tokenizer": TOKENIZERS,
    "processor": SETTINGS_FILES,
    "generation config": (GENERATION,),
    "speakers": (SPEAKERS,),
    "model card": (CARD,),
}


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    tensors: int
    quantized: int  # modules


@dataclass(frozen=True)
class Description:
    folder: str
    architecture: str | None
    family: str | None
    transformers_version: str | None
    model_classes: tuple[str, ...]  # that load it here
    bytes: int
    shards: int
    parts: tuple[Part, ...]
    quantization: Quantization | None
    scheme: str | None
    stored_as: Mapping[str, int]  # how quantized weights are stored -> modules
    makers: tuple[str, ...]
    companions: Mapping[str, str | None]
    serving: tuple[Served, ...]
    unchecked: str | None  # why names and shapes could not be compared with the model


def describe(inspected: Inspected) -> Description:
    checkpoint, stated = inspected.checkpoint, inspected.quantization
    config, scheme = checkpoint.config, stated.scheme if stated else None
    kinds: dict[str, int] = defaultdict(int)
    for kind in inspected.quantized_modules.values():
        kinds[kind] += 1
    return Description(
        folder=str(checkpoint.folder),
        architecture=_first(config.get("architectures")),
        family=inspected.family.name if inspected.family else None,
        transformers_version=config.get("transformers_version"),
        model_classes=tuple(layout.model_class for layout in inspected.layouts.each),
        bytes=sum(shard.actual_bytes for shard in checkpoint.shards),
        shards=len(checkpoint.shards),
        parts=_parts(inspected),
        quantization=stated,
        scheme=str(scheme) if scheme else None,
        stored_as=dict(kinds),
        makers=tuple(_makers(checkpoint)),
        companions=_companions(checkpoint),
        serving=_serving(stated, inspected.family is not None and inspected.family.has_experts),
        unchecked=inspected.layouts.unknown or inspected.layouts.broken,
    )


def _first(listed: Any) -> str | None:
    return str(listed[0]) if isinstance(listed, list) and listed else None


def part_of(name: str) -> str:
    """ "thinker.model.layers.0.mlp.up_proj" -> "language model"."""
    components = name.split(".")
    first = next((component for component in components if component not in _WRAPPERS), components[-1])
    return _PARTS.get(first, first)


def _parts(inspected: Inspected) -> tuple[Part, ...]:
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, tensor in inspected.checkpoint.tensors.items():
        size = sizes[part_of(split_name(name)[0])]
        size[0] += tensor.nbytes
        size[1] += 1
    quantized: dict[str, int] = defaultdict(int)
    for name in inspected.quantized_modules:
        quantized[part_of(name)] += 1
    parts = (Part(name, size, count, quantized[name]) for name, (size, count) in sizes.items())
    return tuple(sorted(parts, key=lambda part: -part.bytes))


def _serving(stated: Quantization | None, experts: bool) -> tuple[Served, ...]:
    """The servers of a checkpoint that is stored as OnPTQ stores it; nothing is known of others."""
    scheme = stated.scheme if stated is not None and stated.method == COMPRESSED else None
    if stated is None or scheme is None or stated.groups[0].format != storage_format(scheme):
        return ()
    return tuple(serving(scheme, experts))


def _makers(checkpoint: Checkpoint) -> Iterator[str]:
    """The tools that made the checkpoint, as far as its files name them."""
    section: Mapping[str, Any] = checkpoint.quantization or {}
    front = read_front_matter(checkpoint.folder)
    if isinstance(tags := front.get("tags"), list) and "onptq" in tags:
        yield f"OnPTQ ({CARD})"
    recipe = read_mapping(checkpoint.folder, "recipe.yaml")
    if recipe:
        modifiers = [name for stage in recipe.values() if isinstance(stage, dict) for name in _modifiers(stage)]
        yield f"llm-compressor (recipe.yaml{': ' + ', '.join(modifiers) if modifiers else ''})"
    if section.get("autoround_version") or section.get("quant_method") in ("auto-round", "intel/auto-round"):
        yield f"AutoRound {section.get('autoround_version') or ''}".strip()
    quantizer = (section.get("meta") or {}).get("quantizer") if isinstance(section.get("meta"), dict) else None
    if quantizer:
        yield ", ".join(map(str, quantizer if isinstance(quantizer, list) else [quantizer]))
    producer = checkpoint.json("hf_quant_config.json").get("producer") or section.get("producer")
    if isinstance(producer, dict):
        yield f"{producer.get('name', 'unknown')} {producer.get('version', '')}".strip()
    if section.get("version") and section.get("quant_method") == COMPRESSED:
        yield f"compressed-tensors {section['version']} (quantization_config)"
    if front.get("base_model"):
        yield f"base model {front['base_model']} ({CARD})"


def _modifiers(stage: Mapping[str, Any]) -> Iterator[str]:
    for modifiers in stage.values():
        if isinstance(modifiers, dict):
            yield from map(str, modifiers)


def _companions(checkpoint: Checkpoint) -> dict[str, str | None]:
    files = {role: next((name for name in names if checkpoint.has(name)), None) for role, names in _COMPANIONS.items()}
    if "talker_config" not in checkpoint.config:
        del files["speakers"]
    return files | {"chat template": chat_template(checkpoint)}
