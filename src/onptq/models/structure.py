"""The decoder of a model, its blocks and their seven linears, recognized by structure, not by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from onptq.errors import OnPTQError

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LINEARS = {name: ("self_attn", name) for name in ATTENTION} | {name: ("mlp", name) for name in MLP}
NORMS = ("input_layernorm", "post_attention_layernorm")

# (usual producer, consumers): s divides what the producer emits and multiplies the consumers' input columns
PAIRS: dict[str, tuple[str, tuple[str, ...]]] = {
    "norm_qkv": ("input_layernorm", ("q_proj", "k_proj", "v_proj")),
    "norm_gate_up": ("post_attention_layernorm", ("gate_proj", "up_proj")),
    "v_o": ("v_proj", ("o_proj",)),
    "up_down": ("up_proj", ("down_proj",)),
}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # layer types of transformers
BEFORE_MLP = "pre_feedforward_layernorm"
PRODUCERS = {pair: producer for pair, (producer, _) in PAIRS.items()}


Rotary = Mapping[str, tuple[Tensor, Tensor]]  # cosines and sines by layer type


@dataclass(frozen=True)
class Block:
    """One decoder layer. Its linears stay reachable by name after they have been wrapped."""

    index: int
    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    producers: Mapping[str, str] = field(default_factory=lambda: PRODUCERS)  # by pair; only pairs that fold
    layer_type: str = FULL
    window: int | None = None  # tokens that a query of sliding-window attention sees, itself among them
    chunk: int | None = None  # tokens of a chunk, beyond which chunked attention sees nothing
    wants_positions: bool = False  # beside the rotary embedding

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms that smoothing folds into."""
        return tuple(name for name in self.producers.values() if name not in LINEARS)

    def pair_out_of(self, producer: str) -> str | None:
        """The pair whose smoothing divides what a norm or linear emits; None where nothing is divided."""
        return next((pair for pair, name in self.producers.items() if name == producer), None)

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
    def axes(self) -> int:
        """Axes of a position: three under M-RoPE, else one."""
        rope = getattr(self.decoder.config, "rope_parameters", None) or {}
        return 3 if "mrope_section" in rope else 1

    @property
    def narrowed(self) -> bool:
        """Whether any block sees fewer tokens than all before it."""
        return any(block.window or block.chunk for block in self.blocks)

    def arguments(self, block: Block, positions: Tensor, mask: Tensor | None, rotary: Rotary, cache: Any = None) -> Any:
        """The keyword arguments of a block, or of its attention, for tokens at positions [A, B, S]."""
        arguments = {
            "attention_mask": mask,
            "position_embeddings": rotary[block.layer_type],
            "past_key_values": cache,
        }
        if block.wants_positions:
            arguments["position_ids"] = positions[0]
        return arguments

    def rotary(self, hidden: Tensor, positions: Tensor) -> Rotary:
        """Cosines and sines of positions [A, B, S], by layer type."""
        embed: Any = self.decoder.rotary_emb
        at = positions if positions.shape[0] > 1 else positions[0]
        types = dict.fromkeys(block.layer_type for block in self.blocks)
        if "layer_type" in signature(embed.forward).parameters:
            return {layer_type: embed(hidden, at, layer_type) for layer_type in types}
        return dict.fromkeys(types, embed(hidden, at))

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
        near = "" if decoders else "".join(f"; {lack}" for lack in _lacks(model, linears))
        raise OnPTQError(
            f"{type(model).__name__} has {len(decoders)} language models with q/k/v/o and gate/up/down linears in "
            f"every layer; expected exactly one{near}"
        )
    decoder = decoders[0]
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, linears):
        raise OnPTQError(f"{type(model).__name__} has no linear output head; expected an autoregressive language model")
    structure = Structure(decoder, tuple(_blocks(decoder)), head)  # type: ignore[arg-type]
    if structure.narrowed and structure.axes > 1:
        raise OnPTQError(f"{type(decoder).__name__} has sliding-window attention over M-RoPE positions: unsupported")
    return structure


def _lacks(model: nn.Module, linears: type[nn.Module]) -> Iterator[str]:
    """What the first unsuitable layer of everything that has embeddings and layers lacks."""
    for path, module in model.named_modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and hasattr(module, "embed_tokens"):
            for index, layer in enumerate(module.layers):  # type: ignore[arg-type]
                if not _is_block(layer, linears):
                    parts = [".".join(place) for place in LINEARS.values()]
                    missing = [part for part in parts if not isinstance(_part(layer, part), linears)]
                    missing += [
                        f"a weight of {norm}" for norm in NORMS if not hasattr(getattr(layer, norm, None), "weight")
                    ]
                    yield f"{path}: layers.{index} ({type(layer).__name__}) lacks {', '.join(missing)}"
                    break


def _part(layer: nn.Module, path: str) -> Any:
    parent, name = path.split(".")
    return getattr(getattr(layer, parent, None), name, None)


def _is_decoder(module: nn.Module, linears: type[nn.Module]) -> bool:
    if not all(hasattr(module, name) for name in ("embed_tokens", "rotary_emb", "norm", "layers")):
        return False
    layers = module.layers
    return isinstance(layers, nn.ModuleList) and len(layers) > 0 and all(_is_block(layer, linears) for layer in layers)


def _is_block(layer: nn.Module, linears: type[nn.Module]) -> bool:
    seven = all(isinstance(_part(layer, ".".join(place)), linears) for place in LINEARS.values())
    return seven and all(hasattr(getattr(layer, norm, None), "weight") for norm in NORMS)


def _blocks(decoder: nn.Module) -> Iterator[Block]:
    config: Any = decoder.config
    types = getattr(config, "layer_types", None)
    for index, layer in enumerate(decoder.layers):  # type: ignore[arg-type]
        attention = layer.self_attn
        window = getattr(attention, "sliding_window", None) or (
            None if types else getattr(config, "sliding_window", None)
        )
        layer_type = types[index] if types else SLIDING if window else FULL
        if layer_type not in (FULL, SLIDING, CHUNKED):
            raise OnPTQError(
                f"layer {index} ({type(layer).__name__}) is of type {layer_type!r}; expected one of {FULL}, {SLIDING}, "
                f"{CHUNKED}"
            )
        yield Block(
            index,
            layer,
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
            _producers(layer),
            layer_type,
            (window or config.sliding_window) if layer_type == SLIDING else None,
            config.attention_chunk_size if layer_type == CHUNKED else None,
            _requires(attention, "position_ids"),
        )


def _requires(module: nn.Module, argument: str) -> bool:
    parameter = signature(module.forward).parameters.get(argument)
    return parameter is not None and parameter.default is Parameter.empty


def _producers(layer: nn.Module) -> Mapping[str, str]:
    """The producers of a block's pairs: with sandwich norms, gate and up read a norm of their own."""
    return PRODUCERS | {"norm_gate_up": BEFORE_MLP} if hasattr(layer, BEFORE_MLP) else PRODUCERS
