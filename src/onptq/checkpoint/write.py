"""The compressed-tensors writer: a source folder rewritten tensor by tensor, with integer linears in its decoder.

The model is never re-serialized. config.json is the source's own, plus `quantization_config`, because older readers
misread what transformers 5 writes; tensors that quantization does not touch are copied under their names on disk.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onptq.checkpoint.card import PICTURE, write_card
from onptq.checkpoint.companions import STAGED_CONFIG, companion_bytes, copy_companions, reported, staged, write_text
from onptq.checkpoint.folder import BITS, DTYPES, Checkpoint, StoredTensor, open_source
from onptq.checkpoint.names import Decoder, disagreements, find_decoder, matches, storage_dtype
from onptq.checkpoint.provenance import Provenance, Results
from onptq.checkpoint.quantization import Numbers, activation_numbers, weight_numbers
from onptq.checkpoint.shards import MAX_SHARD_BYTES, ShardWriter, header_room
from onptq.errors import OnPTQError
from onptq.quantizer.folded import Folded, FoldedFollower, FoldedLinear, FoldedNorm
from onptq.quantizer.numerics import product_dtype
from onptq.schemes import Scheme

HEAD = "re:.*lm_head"
# compressed-tensors 0.17 (vLLM's) fills each int32 with whole codes and pads it; 0.20 lets codes straddle two words.
# They agree only on widths that divide 32; every other width is stored one code a byte, which all versions read alike.
PACKABLE_BITS = (2, 4, 8)
FLOAT_FORMATS = {
    (8, "dtype"): "float-quantized",
    (4, "E4M3"): "nvfp4-pack-quantized",
    (4, "E8M0"): "mxfp4-pack-quantized",
    (8, "E8M0"): "mxfp8-quantized",
}
E8M0_BIAS = 126  # of the exponent that frexp gives: one more than that of a power of two
SCALE_DTYPES = {"E4M3": torch.float8_e4m3fn, "E8M0": torch.uint8}
PACKED_ROWS = 128

logger = logging.getLogger(__name__)


def write_checkpoint(
    source: Path,
    out: Path,
    folded: Iterable[tuple[str, Folded]],
    scheme: Scheme,
    *,
    ignore: Sequence[str],
    other_models: Sequence[str] = (),
    linears: tuple[str, ...] = (),
    provenance: Provenance | None = None,
    results: Results | None = None,
    picture: str | None = None,
    name: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Rewrite `source` into `out` with the folded linears, norms and followers in place of the decoder's own.

    Names in `folded` are relative to the decoder ("layers.3.self_attn.q_proj"). Each item is packed, written and freed
    before the next one is drawn, so the host holds one linear and the pages of the source shard it is reading. Either
    the whole checkpoint appears in `out` or none of it. `provenance`, `results`, their `picture` as an SVG and the
    source's `name` are for the model card.
    """
    check_apart(source, out)
    checkpoint, decoder = check_exportable(source, (*ignore, *other_models), linears)
    patterns = _ignore_patterns(checkpoint, decoder, ignore, other_models)
    config = _with_quantization(checkpoint.config, quantization_config(scheme, patterns))
    card = write_card(source, checkpoint.config, scheme, provenance, results, name, pictured=picture is not None)
    room = header_room(_output_names(checkpoint, decoder))
    needed = output_bytes(checkpoint, decoder, scheme) + companion_bytes(source)
    with staged(out, needed) as stage, ShardWriter(stage, room, max_shard_bytes) as shards:
        replaced: set[str] = set()
        for name, part in folded:
            tensors, taken = _replacement(checkpoint, decoder, name, part, scheme)
            if taken & replaced:
                raise OnPTQError(f"{name} was folded twice; expected every linear and norm at most once")
            replaced |= taken
            with reported(out, needed):
                for key, tensor in tensors.items():
                    shards.add(key, tensor)
            del part, tensors, tensor
        _check_complete(decoder, replaced)
        for key, tensor in checkpoint.read(key for key in checkpoint.tensors if key not in replaced):
            with reported(out, needed):
                shards.add(key, tensor)
        with reported(out, needed):
            shards.close()
            copy_companions(source, stage)
            write_text(stage / "README.md", card)
            if picture is not None:
                write_text(stage / PICTURE, picture)
            write_text(stage / STAGED_CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def storage_format(scheme: Scheme) -> str:
    """How compressed-tensors stores a scheme: W8A8 as int8, which int8 kernels read; narrower weights packed, where
    packing means the same to every reader."""
    if not scheme.quantizes_weights:
        return "dense"
    if scheme.weight_floats is not None:
        return FLOAT_FORMATS[scheme.weight_bits, scheme.scales]
    int8_kernel = scheme.weight_bits == 8 and scheme.quantizes_activations
    return "int-quantized" if int8_kernel or scheme.weight_bits not in PACKABLE_BITS else "pack-quantized"


def quantization_config(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any] | None:
    """The `quantization_config` of config.json; None when the scheme quantizes nothing."""
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationConfig

    if not (scheme.quantizes_weights or scheme.quantizes_activations):
        return None
    group: dict[str, Any] = {"targets": ["Linear"], "weights": None, "input_activations": None}
    for side, numbers in (("weights", weight_numbers(scheme)), ("input_activations", activation_numbers(scheme))):
        if numbers is not None:
            group[side] = _args(numbers, scheme.scales, static=side == "input_activations" and scheme.scales_inputs)
    group["format"] = storage_format(scheme)
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": storage_format(scheme),
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    # Written as it stands rather than dumped from the model: each version dumps fields that others refuse to read.
    QuantizationConfig.model_validate(config)
    return config | {"version": compressed_tensors.__version__}


def compress_linear(linear: FoldedLinear, scheme: Scheme) -> dict[str, Tensor]:
    """The tensors that stand for one linear's weight, by their names below the module."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    if not scheme.quantizes_weights:
        return {"weight": linear.codes * linear.scale.to(linear.codes.dtype)}
    bits = scheme.weight_bits
    if scheme.scales != "dtype":
        return _compress_floats(linear, scheme)
    if storage_format(scheme) in ("int-quantized", "float-quantized"):
        tensors = {"weight": linear.codes, "weight_scale": linear.scale}
        return tensors if linear.zero is None else tensors | {"weight_zero_point": linear.zero}
    tensors = {
        "weight_packed": _pack_rows(linear.codes, bits),
        "weight_scale": linear.scale,
        "weight_shape": torch.tensor(linear.codes.shape, dtype=torch.int64),
    }
    if linear.zero is not None:
        tensors["weight_zero_point"] = pack_to_int32(linear.zero, bits, packed_dim=0)
    return tensors


def _compress_floats(linear: FoldedLinear, scheme: Scheme) -> dict[str, Tensor]:
    """Codes of floats whose scales have few bits themselves."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    codes = (
        {"weight_packed": pack_fp4_to_uint8(linear.codes.float())}
        if scheme.weight_bits == 4
        else {"weight": linear.codes}
    )
    if scheme.scales == "E8M0":
        return codes | {"weight_scale": (torch.frexp(linear.scale).exponent + E8M0_BIAS).to(torch.uint8)}
    assert linear.tensor_scale is not None
    common = linear.tensor_scale.reshape(1)
    tensors = codes | {
        "weight_scale": (linear.scale * common).to(torch.float8_e4m3fn),
        "weight_global_scale": common,
    }
    return tensors | ({} if linear.input_scale is None else {"input_global_scale": linear.input_scale.reshape(1)})


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    """[O, I] int8 -> [O, ceil(I * bits / 32)] int32, some rows at a time: packing wants 16 bytes of scratch per code."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    outputs, inputs = codes.shape
    packed = torch.empty(outputs, math.ceil(inputs * bits / 32), dtype=torch.int32)
    for start in range(0, outputs, PACKED_ROWS):
        packed[start : start + PACKED_ROWS] = pack_to_int32(codes[start : start + PACKED_ROWS], bits)
    return packed


def _args(numbers: Numbers, scales: str, *, static: bool) -> dict[str, Any]:
    """`static`: only the scales of groups are dynamic, the tensor's is not."""
    more: dict[str, Any] = {"block_structure": list(numbers.block)} if numbers.block else {}
    if scales in SCALE_DTYPES:
        more |= dict.fromkeys(("scale_dtype", "zp_dtype"), str(SCALE_DTYPES[scales]))
    if static:
        more["dynamic"] = "local"
    return {
        "num_bits": numbers.bits,
        "type": numbers.type,
        "symmetric": numbers.symmetric,
        "strategy": numbers.strategy,
        "group_size": numbers.group_size,
        "dynamic": numbers.dynamic,
    } | more


