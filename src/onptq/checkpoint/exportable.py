"""What can be exported, and how many bytes that takes: by config.json and headers, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from onptq.checkpoint.folder import BITS
from onptq.checkpoint.names import Decoder, disagreements, matches
from onptq.checkpoint.packing import storage_format
from onptq.checkpoint.source import Source
from onptq.errors import OnPTQError
from onptq.quantizer.mix import check_mix
from onptq.schemes import Scheme


def check_exportable(source: Source) -> None:
    """Refuse a checkpoint that cannot be rewritten: quantized, damaged, or with layers that nothing here quantizes."""
    source.checkpoint.require_dense()
    source.storage()
    _check_matrices(source)
    _check_shapes(source)


def check_groups(source: Source, scheme: Scheme) -> None:
    """Refuse groups that do not divide the input columns of every linear, and mixed schemes that do not fit the model."""
    decoder, tensors = source.decoder, source.whole.tensors
    check_mix(scheme, decoder.linears)
    for name in decoder.linears:
        size, columns = scheme.of(name).group_size, tensors[f"{decoder.prefix}{name}.weight"].shape[1]
        if columns % (size or columns):
            raise OnPTQError(f"{scheme}: {name} has {columns} input columns, which groups of {size} do not divide")


def check_cached(source: Source, scheme: Scheme) -> None:
    """Refuse a quantized KV cache beside other models: readers of the whole would quantize their caches, too."""
    others = [name for name in source.family.other_models if any(key.startswith(name) for key in source.whole.tensors)]
    if scheme.quantizes_cache and others:
        raise OnPTQError(
            f"{scheme}: {source.folder} holds other models ({', '.join(others)}), for whose KV caches readers would miss "
            "scales; expected a checkpoint of the language model and its towers alone"
        )


def check_apart(source: Path, out: Path) -> None:
    if out.resolve().is_relative_to(source.resolve()):
        raise OnPTQError(f"the output folder {out} lies in the model folder {source}: choose another --out, outside it")


def output_bytes(source: Source, scheme: Scheme) -> int:
    """The size of the weights that an export in this scheme writes."""
    return source.whole.weight_bytes + sum(added for _, added in growth(source, scheme))


def growth(source: Source, scheme: Scheme) -> Iterator[tuple[str, int]]:
    """By how many bytes each linear and each layer with a cache grows, or by minus so many."""
    if scheme.quantizes_cache:
        yield from ((name, 2 * source.storage().itemsize) for name in cached_layers(source.decoder))
    for name in source.decoder.linears:
        one = scheme.of(name)
        if not one.quantizes_weights:
            continue
        bits = one.weight_bits if "pack-quantized" in storage_format(one) else 8
        scale_bytes = None if one.scales == "dtype" else 1
        tensor_scales = 4 * ((one.scales == "E4M3") + one.scales_inputs)
        weight = source.whole.tensors[f"{source.decoder.prefix}{name}.weight"]
        outputs, inputs = weight.shape
        itemsize = BITS[weight.dtype] // 8
        added = math.ceil(weight.numel * bits / 8) - weight.numel * itemsize + tensor_scales
        yield (
            name,
            added + math.prod(one.scale_shape(outputs, inputs)) * ((scale_bytes or itemsize) + (not one.symmetric)),
        )


def cached_layers(decoder: Decoder) -> set[str]:
    """The attentions that have a KV cache, by name relative to the decoder."""
    return {name.rpartition(".")[0] for name in decoder.linears if name.endswith(".o_proj")}


def _check_matrices(source: Source) -> None:
    """Readers quantize every Linear that is not ignored, so a decoder layer may hold no others than those to quantize."""
    decoder, ignore = source.decoder, source.family.ignore
    linears = {f"{decoder.prefix}{name}.weight" for name in decoder.linears}
    for key, tensor in source.whole.tensors.items():
        of_layer = key.startswith(f"{decoder.prefix}layers.") and len(tensor.shape) > 1
        depthwise = len(tensor.shape) == 3 and tensor.shape[1] == 1  # a convolution of every channel by itself
        if of_layer and not depthwise and key not in linears and not any(matches(key, pattern) for pattern in ignore):
            raise OnPTQError(
                f"{key} {list(tensor.shape)} is in a decoder layer and none of its linears to quantize: unsupported"
            )


def _check_shapes(source: Source) -> None:
    wrong = disagreements(source.config, source.whole.tensors, source.decoder)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise OnPTQError(f"{source.folder}: config.json and tensors disagree: {wrong[0]}{more}")
