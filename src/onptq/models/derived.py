"""A family found by structure: what transformers' class for a model_type and the checkpoint's names say about it.

The class is built on the meta device, without a weight. Its decoder must be one whose blocks run as every other's; all
that lies outside of it is a tower.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from typing import Any

from onptq.errors import OnPTQError
from onptq.models.family import Family, ImagePlaceholder, thinker_config

AUTO_CLASSES = (  # of transformers, each a mapping from model_type to the class that writes text
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
)
ARGUMENTS = {"image": "pixel_values", "audio": "input_features"}  # of a forward that takes such media
CUT_AS_QWEN = ("qwen3_5", "qwen3_5_moe")  # model types whose images are prepared as the registered Qwen families' are
DEPTHS = ("num_hidden_layers", "num_layers", "n_layers", "depth", "encoder_layers")
LAYERS = 1000  # that a model may have: more would take for ever to build
TRIED_TOKENS = 2
_QUERY = re.compile(r"((?:.*\.)?)layers\.\d+\.(?:self_attn\.(?:q|qkv)_proj|linear_attn\.in_proj_qkv)\.\w+")


def model_class(model_type: str) -> str | None:
    """The transformers class of a model_type that writes text; None where there is none."""
    from transformers.models.auto import modeling_auto

    for mapping in AUTO_CLASSES:
        name = getattr(modeling_auto, mapping, {}).get(model_type)
        if name is not None:
            return str(name)
    return None


def derive_family(config: Mapping[str, Any], names: Collection[str] = ()) -> Family:
    """The family of a checkpoint that is not registered. `names` are those of its tensors.

    Raises where its class has no decoder that can be quantized, and says what is missing."""
    model_type = str(config["model_type"])
    built = _built(json.dumps(_dense(config), sort_keys=True))
    if names and not any(map(_QUERY.fullmatch, names)):
        example = next((name for name in sorted(names) if re.search(r"\.0\..*att", name)), min(names))
        raise OnPTQError(
            f"{built.model_class} stores its layers under other names, such as {example}; expected "
            "layers.0.self_attn.q_proj or qkv_proj"
        )
    beside = set(built.beside)
    for stored in sorted({match[1] for match in map(_QUERY.fullmatch, names) if match}):
        if beside.isdisjoint(stored.split(".")):  # else it is the stack of a tower
            beside.update(_beside(stored, names))
    towers = (*_towers(beside), *built.unread)
    has = {"image": any("audio" not in part for part in beside), "audio": any("audio" in part for part in beside)}
    media = tuple(kind for kind in ("image", "audio") if kind in built.takes and has[kind])
    cut = model_type in CUT_AS_QWEN and "image" in media
    return Family(
        model_type,
        (model_type,),
        built.model_class,
        towers=towers,
        linears=built.linears,
        followers=built.followers,
        derived=True,
        image=ImagePlaceholder("<|image_pad|>") if cut else None,
        token_types=cut,
        by_processor=() if cut else media,
    )


def with_linears(family: Family, config: Mapping[str, Any]) -> Family:
    """A registered family whose layers hold experts, with the linears that its class has under this config."""
    built = _built(json.dumps(_dense(thinker_config(config)), sort_keys=True), family.model_class)
    return replace(family, linears=built.linears, followers=built.followers)


@dataclass(frozen=True)
class _Built:
    """What a class on the meta device says: its name, the parts beside its decoder, its linears, and what it takes."""

    model_class: str
    beside: tuple[str, ...]
    linears: tuple[str, ...]  # empty where they are the usual ones
    followers: tuple[str, ...]  # by name within a layer
    takes: frozenset[str]
    unread: tuple[
        str, ...
    ]  # regexes of keys and values of layers that borrow others', which checkpoints hold all the same


@lru_cache(maxsize=16)
def _built(config_json: str, name: str | None = None) -> _Built:
    import torch
    import transformers
    from torch import nn
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from onptq.models.experts import linearize
    from onptq.models.structure import LINEARS, find_structure

    config = json.loads(config_json)
    name = name or model_class(config["model_type"])
    if name is None:
        raise OnPTQError(f"transformers has no class of model_type {config['model_type']!r} that writes text")
    if (deep := max(_depths(config), default=0)) > LAYERS:
        raise OnPTQError(f"it has {deep:,} layers; expected at most {LAYERS:,}")
    transformers.logging.set_verbosity_error()
    try:
        settings = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        with torch.device("meta"):
            model = linearize(getattr(transformers, name)(settings))
    except Exception as error:  # damaged configs, classes that want other packages or another attention raise anything
        raise OnPTQError(f"{name} cannot be built from config.json: {type(error).__name__}: {error}") from error
    structure = find_structure(model)
    if (attention := structure.decoder.config._attn_implementation) != "sdpa":  # type: ignore[union-attr]
        raise OnPTQError(f"{name}: {type(structure.decoder).__name__} runs {attention} attention alone; expected sdpa")
    _try_blocks(structure, name)
    path = next(path for path, module in model.named_modules() if module is structure.decoder)
    parameters = [parameter for parameter, _ in model.named_parameters()]
    arguments = signature(model.forward).parameters
    takes = frozenset(kind for kind, argument in ARGUMENTS.items() if argument in arguments)
    usual = all(block.linears == tuple(LINEARS) for block in structure.blocks)
    linears = () if usual else tuple(block.path(one) for block in structure.blocks for one in block.linears)
    followers = dict.fromkeys(one for block in structure.blocks for one in _left_16_bit(block))
    inner = (name.split(".")[0] for name, module in structure.decoder.named_modules() if isinstance(module, nn.Linear))
    beside = (*_beside(f"{path}." if path else "", parameters), *sorted({*inner} - {"layers"}))
    borrowing = "|".join(str(block.index) for block in structure.blocks if block.borrows)
    unread = (rf".*layers\.(?:{borrowing})\.self_attn\.[kv]_proj(?:\..*)?$",) if borrowing else ()
    return _Built(name, beside, linears, tuple(followers), takes, unread)


def _left_16_bit(block: Any) -> Iterator[str]:
    """The matrices of a layer that are not quantized, by name within it: followers, and linears that read no pair."""
    from torch import nn

    from onptq.models.structure import place

    yield from (place(one) for pair in block.pairs for one in block.followers(pair))
    quantized = {place(one) for one in block.linears}
    yield from (
        name for name, module in block.module.named_modules() if isinstance(module, nn.Linear) and name not in quantized
    )


def _depths(config: Any) -> Iterator[int]:
    """Every number of layers that a config gives, at any depth."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key in DEPTHS and isinstance(value, int):
            yield value
        yield from _depths(value)