def _replacement(
    checkpoint: Checkpoint, decoder: Decoder, name: str, part: Folded, scheme: Scheme
) -> tuple[dict[str, Tensor], set[str]]:
    """The new tensors under their names on disk, and the names of the source's tensors that they stand for."""
    key = decoder.prefix + name
    weight = checkpoint.tensors.get(f"{key}.weight")
    if weight is None:
        raise OnPTQError(f"{name} was folded, but {checkpoint.folder} has no tensor {key}.weight")
    if isinstance(part, FoldedNorm | FoldedFollower):
        _check(tuple(part.weight.shape) == weight.shape, f"{key}.weight", weight.shape, part.weight)
        return {f"{key}.weight": part.weight}, {f"{key}.weight"}
    if name not in decoder.linears:
        raise OnPTQError(
            f"{name} is not a linear of the decoder; expected one of {', '.join(decoder.linears[:7])}, ..."
        )
    _check_linear(key, part, weight, scheme)
    tensors = {f"{key}.{suffix}": tensor for suffix, tensor in compress_linear(part, scheme).items()}
    taken = {f"{key}.weight"}
    bias = checkpoint.tensors.get(f"{key}.bias")
    if (bias is None) != (part.bias is None):
        raise OnPTQError(f"{key}: the source has {'no' if bias is None else 'a'} bias, the folded linear the opposite")
    if bias is not None and part.bias is not None:
        _check(tuple(part.bias.shape) == bias.shape, f"{key}.bias", bias.shape, part.bias)
        tensors[f"{key}.bias"] = part.bias
        taken.add(f"{key}.bias")
    return tensors, taken


