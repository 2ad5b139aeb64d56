"""What a run will quantize and what it will leave: from config.json and safetensors headers, no weight is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onptq.checkpoint.catalogs import did_you_mean, is_cataloged
from onptq.checkpoint.companions import companion_bytes
from onptq.checkpoint.folder import DENSE, Checkpoint, StoredTensor, open_source
from onptq.checkpoint.names import Decoder, disagreements, find_decoder, matches
from onptq.checkpoint.source import Source, find_source
from onptq.checkpoint.write import HEAD, output_bytes
from onptq.errors import OnPTQError
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
ITEM_BYTES = {"F64": 8, "I64": 8, "I32": 4, "F32": 4, "I16": 2, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Part:
    """One part of the checkpoint: how many modules it has, and its bytes now and as the run will write them."""

    name: str
    quantized: bool
    modules: int
    parameters: int
    bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Shapes:
    """What the cost model needs to know of a checkpoint; numbers of parameters unless said otherwise."""

    layers: int
    hidden: int
    ffn: int
    query: int  # width of all query heads together
    kv: int  # width of all key heads together
    vocabulary: int
    linears: int  # of the whole decoder
    block: int  # linears of the largest block
    largest: int  # largest linear
    loaded: int  # everything the run loads: other models of the checkpoint are not
    vision: int
    audio: int
    steps: int  # quantization steps: one per row or group
    deepstack: int  # levels of visual features that are added after the first blocks
    patches: int  # patches of a picture that become one token

    @property
    def smoothing(self) -> int:
        """Log-smoothing entries of theta: norm -> qkv, norm -> gate/up, v -> o, up -> down."""
        return self.layers * (2 * self.hidden + self.kv + self.ffn)


@dataclass(frozen=True)
class Parts:
    """Where the decoder is and what becomes of every tensor."""

    decoder: Decoder
    parts: tuple[Part, ...]
    shapes: Shapes
    storage: str  # safetensors' name of the dtype that most of the decoder is stored in
    unmatched: tuple[str, ...]  # ignore patterns that match no tensor
    output_bytes: int  # weights and companion files as written
    problems: tuple[str, ...]  # why this scheme cannot be applied to these tensors


def locate(model: str | Path) -> Source:
    """The checkpoint, if it is on this machine: planning never uses the network."""
    if is_cataloged(str(model)) or Path(model).is_dir():
        return find_source(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(str(model), local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise OnPTQError(
            f"{str(model)!r} is neither a folder nor a downloaded hub id{did_you_mean(str(model))}, and a plan uses no network: "
            "expected a checkpoint folder, a name of `onptq zoo list`, or a hub id that has been downloaded"
        ) from error
    return find_source(folder)


def find_parts(source: Source, scheme: Scheme) -> Parts:
    """Raises where no decoder is found or a header cannot be read."""
    family, checkpoint = source.family, open_source(source.folder)
    decoder = find_decoder(checkpoint.tensors, (*family.ignore, *family.other_models))
    grouped = _by_part(checkpoint, decoder, family)
    stored = {name: sum(_nbytes(tensor) for tensor in tensors.values()) for name, tensors in grouped.items()}
    written = output_bytes(checkpoint, decoder, scheme)
    after = stored | {LINEARS: stored[LINEARS] + written - checkpoint.weight_bytes}
    return Parts(
        decoder,
        tuple(
            Part(
                name,
                name == LINEARS and scheme.quantizes_weights,
                len({key.rpartition(".")[0] for key in tensors}),
                sum(tensor.numel for tensor in tensors.values()),
                stored[name],
                after[name],
            )
            for name, tensors in grouped.items()
            if tensors
        ),
        _shapes(checkpoint, decoder, scheme, grouped, source.config),
        _storage(checkpoint, decoder),
        tuple(_unmatched(checkpoint, family)),
        written + companion_bytes(source.folder),
        tuple(_problems(checkpoint, decoder, scheme)),
    )


def _by_part(checkpoint: Checkpoint, decoder: Decoder, family: Family) -> dict[str, dict[str, StoredTensor]]:
    linears = {decoder.prefix + name for name in decoder.linears}
    grouped: dict[str, dict[str, StoredTensor]] = {
        name: {} for name in (LINEARS, EMBEDDINGS, VISION, AUDIO, OTHER_MODELS, OTHER)
    }
    towers = {pattern: AUDIO if "audio" in pattern else VISION for pattern in family.towers}
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
    grouped: Mapping[str, Mapping[str, StoredTensor]],
    config: Mapping[str, Any],
) -> Shapes:
    weights = {name: checkpoint.tensors[f"{decoder.prefix}{name}.weight"] for name in decoder.linears}
    first = {name.rpartition(".")[2]: weights[name].shape for name in decoder.linears[:7]}
    blocks = [0] * decoder.layers
    for name, weight in weights.items():
        blocks[int(name.split(".")[1])] += weight.numel
    vision = thinker_config(config).get("vision_config") or {}
    embeddings = checkpoint.tensors.get(f"{decoder.prefix}embed_tokens.weight")
    count = {name: _parameters(tensors.values()) for name, tensors in grouped.items()}
    return Shapes(
        layers=decoder.layers,
        hidden=first["q_proj"][1],
        ffn=first["down_proj"][1],
        query=first["q_proj"][0],
        kv=first["k_proj"][0],
        vocabulary=embeddings.shape[0] if embeddings else int(text_config(config).get("vocab_size", 0)),
        linears=sum(blocks),
        block=max(blocks),
        largest=max(weight.numel for weight in weights.values()),
        loaded=sum(count.values()) - count[OTHER_MODELS],
        vision=count[VISION],
        audio=count[AUDIO],
        steps=sum(
            weight.shape[0] * math.ceil(weight.shape[1] / (scheme.group_size or weight.shape[1]))
            for weight in weights.values()
        ),
        deepstack=len(vision.get("deepstack_visual_indexes") or ()),
        patches=int(vision.get("spatial_merge_size", 2)) ** 2,
    )


def _storage(checkpoint: Checkpoint, decoder: Decoder) -> str:
    sizes: dict[str, int] = {}
    for name in decoder.linears:
        weight = checkpoint.tensors[f"{decoder.prefix}{name}.weight"]
        sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel
    return max(sizes, key=lambda dtype: sizes[dtype])


def _unmatched(checkpoint: Checkpoint, family: Family) -> Iterable[str]:
    """Patterns of other models are left out where the checkpoint has none of them, as the exporter leaves them out."""
    others = dict(zip(family.other_models, family.ignore[len(family.ignore) - len(family.other_models) :], strict=True))
    absent = {
        pattern for name, pattern in others.items() if not any(key.startswith(name) for key in checkpoint.tensors)
    }
    for pattern in family.ignore:
        # A head tied to the embeddings is a module without a tensor of its own.
        if pattern not in (HEAD, *absent) and not any(matches(key, pattern) for key in checkpoint.tensors):
            yield pattern


def _problems(checkpoint: Checkpoint, decoder: Decoder, scheme: Scheme) -> Iterable[str]:
    if not scheme.quantizes_weights:
        yield f"scheme {scheme} leaves the weights in 16 bits: there is nothing to write; expected W2 to W8"
    weights = [
        (decoder.prefix + name, checkpoint.tensors[f"{decoder.prefix}{name}.weight"]) for name in decoder.linears
    ]
    odd = [(name, weight) for name, weight in weights if weight.dtype not in DENSE]
    if odd:
        name, weight = odd[0]
        yield f"{name} ({len(odd)} such) is stored as {weight.dtype}; expected a dense checkpoint: {', '.join(DENSE)}"
    size = scheme.group_size
    uneven = [(name, weight.shape[1]) for name, weight in weights if size and weight.shape[1] % size]
    if uneven:
        name, columns = uneven[0]
        yield f"{name} ({len(uneven)} such) has {columns} input columns, which groups of {size} do not divide"
    yield from disagreements(checkpoint.config, checkpoint.tensors, decoder)[:3]
    known = {f"{name}.weight" for name, _ in weights}
    for key, tensor in checkpoint.tensors.items():
        if key.startswith(f"{decoder.prefix}layers.") and len(tensor.shape) > 1 and key not in known:
            yield f"{key} {list(tensor.shape)} is in a decoder layer and none of its seven linears: unsupported"
            return


def _parameters(tensors: Iterable[StoredTensor]) -> int:
    return sum(tensor.numel for tensor in tensors)


def _nbytes(tensor: StoredTensor) -> int:
    return tensor.numel * ITEM_BYTES.get(tensor.dtype, 1)