def _dense(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}


def _try_blocks(structure: Any, name: str) -> None:
    """Run all blocks on shapes alone: one that wants more than hidden states, mask and positions is refused here."""
    import torch

    from onptq.models.decoder import KVCache, Tokens, run_blocks

    weight = structure.embedding.weight
    width = structure.width + structure.beside
    hidden = torch.empty(1, TRIED_TOKENS, width, dtype=weight.dtype, device="meta")
    positions = torch.empty(structure.axes, 1, TRIED_TOKENS, dtype=torch.long, device="meta")
    mask = torch.empty(1, 1, TRIED_TOKENS, TRIED_TOKENS, dtype=torch.bool, device="meta")
    cache = KVCache(structure, 1, TRIED_TOKENS + 1, weight.dtype, weight.device)
    try:
        out = run_blocks(structure, Tokens(hidden, positions, mask), cache)
        seen = torch.empty(1, 1, 1, TRIED_TOKENS + 1, dtype=torch.bool, device="meta")
        run_blocks(structure, Tokens(hidden[:, :1], positions[..., :1], seen), cache)
    except Exception as error:
        block = type(structure.blocks[0].module).__name__
        raise OnPTQError(
            f"{name}: its layers ({block}) do not run on hidden states, mask, positions and a cache alone: {error}"
        ) from error
    if out.shape != (1, TRIED_TOKENS, structure.width):
        raise OnPTQError(f"{name}: its layers make {list(out.shape)} of {TRIED_TOKENS} states of {structure.width}")


def _beside(prefix: str, names: Collection[str]) -> Iterator[str]:
    """Parts of names that stand beside the decoder's prefix, at any depth; the head is none of them."""
    path = prefix.split(".")[:-1]
    for depth in range(len(path)):
        above = "".join(f"{part}." for part in path[:depth])
        parts = {
            name.removeprefix(above).split(".")[0]
            for name in names
            if name.startswith(above) and name.count(".") > depth
        }
        yield from sorted(parts - {path[depth], "lm_head"})


def _towers(parts: Collection[str]) -> Iterator[str]:
    """Regexes of everything below the parts, one of audio and one of all others.

    Parts match wherever they stand, and those of a name on disk beside those at run time: the names differ."""
    for audio in (False, True):
        if some := sorted(re.escape(part) for part in parts if ("audio" in part) is audio):
            yield rf"(?:.*\.)?(?:{'|'.join(some)})(?:\..*)?$"