def _check_linear(key: str, linear: FoldedLinear, weight: StoredTensor, scheme: Scheme) -> None:
    outputs, inputs = weight.shape
    _check(tuple(linear.codes.shape) == weight.shape, f"{key}.weight", weight.shape, linear.codes)
    dtype = DTYPES[weight.dtype]
    columns = scheme.group_size or inputs
    if inputs % columns:
        raise OnPTQError(
            f"{key} has {inputs} input columns, which groups of {columns} do not divide; choose another -gN"
        )
    groups = scheme.scale_shape(outputs, inputs)
    _check(
        tuple(linear.scale.shape) == groups and linear.scale.dtype == product_dtype(scheme, dtype),
        f"scale of {key} ({product_dtype(scheme, dtype)})",
        groups,
        linear.scale,
    )
    if not bool(torch.isfinite(linear.scale).all()):
        raise OnPTQError(f"{key}: a quantization scale is not finite; the source weights may hold NaN or infinity")
    if (linear.zero is None) != scheme.symmetric:
        raise OnPTQError(
            f"{key}: {scheme} has {'no' if scheme.symmetric else 'a'} zero point, the folded linear the opposite"
        )
    if not scheme.quantizes_weights:
        _check(linear.codes.dtype == dtype, f"dense weight of {key} ({dtype})", weight.shape, linear.codes)
        return
    if scheme.weight_floats is not None:
        _check(linear.codes.dtype == torch.float8_e4m3fn, f"codes of {key} (E4M3)", weight.shape, linear.codes.float())
        if scheme.scales_inputs and linear.input_scale is None:
            raise OnPTQError(f"{key}: {scheme} fixes a scale of the input, and theta has none")
        return
    low, high = -(2 ** (scheme.weight_bits - 1)), 2 ** (scheme.weight_bits - 1) - 1
    for tensor, shape in ((linear.codes, weight.shape), (linear.zero, groups)):
        if tensor is not None:
            expected = f"codes of {key} (int8 in {low}..{high})"
            _check(tensor.dtype == torch.int8 and tuple(tensor.shape) == shape, expected, shape, tensor)
            _check(int(tensor.min()) >= low and int(tensor.max()) <= high, expected, shape, tensor)


def _check(holds: bool, what: str, shape: tuple[int, ...], got: Tensor) -> None:
    if not holds:
        extremes = f", values {got.min().item()}..{got.max().item()}" if got.numel() else ""
        raise OnPTQError(f"{what}: expected shape {list(shape)}, got {got.dtype} {list(got.shape)}{extremes}")


def check_exportable(
    source: Path, excluded: Sequence[str], linears: tuple[str, ...] = ()
) -> tuple[Checkpoint, Decoder]:
    """Open `source` and refuse what could not be exported. Reads headers only, so a run can begin with it.

    `excluded` are the patterns and prefixes of towers, head and other models; `linears` are a class's own, as `find_decoder`
    takes them.
    """
    checkpoint = open_source(source)
    decoder = find_decoder(checkpoint.tensors, excluded, linears)
    storage_dtype(checkpoint, decoder)
    _check_matrices(checkpoint, decoder, excluded)
    _check_shapes(checkpoint, decoder)
    return checkpoint, decoder


def check_groups(checkpoint: Checkpoint, decoder: Decoder, scheme: Scheme) -> None:
    """Refuse groups that do not divide the input columns of every linear."""
    for name in decoder.linears if scheme.group_size else ():
        columns = checkpoint.tensors[f"{decoder.prefix}{name}.weight"].shape[1]
        if columns % (scheme.group_size or columns):
            raise OnPTQError(
                f"{scheme}: {name} has {columns} input columns, which groups of {scheme.group_size} do not divide"
            )


