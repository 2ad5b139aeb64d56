"""The decoder of a model, its blocks and their linears, recognized by structure, not by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from onptq.errors import OnPTQError
from onptq.models.experts import Experts, experts_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LINEARS = {name: ("self_attn", name) for name in ATTENTION} | {name: ("mlp", name) for name in MLP}
QKV, GATE_UP = "qkv_proj", "gate_up_proj"  # linears that some classes fuse, their parts row by row
DELTA_NET = ("in_proj_qkv", "in_proj_z", "out_proj")  # of a gated delta net, in place of an attention's four
PLACES = LINEARS | {QKV: ("self_attn", QKV), GATE_UP: ("mlp", GATE_UP)}
PLACES |= {name: ("linear_attn", name) for name in DELTA_NET}
NORMS = ("input_layernorm", "post_attention_layernorm")

# (usual producer, consumers): s divides what the producer emits and multiplies the consumers' input columns
PAIRS: dict[str, tuple[str, tuple[str, ...]]] = {
    "norm_qkv": ("input_layernorm", ("q_proj", "k_proj", "v_proj")),
    "norm_gate_up": ("post_attention_layernorm", ("gate_proj", "up_proj")),
    "v_o": ("v_proj", ("o_proj",)),
    "up_down": ("up_proj", ("down_proj",)),
}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # layer types of transformers
RECURRENT = "linear_attention"
POSITIONS, SHARED = "position_ids", "shared_kv_states"  # arguments that some attentions require
BESIDE = "per_layer_input"  # the argument of layers that read an input of their own
BEFORE_MLP = "pre_feedforward_layernorm"
EXPERTS, UP_DOWN = "mlp.experts.", "up_down"  # how an expert's names begin, and how that of its pair ends
PRODUCERS = {pair: producer for pair, (producer, _) in PAIRS.items()}
IN_ORDER = ("norm_qkv", "v_o", "norm_gate_up", "up_down")  # as a block runs them
READERS = {pair: PAIRS[pair][1] for pair in IN_ORDER}
DELTA_NET_READERS = READERS | {"norm_qkv": ("in_proj_qkv", "in_proj_z"), "v_o": ("out_proj",)}
DELTA_NET_FOLLOWING = {"norm_qkv": ("linear_attn.in_proj_b", "linear_attn.in_proj_a")}  # of decays and update rates
GATED_NORM = "linear_attn.norm"  # its gain is shared by all heads


def place(name: str) -> str:
    """The name of a norm or linear within its layer: `self_attn.q_proj` of `q_proj`, anything else as it is."""
    return ".".join(PLACES.get(name, (name,)))


Rotary = Mapping[str, tuple[Tensor, Tensor]]  # cosines and sines by layer type
Lent = dict[str, tuple[Tensor, ...]]  # keys and values that a layer leaves to later ones of its type


@dataclass(frozen=True)
class Block:
    """One decoder layer. Its linears stay reachable by name after they have been wrapped.

    Of a gated delta net, `heads` and `head_dim` are those of the values, and `kv_heads` is 1: all heads share one gain."""

    index: int
    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    producers: Mapping[str, str] = field(default_factory=lambda: PRODUCERS)  # by pair; only pairs that fold
    readers: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: READERS
    )  # linears by pair, as a block runs them
    layer_type: str = FULL
    window: int | None = None  # tokens that a query of sliding-window attention sees, itself among them
    chunk: int | None = None  # tokens of a chunk, beyond which chunked attention sees nothing
    wants: frozenset[str] = frozenset()  # arguments that its attention requires besides the usual ones
    borrows: bool = False  # whether it reads the keys and values of an earlier layer of its type
    lends: bool = False  # whether later layers read its own
    following: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # 16-bit matrices by the pair that they read

    @property
    def recurrent(self) -> bool:
        """Whether it carries a state from token to token instead of keys and values."""
        return self.layer_type == RECURRENT

    @cached_property
    def linears(self) -> tuple[str, ...]:
        """The linears that are quantized, in the order in which the block runs them."""
        return tuple(name for names in self.readers.values() for name in names)

    @property
    def pairs(self) -> tuple[str, ...]:
        """The pairs, foldable or not, in the order in which the block runs them: each is one input of linears."""
        return tuple(self.readers)

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms that smoothing folds into."""
        return tuple(name for name in self.producers.values() if name not in self.linears)

    def consumers(self, pair: str) -> tuple[str, ...]:
        """The linears whose input columns a pair's smoothing multiplies."""
        return self.readers.get(pair, ())

    def followers(self, pair: str) -> tuple[str, ...]:
        """What reads the same as a pair's consumers and stays 16-bit: smoothing multiplies its columns too."""
        return self.following.get(pair, ())

    def pair_into(self, name: str) -> str:
        """The pair that a linear or a follower reads."""
        return self._into[name]

    @property
    def experts(self) -> Experts | None:
        """The experts beside which a router decides; None in a dense block."""
        return experts_of(self.module)

    def reading(self, pair: str) -> nn.Module:
        """A module whose input is what a pair's consumers read, all tokens of it."""
        routed = self.experts is not None and pair == "norm_gate_up"
        return self.module.get_submodule("mlp") if routed else self.child(self.consumers(pair)[0])

    @cached_property
    def _out_of(self) -> dict[str, str]:
        return {name: pair for pair, name in reversed(list(self.producers.items()))}  # of two the first

    @cached_property
    def _into(self) -> dict[str, str]:
        return {name: pair for pair in self.readers for name in (*self.consumers(pair), *self.followers(pair))}

    def emitted(self, producer: str) -> int:
        """The first row of a producer that its smoothing divides: values are the last of q, k, v, and up is behind gate."""
        if producer == QKV:
            return (self.heads + self.kv_heads) * self.head_dim
        rows: int = self.child(producer).weight.shape[0]  # type: ignore[union-attr, index, assignment]
        return rows // 2 if producer == GATE_UP else 0

    def pair_out_of(self, producer: str) -> str | None:
        """The pair whose smoothing divides what a norm or linear emits; None where nothing is divided."""
        return self._out_of.get(producer)

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    def owner(self, name: str) -> nn.Module:
        return self.module.get_submodule(place(name).rpartition(".")[0])

    def child(self, name: str) -> nn.Module:
        return self.module.get_submodule(place(name))

    def replace(self, name: str, module: nn.Module) -> None:
        setattr(self.owner(name), place(name).rpartition(".")[2], module)

    def path(self, name: str) -> str:
        """The name relative to the decoder, as checkpoints spell it: `layers.3.self_attn.q_proj`."""
        return f"layers.{self.index}.{place(name)}"


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
        return 3 if "mrope_section" in rope or hasattr(self.decoder.rotary_emb, "mrope_section") else 1

    @property
    def types(self) -> tuple[str, ...]:
        """The layer types that it has."""
        return tuple(dict.fromkeys(block.layer_type for block in self.blocks))

    @property
    def routed(self) -> bool:
        """Whether tokens go to experts that only the values decide."""
        return any(block.experts is not None for block in self.blocks)

    @property
    def recurrent(self) -> bool:
        """Whether any block carries a state from token to token."""
        return any(block.recurrent for block in self.blocks)

    @property
    def narrowed(self) -> bool:
        """Whether any block sees fewer tokens than all before it."""
        return any(block.window or block.chunk for block in self.blocks)

    def arguments(
        self,
        block: Block,
        positions: Tensor,
        mask: Tensor | None,
        rotary: Rotary,
        cache: Any = None,
        lent: Lent | None = None,
    ) -> Any:
        """The keyword arguments of a block, or of its attention, for tokens at positions [A, B, S].

        What it lends comes into `lent`, and what it borrows is there."""
        arguments = {
            "attention_mask": mask,
            "position_embeddings": rotary[block.layer_type],
            "past_key_values": cache,
        }
        if POSITIONS in block.wants:
            arguments[POSITIONS] = positions[0]
        if SHARED in block.wants:
            arguments[SHARED] = {} if lent is None else lent
        return arguments

    def rotary(self, hidden: Tensor, positions: Tensor) -> Rotary:
        """Cosines and sines of positions [A, B, S], by layer type."""
        embed: Any = self.decoder.rotary_emb
        at = positions if positions.shape[0] > 1 else positions[0]
        if "layer_type" in signature(embed.forward).parameters:
            return {layer_type: embed(hidden, at, layer_type) for layer_type in self.types}
        return dict.fromkeys(self.types, embed(hidden, at))

    @property
    def has_plain_head(self) -> bool:
        """Whether the head multiplies with its weight as it is; one of another quantizer may not."""
        return type(self.head) is nn.Linear and getattr(self.head, "quantization_scheme", None) is None

    @property
    def cap(self) -> float | None:
        """The largest logit, if the model caps them as Gemma does: cap * tanh(logit / cap)."""
        cap: float | None = getattr(self.decoder.config, "final_logit_softcapping", None)
        return cap

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @property
    def embedding(self) -> nn.Embedding:
        embedding: nn.Embedding = self.decoder.embed_tokens  # type: ignore[assignment]
        return embedding

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.embedding.weight.shape[1]

    @property
    def beside(self) -> int:
        """The width of the inputs of their own that all layers read, side by side; mostly 0."""
        each: int = getattr(self.decoder.config, "hidden_size_per_layer_input", None) or 0
        return each * len(self.blocks)

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings of tokens, with all that layers read of them."""
        embeds = self.embedding(ids)
        if self.beside:
            return self.widened(embeds, self.decoder.get_per_layer_inputs(ids, embeds))  # type: ignore[operator]
        return embeds  # type: ignore[no-any-return]

    def widened(self, embeds: Tensor, inputs: Tensor | None) -> Tensor:
        """Embeddings [..., d] with the inputs of every layer behind them, made of `inputs` as the decoder's forward does."""
        if not self.beside:
            return embeds
        each: Tensor = self.decoder.project_per_layer_inputs(embeds, inputs)  # type: ignore[operator]
        return torch.cat((embeds, each.flatten(-2)), dim=-1)

    def parted(self, embeds: Tensor) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """The residual stream of what `embed` gives, and every block's argument of its own."""
        hidden, rest = embeds.split((self.width, self.beside), dim=-1)
        each = rest.unflatten(-1, (len(self.blocks), -1)).unbind(-2) if self.beside else ()
        return hidden, [{BESIDE: one} for one in each] or [{}] * len(self.blocks)


