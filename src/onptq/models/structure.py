"""The decoder of a model, its blocks and their seven linears, recognized by structure, not by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from onptq.errors import OnPTQError

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LINEARS = {name: ("self_attn", name) for name in ATTENTION} | {name: ("mlp", name) for name in MLP}
NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class Block:
    """One decoder layer. Its linears stay reachable by name after they have been wrapped."""

    index: int
    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    def owner(self, name: str) -> nn.Module:
        parent = LINEARS[name][0] if name in LINEARS else None
        return getattr(self.module, parent) if parent else self.module

    def child(self, name: str) -> nn.Module:
        child: nn.Module = getattr(self.owner(name), name)
        return child

    def replace(self, name: str, module: nn.Module) -> None:
        setattr(self.owner(name), name, module)

    def path(self, name: str) -> str:
        """The name relative to the decoder, as checkpoints spell it: `layers.3.self_attn.q_proj`."""
        return ".".join((f"layers.{self.index}", *LINEARS.get(name, (name,))))


@dataclass(frozen=True)
class Structure:
    """The language model inside a checkpoint's model: embeddings, rotary table, blocks, final norm and head."""

    decoder: nn.Module
    blocks: tuple[Block, ...]
    head: nn.Linear

    @property
    def has_plain_head(self) -> bool:
        """Whether the head multiplies with its weight as it is; one of another quantizer may not."""
        return type(self.head) is nn.Linear and getattr(self.head, "quantization_scheme", None) is None

    @property
    def embedding(self) -> nn.Embedding:
        embedding: nn.Embedding = self.decoder.embed_tokens  # type: ignore[assignment]
        return embedding


def find_structure(model: nn.Module, *, linears: type[nn.Module] = nn.Linear) -> Structure:
    """The one module with token embeddings, rotary table, final norm and layers of seven linears; and the model's head.

    `linears` is the type that linears and head must have: `nn.Module` admits packed ones of any quantizer."""
    decoders = [module for module in model.modules() if _is_decoder(module, linears)]
    if len(decoders) != 1:
        raise OnPTQError(
            f"{type(model).__name__} has {len(decoders)} language models with q/k/v/o and gate/up/down linears in "
            "every layer; expected exactly one"
        )
    decoder = decoders[0]
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, linears):
        raise OnPTQError(f"{type(model).__name__} has no linear output head; expected an autoregressive language model")
    return Structure(decoder, tuple(_blocks(decoder)), head)  # type: ignore[arg-type]


def _is_decoder(module: nn.Module, linears: type[nn.Module]) -> bool:
    if not all(hasattr(module, name) for name in ("embed_tokens", "rotary_emb", "norm", "layers")):
        return False
    layers = module.layers
    return isinstance(layers, nn.ModuleList) and len(layers) > 0 and all(_is_block(layer, linears) for layer in layers)


def _is_block(layer: nn.Module, linears: type[nn.Module]) -> bool:
    seven = all(
        isinstance(getattr(getattr(layer, parent, None), name, None), linears) for parent, name in LINEARS.values()
    )
    return seven and all(hasattr(getattr(layer, norm, None), "weight") for norm in NORMS)


def _blocks(decoder: nn.Module) -> Iterator[Block]:
    config: Any = decoder.config
    for index, layer in enumerate(decoder.layers):  # type: ignore[arg-type]
        attention = layer.self_attn
        if getattr(attention, "sliding_window", None):
            raise OnPTQError(
                f"layer {index} uses sliding-window attention ({attention.sliding_window} tokens); "
                "only full attention is supported, set use_sliding_window to false if the model allows it"
            )
        yield Block(index, layer, config.num_attention_heads, config.num_key_value_heads, attention.head_dim)
