"""The language model among the tensors of a checkpoint: its names, its dtype, and the shapes that config.json gives."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onptq.checkpoint.folder import DENSE, Checkpoint, StoredTensor
from onptq.errors import OnPTQError
from onptq.models import structure
from onptq.models.family import text_config, thinker_config

LINEARS = tuple(".".join(path) for path in structure.LINEARS.values())  # "self_attn.q_proj", ..., "mlp.down_proj"
LAYERS = 1000  # that a model may have, however few tensors are there
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_OTHER_SIZES = ("num_key_value_heads", "head_dim")  # that follow from these where they are not given
_DEPTHS = ("num_hidden_layers", "depth", "encoder_layers")  # of the language model and its towers
_QUERY = re.compile(r"((?:.*\.)?)layers\.(\d+)\.(?:self_attn\.(?:q|qkv)_proj|linear_attn\.in_proj_qkv)\.weight")


@dataclass(frozen=True)
class Decoder:
    """The language model inside a checkpoint: `prefix` + `layers.{i}.self_attn.q_proj` and so on."""

    prefix: str
    layers: int
    own: tuple[str, ...] = ()  # linears of a class that has others than the usual seven, relative to the decoder

    @property
    def linears(self) -> tuple[str, ...]:
        """Names relative to the decoder, in layer order."""
        return self.own or tuple(f"layers.{layer}.{name}" for layer in range(self.layers) for name in LINEARS)


def find_decoder(names: Collection[str], excluded: Sequence[str], own: tuple[str, ...] = ()) -> Decoder:
    """The one stack of layers that holds all seven linears and lies in no tower and no other model.

    `names` are tensor names of a checkpoint or parameter names of a model; `excluded` are `re:` patterns or name
    prefixes; `own` are the linears of a class that has others, relative to its decoder.
    """
    names = names if isinstance(names, (set, frozenset, dict)) else set(names)
    stacks: dict[str, set[int]] = defaultdict(set)
    for name in names:
        match = _QUERY.fullmatch(name)
        if match and not any(matches(name, pattern) for pattern in excluded):
            stacks[match[1]].add(int(match[2]))
    complete = {prefix: layers for prefix, layers in stacks.items() if _is_complete(names, prefix, layers, own)}
    if len(complete) != 1:
        missing = [] if complete or len(stacks) != 1 else _missing(names, *next(iter(stacks.items())), own)
        if missing:
            raise OnPTQError(f"the weights lack {len(missing)} tensors of the language model, e.g. {missing[0]}")
        candidates = ", ".join(f"{prefix}layers.*" for prefix in sorted(complete or stacks)) or "none"
        count = "more than one language model" if complete else "no language model"
        raise OnPTQError(
            f"{count} among the tensors: expected exactly one stack of layers 0..n whose every layer has "
            f"{', '.join(LINEARS)}; candidates: {candidates}"
        )
    prefix, layers = complete.popitem()
    return Decoder(prefix, len(layers), own)


def storage_dtype(checkpoint: Checkpoint, decoder: Decoder) -> str:
    """The dtype, by safetensors' name, that all linears of the decoder are stored in. Refuse a mixture and integers."""
    keys = (f"{decoder.prefix}{name}.weight" for name in decoder.linears)
    examples: dict[str, str] = {}
    for key in keys:
        examples.setdefault(checkpoint.tensors[key].dtype, key)
    if len(examples) > 1 or not examples.keys() <= set(DENSE):
        stored = " and ".join(f"{dtype} ({key})" for dtype, key in sorted(examples.items()))
        raise OnPTQError(
            f"{checkpoint.folder}: the linears of the language model are stored as {stored}; expected a dense checkpoint "
            f"with all of them in one of {', '.join(DENSE)}"
        )
    return next(iter(examples))


def matches(name: str, pattern: str) -> bool:
    """Whether compressed-tensors finds `name` in an ignore list; a plain pattern also covers everything below it."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return name == pattern or name.startswith(pattern.rstrip(".") + ".")


def disagreements(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], decoder: Decoder) -> list[str]:
    """A sentence on every dense tensor of the decoder whose shape is not the one that config.json gives."""
    text = text_config(config)
    if decoder.own:
        return []  # layers of other sizes than config.json has names for; the class itself checks them when it loads
    given = [name for name in _SIZES if name in text] + [name for name in _OTHER_SIZES if text.get(name) is not None]
    wrong = [f"config.json says {name} is {text[name]!r}" for name in given if not _is_size(text[name])]
    if wrong or not all(name in text for name in _SIZES):
        return wrong
    if decoder.layers != text["num_hidden_layers"]:
        wrong.append(f"there are {decoder.layers} layers, config.json says {text['num_hidden_layers']}")
    expected = dict(_shapes(text, min(decoder.layers, text["num_hidden_layers"])))
    if isinstance(text.get("vocab_size"), int):
        expected["embed_tokens"] = (text["vocab_size"], text["hidden_size"])
    for name, shape in expected.items():
        stored = tensors.get(f"{decoder.prefix}{name}.weight")
        if stored is not None and stored.shape != shape:
            wrong.append(f"{decoder.prefix}{name}.weight is {list(stored.shape)}, config.json says {list(shape)}")
    return wrong


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 1


def too_deep(config: Mapping[str, Any], modules: int) -> str | None:
    """How config.json has more layers than so many modules can fill, which would take for ever to build; else None."""
    inner = thinker_config(config)
    parts = (text_config(config), inner.get("vision_config"), inner.get("audio_config"))
    given = (part.get(key) for part in parts if isinstance(part, Mapping) for key in _DEPTHS)
    layers = max((depth for depth in given if isinstance(depth, int)), default=0)
    return f"it has {layers:,} layers, the shards have {modules:,} modules" if layers > max(LAYERS, modules) else None


def _shapes(text: Mapping[str, Any], layers: int) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, ffn, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    head = text.get("head_dim") or hidden // heads
    queries, keys = heads * head, (text.get("num_key_value_heads") or heads) * head
    attention = ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
    for layer in range(layers):
        for name, shape in zip(LINEARS, (*attention, (ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True):
            yield f"layers.{layer}.{name}", shape


def _is_complete(names: Collection[str], prefix: str, layers: set[int], own: Sequence[str]) -> bool:
    return layers == set(range(len(layers))) and not _missing(names, prefix, layers, own)


def _missing(names: Collection[str], prefix: str, layers: set[int], own: Sequence[str]) -> list[str]:
    linears = own or [f"layers.{layer}.{name}" for layer in sorted(layers) for name in LINEARS]
    expected = (f"{prefix}{name}.weight" for name in linears)
    return [name for name in expected if name not in names]