def find_structure(model: nn.Module, *, linears: type[nn.Module] = nn.Linear) -> Structure:
    """The one module with token embeddings, rotary table, final norm and layers of known linears; and the model's head.

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
                    missing = _missing(layer, linears)
                    missing += [
                        f"a weight of {norm}" for norm in NORMS if not hasattr(getattr(layer, norm, None), "weight")
                    ]
                    yield f"{path}: layers.{index} ({type(layer).__name__}) lacks {', '.join(missing)}"
                    break


def _is_decoder(module: nn.Module, linears: type[nn.Module]) -> bool:
    if not all(hasattr(module, name) for name in ("embed_tokens", "rotary_emb", "norm", "layers")):
        return False
    layers = module.layers
    return isinstance(layers, nn.ModuleList) and len(layers) > 0 and all(_is_block(layer, linears) for layer in layers)


def _is_block(layer: nn.Module, linears: type[nn.Module]) -> bool:
    return not _missing(layer, linears) and all(hasattr(getattr(layer, norm, None), "weight") for norm in NORMS)


def _missing(layer: nn.Module, linears: type[nn.Module]) -> list[str]:
    """The linears that a layer should have and has neither alone nor fused; values may be keys (Gemma 4's v_proj is None).

    Experts have theirs in place of an MLP's."""

    def has(name: str) -> bool:
        parent, child = PLACES[name]
        return isinstance(getattr(getattr(layer, parent, None), child, None), linears)

    expected = (*(DELTA_NET if hasattr(layer, "linear_attn") else ATTENTION), *MLP)
    missing = [name for name in expected if not has(name)]
    if has(QKV):
        missing = [name for name in missing if name not in PAIRS["norm_qkv"][1]]
    if has(GATE_UP):
        missing = [name for name in missing if name not in PAIRS["norm_gate_up"][1]]
    if experts_of(layer) is not None:
        missing = [name for name in missing if name not in MLP]
    if missing == ["v_proj"] and getattr(getattr(layer, "self_attn", None), "v_proj", layer) is None:
        missing = []
    if missing == ["k_proj", "v_proj"] and _borrows(layer):
        missing = []
    return [place(name) for name in missing]


def _borrows(layer: nn.Module) -> bool:
    """Whether its attention has queries alone, and takes keys and values of another layer."""
    attention: Any = getattr(layer, "self_attn", None)
    return attention is not None and not hasattr(attention, "k_proj") and _requires(attention, SHARED)


def _readers(layer: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """The linears of a layer by the pair that they read."""

    def has(name: str) -> bool:
        return getattr(getattr(layer, PLACES[name][0]), name, None) is not None

    fused = {"norm_qkv": (QKV,), "norm_gate_up": (GATE_UP,)}
    if hasattr(layer, "linear_attn"):
        readers = dict(DELTA_NET_READERS)
    else:
        readers = {pair: tuple(filter(has, (*READERS[pair], *fused.get(pair, ())))) for pair in IN_ORDER}
    if parts := _parts(layer):
        readers["norm_gate_up"] = tuple(f"{part}.{name}" for part in parts for name in READERS["norm_gate_up"])
        del readers["up_down"]
        readers |= {f"{part}.{UP_DOWN}": (f"{part}.down_proj",) for part in parts}
    return readers


def _parts(layer: nn.Module) -> tuple[str, ...]:
    """The gated MLPs side by side in a layer with experts, what all tokens share first; none in a dense layer."""
    experts = experts_of(layer)
    if experts is None:
        return ()
    beside = layer.mlp.named_children()  # type: ignore[union-attr, operator]
    shared = [f"mlp.{name}" for name, child in beside if all(hasattr(child, linear) for linear in MLP)]
    return (*shared, *(f"{EXPERTS}{index}" for index in range(len(experts))))


def _following(layer: nn.Module) -> dict[str, tuple[str, ...]]:
    """What reads a norm beside the linears and stays 16-bit: a router, the gate of what all tokens share."""
    if experts_of(layer) is None:
        return {}
    parts, following = _parts(layer), []
    for name, child in layer.mlp.named_children():  # type: ignore[union-attr, operator]
        parameters = dict(child.named_parameters())
        if isinstance(child, Experts) or f"mlp.{name}" in parts or not parameters:
            continue
        if set(parameters) != {"weight"} or parameters["weight"].dim() != 2:
            raise OnPTQError(
                f"{type(layer).__name__}: mlp.{name} ({type(child).__name__}) beside the experts has "
                f"{', '.join(parameters)}; expected one matrix called weight"
            )
        following.append(f"mlp.{name}")
    return {"norm_gate_up": tuple(following)}


def _blocks(decoder: nn.Module) -> Iterator[Block]:
    """The blocks; those that borrow keys and values do so from the last one of their type that has its own."""
    blocks = list(_own_blocks(decoder))
    lenders = {block.layer_type: block for block in blocks if not block.borrows}
    borrowed = {block.layer_type for block in blocks if block.borrows}
    for block in blocks:
        lender = lenders.get(block.layer_type)
        if lender is None or (block.borrows and lender.index > block.index):
            raise OnPTQError(
                f"layer {block.index} ({type(block.module).__name__}) has no keys and values, and no layer before it of "
                f"type {block.layer_type} lends any"
            )
        if block.borrows:
            yield replace(block, kv_heads=lender.kv_heads)
        else:
            yield replace(block, lends=block is lender and block.layer_type in borrowed)


def _own_blocks(decoder: nn.Module) -> Iterator[Block]:
    config: Any = decoder.config
    types = getattr(config, "layer_types", None)
    for index, layer in enumerate(decoder.layers):  # type: ignore[arg-type]
        if hasattr(layer, "linear_attn"):
            yield _delta_net(index, layer)
            continue
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
            _heads(attention, "o_proj", "in_features") or config.num_attention_heads,
            _heads(attention, "k_proj", "out_features") or config.num_key_value_heads,
            attention.head_dim,
            _producers(layer),
            _readers(layer),
            layer_type,
            (window or config.sliding_window) if layer_type == SLIDING else None,
            config.attention_chunk_size if layer_type == CHUNKED else None,
            frozenset(name for name in (POSITIONS, SHARED) if _requires(attention, name)),
            _borrows(layer),
            following=_following(layer),
        )


def _delta_net(index: int, layer: nn.Module) -> Block:
    net: Any = layer.linear_attn
    return Block(
        index,
        layer,
        net.num_v_heads,
        1,
        net.head_v_dim,
        _of_parts(layer, PRODUCERS | {"v_o": GATED_NORM}),
        _readers(layer),
        RECURRENT,
        following=DELTA_NET_FOLLOWING | _following(layer),
    )


def _requires(module: nn.Module, argument: str) -> bool:
    parameter = signature(module.forward).parameters.get(argument)
    return parameter is not None and parameter.default is Parameter.empty


def _producers(layer: nn.Module) -> Mapping[str, str]:
    """The producers of a block's pairs: with sandwich norms, gate and up read a norm of their own."""
    producers = dict(PRODUCERS)
    if hasattr(layer, BEFORE_MLP):
        producers["norm_gate_up"] = BEFORE_MLP
    present = [name for names in _readers(layer).values() for name in names]
    if QKV in present:
        producers["v_o"] = QKV
    elif "v_proj" not in present:
        del producers["v_o"]
    if GATE_UP in present:
        producers["up_down"] = GATE_UP
    return _of_parts(layer, producers)


def _of_parts(layer: nn.Module, producers: dict[str, str]) -> dict[str, str]:
    """The producers with a pair for each gated MLP of a layer with experts."""
    parts = _parts(layer)
    kept = {pair: name for pair, name in producers.items() if not parts or pair != "up_down"}
    return kept | {f"{part}.{UP_DOWN}": f"{part}.up_proj" for part in parts}


def _heads(attention: Any, name: str, features: str) -> int:
    """The heads of one layer by a linear's width; those of another type may have fewer. 0 where it is not a plain one."""
    linear = getattr(attention, name, None)
    return getattr(linear, features) // attention.head_dim if type(linear) is nn.Linear else 0