def _check_matrices(checkpoint: Checkpoint, decoder: Decoder, excluded: Sequence[str]) -> None:
    """Readers quantize every Linear that is not ignored, so a decoder layer may hold no others than those to quantize."""
    linears = {f"{decoder.prefix}{name}.weight" for name in decoder.linears}
    for key, tensor in checkpoint.tensors.items():
        of_layer = key.startswith(f"{decoder.prefix}layers.") and len(tensor.shape) > 1
        depthwise = len(tensor.shape) == 3 and tensor.shape[1] == 1  # a convolution of every channel by itself
        if of_layer and not depthwise and key not in linears and not any(matches(key, pattern) for pattern in excluded):
            raise OnPTQError(
                f"{key} {list(tensor.shape)} is in a decoder layer and none of its linears to quantize: unsupported"
            )


def _check_shapes(checkpoint: Checkpoint, decoder: Decoder) -> None:
    wrong = disagreements(checkpoint.config, checkpoint.tensors, decoder)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise OnPTQError(f"{checkpoint.folder}: config.json and tensors disagree: {wrong[0]}{more}")


def _check_complete(decoder: Decoder, replaced: set[str]) -> None:
    missing = [name for name in decoder.linears if f"{decoder.prefix}{name}.weight" not in replaced]
    if missing:
        raise OnPTQError(
            f"{len(missing)} of {len(decoder.linears)} decoder linears were not folded: {', '.join(missing[:7])}"
        )


def check_apart(source: Path, out: Path) -> None:
    if out.resolve().is_relative_to(source.resolve()):
        raise OnPTQError(f"the output folder {out} lies in the model folder {source}: choose another --out, outside it")


def _ignore_patterns(
    checkpoint: Checkpoint, decoder: Decoder, ignore: Sequence[str], other_models: Sequence[str]
) -> list[str]:
    """Regexes that match names on disk and names at run time alike, which exact names do not."""
    others = {name: f"re:^{re.escape(name)}.*" for name in other_models}
    absent = {regex for name, regex in others.items() if not any(key.startswith(name) for key in checkpoint.tensors)}
    patterns = [pattern for pattern in dict.fromkeys((HEAD, *ignore, *others.values())) if pattern not in absent]
    for pattern in patterns:
        # A head tied to the embeddings is a module without a tensor of its own.
        if pattern != HEAD and not any(matches(key, pattern) for key in checkpoint.tensors):
            logger.warning("the ignore pattern %s matches no tensor of %s", pattern, checkpoint.folder)
        caught = next((name for name in decoder.linears if matches(decoder.prefix + name, pattern)), None)
        if caught:
            raise OnPTQError(
                f"the ignore pattern {pattern} also matches {decoder.prefix}{caught}, a linear to quantize"
            )
    return patterns


def _with_quantization(config: dict[str, Any], quantization: dict[str, Any] | None) -> dict[str, Any]:
    if quantization is None:
        return config
    config = config | {"quantization_config": quantization}
    if isinstance(config.get("thinker_config"), dict):
        # The thinker loaded by its own class sees only its own part of the config.
        config["thinker_config"] = config["thinker_config"] | {"quantization_config": quantization}
    return config


def _output_names(checkpoint: Checkpoint, decoder: Decoder) -> list[str]:
    """Every name that may be written; a linear has some of its parts only."""
    parts = (
        *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
        *("weight_global_scale", "input_global_scale"),
    )
    return [*checkpoint.tensors, *(f"{decoder.prefix}{name}.{part}" for name in decoder.linears for part in parts)]


def output_bytes(checkpoint: Checkpoint, decoder: Decoder, scheme: Scheme) -> int:
    total = checkpoint.weight_bytes
    if not scheme.quantizes_weights:
        return total
    bits = scheme.weight_bits if "pack-quantized" in storage_format(scheme) else 8
    scale_bytes = None if scheme.scales == "dtype" else 1
    tensor_scales = 4 * ((scheme.scales == "E4M3") + scheme.scales_inputs)
    for name in decoder.linears:
        weight = checkpoint.tensors[f"{decoder.prefix}{name}.weight"]
        outputs, inputs = weight.shape
        itemsize = BITS[weight.dtype] // 8
        groups = math.prod(scheme.scale_shape(outputs, inputs))
        total += math.ceil(weight.numel * bits / 8) - weight.numel * itemsize + tensor_scales
        total += groups * ((scale_bytes or itemsize) + (not scheme.symmetric))
    return total
