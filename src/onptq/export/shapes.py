"""What config.json says about the shapes of the language model's tensors, held against the tensors on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onptq.export.checkpoint import LINEARS, Decoder, StoredTensor
from onptq.models.family import text_config

NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """How a compressed-tensors checkpoint stores its quantized linears."""

    bits: int
    group_size: int | None
    strategy: str

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Format | None:
        """None where nothing is quantized, or different linears in different ways."""
        groups = (config.get("quantization_config") or {}).get("config_groups") or {}
        weights = [group["weights"] for group in groups.values() if group.get("weights")]
        if len(weights) != 1:
            return None
        return cls(weights[0]["num_bits"], weights[0].get("group_size"), weights[0].get("strategy") or "tensor")

    def packed(self, shape: Shape) -> Shape | None:
        """None for widths that readers pack in different ways."""
        return (shape[0], math.ceil(shape[1] * self.bits / 32)) if 32 % self.bits == 0 else None

    def steps(self, shape: Shape) -> Shape | None:
        if self.strategy == "channel":
            return (shape[0], 1)
        if self.strategy == "group" and self.group_size:
            return (shape[0], math.ceil(shape[1] / self.group_size))
        return None


def disagreements(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], decoder: Decoder) -> list[str]:
    """Every tensor of the decoder that is not what config.json says, in words; nothing where it does not say."""
    text = text_config(config)
    if any(not isinstance(text.get(name), int) for name in NEEDED):
        return []
    found = []
    if decoder.layers != text["num_hidden_layers"]:
        found.append(f"there are {decoder.layers} layers, config.json says {text['num_hidden_layers']}")
    stored = Format.read(config)
    for name, shape in _linears(text, min(decoder.layers, text["num_hidden_layers"])):
        found += _linear_disagreements(f"{decoder.prefix}{name}", shape, tensors, stored)
    if isinstance(text.get("vocab_size"), int):
        expected = {f"{decoder.prefix}embed_tokens.weight": (text["vocab_size"], text["hidden_size"])}
        found += _differing(expected, tensors)
    return found


def _linears(text: Mapping[str, Any], layers: int) -> Iterator[tuple[str, Shape]]:
    hidden, ffn, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    head = text.get("head_dim") or hidden // heads
    queries, keys = heads * head, (text.get("num_key_value_heads") or heads) * head
    shapes = (
        (queries, hidden),
        (keys, hidden),
        (keys, hidden),
        (hidden, queries),
        (ffn, hidden),
        (ffn, hidden),
        (hidden, ffn),
    )
    for layer in range(layers):
        for name, shape in zip(LINEARS, shapes, strict=True):
            yield f"layers.{layer}.{name}", shape


def _linear_disagreements(
    key: str, shape: Shape, tensors: Mapping[str, StoredTensor], stored: Format | None
) -> list[str]:
    expected: dict[str, Shape | None] = {f"{key}.weight": shape}
    if stored is not None:
        expected |= {f"{key}.weight_packed": stored.packed(shape), f"{key}.weight_scale": stored.steps(shape)}
    return _differing(expected, tensors)


def _differing(expected: Mapping[str, Shape | None], tensors: Mapping[str, StoredTensor]) -> list[str]:
    return [
        f"{name} is {list(tensors[name].shape)}, config.json says {list(shape)}"
        for name, shape in expected.items()
        if shape is not None and name in tensors and tensors[name].shape != shape
    ]
