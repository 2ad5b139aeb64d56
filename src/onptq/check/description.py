"""What a checkpoint is: its parts, its number formats, its maker, what lies beside it, and who can serve it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from onptq.check.folder_checks import GENERATION, PROCESSORS, SPEAKERS, TEMPLATES, TOKENIZERS
from onptq.check.subject import Subject
from onptq.checkpoint.folder import Checkpoint, split_name
from onptq.checkpoint.quantization import COMPRESSED, Quantization
from onptq.checkpoint.serving import Served, serving
from onptq.checkpoint.write import storage_format

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
    "processor": PROCESSORS,
    "chat template": TEMPLATES,
    "generation config": (GENERATION,),
    "speakers": (SPEAKERS,),
    "model card": ("README.md",),
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
    unchecked: str | None  # why names and shapes could not be held against the model


def describe(subject: Subject) -> Description:
    reading, stated = subject.reading, subject.quantization
    config, scheme = reading.config, stated.scheme if stated else None
    kinds: dict[str, int] = defaultdict(int)
    for kind in subject.quantized_modules.values():
        kinds[kind] += 1
    return Description(
        folder=str(reading.folder),
        architecture=next(iter(config.get("architectures") or ()), None),
        family=subject.family.name if subject.family else None,
        transformers_version=config.get("transformers_version"),
        model_classes=tuple(layout.model_class for layout in subject.layouts.each),
        bytes=sum(shard.actual_bytes for shard in reading.shards),
        shards=len(reading.shards),
        parts=_parts(subject),
        quantization=stated,
        scheme=str(scheme) if scheme else None,
        stored_as=dict(kinds),
        makers=tuple(_makers(reading)),
        companions=_companions(reading),
        serving=_serving(stated),
        unchecked=subject.layouts.unknown or subject.layouts.broken,
    )


def part_of(name: str) -> str:
    """ "thinker.model.layers.0.mlp.up_proj" -> "language model"."""
    components = name.split(".")
    first = next((component for component in components if component not in _WRAPPERS), components[-1])
    return _PARTS.get(first, first)


def _parts(subject: Subject) -> tuple[Part, ...]:
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, tensor in subject.reading.tensors.items():
        size = sizes[part_of(split_name(name)[0])]
        size[0] += tensor.nbytes
        size[1] += 1
    quantized: dict[str, int] = defaultdict(int)
    for name in subject.quantized_modules:
        quantized[part_of(name)] += 1
    parts = (Part(name, size, count, quantized[name]) for name, (size, count) in sizes.items())
    return tuple(sorted(parts, key=lambda part: -part.bytes))


def _serving(stated: Quantization | None) -> tuple[Served, ...]:
    """The table is of checkpoints stored as OnPTQ stores them; of others it would say what nobody has seen."""
    scheme = stated.scheme if stated is not None and stated.method == COMPRESSED else None
    if stated is None or scheme is None or stated.groups[0].format != storage_format(scheme):
        return ()
    return tuple(serving(scheme))


def _makers(reading: Checkpoint) -> Iterator[str]:
    """Only what the files say."""
    section: Mapping[str, Any] = reading.quantization or {}
    front = _front_matter(reading)
    if "onptq" in (front.get("tags") or ()):
        yield "OnPTQ (README.md)" + (f", method {front['method']}" if front.get("method") else "")
    recipe = _yaml(reading, "recipe.yaml")
    if recipe:
        steps = [name for stage in recipe.values() if isinstance(stage, dict) for name in _modifiers(stage)]
        yield f"llm-compressor (recipe.yaml{': ' + ', '.join(steps) if steps else ''})"
    if section.get("autoround_version") or section.get("quant_method") in {"auto-round", "intel/auto-round"}:
        yield f"AutoRound {section.get('autoround_version') or ''}".strip()
    quantizer = (section.get("meta") or {}).get("quantizer") if isinstance(section.get("meta"), dict) else None
    if quantizer:
        yield ", ".join(map(str, quantizer if isinstance(quantizer, list) else [quantizer]))
    producer = reading.json("hf_quant_config.json").get("producer") or section.get("producer")
    if isinstance(producer, dict):
        yield f"{producer.get('name', 'unknown')} {producer.get('version', '')}".strip()
    if section.get("version") and section.get("quant_method") == COMPRESSED:
        yield f"compressed-tensors {section['version']} (quantization_config)"
    if front.get("base_model"):
        yield f"base model {front['base_model']} (README.md)"


def _modifiers(stage: Mapping[str, Any]) -> Iterator[str]:
    for modifiers in stage.values():
        if isinstance(modifiers, dict):
            yield from map(str, modifiers)


def _front_matter(reading: Checkpoint) -> dict[str, Any]:
    try:
        text = (reading.folder / "README.md").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    if not text.startswith("---\n"):
        return {}
    return _parse(text[4:].partition("\n---")[0])


def _yaml(reading: Checkpoint, name: str) -> dict[str, Any]:
    try:
        return _parse((reading.folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _parse(text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def _companions(reading: Checkpoint) -> dict[str, str | None]:
    found = {role: next((name for name in names if reading.has(name)), None) for role, names in _COMPANIONS.items()}
    if found["chat template"] is None and reading.json("tokenizer_config.json").get("chat_template"):
        found["chat template"] = "tokenizer_config.json"
    if "talker_config" not in reading.config:
        del found["speakers"]
    return found
