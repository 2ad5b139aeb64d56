"""The compressed-tensors writer: a source folder rewritten tensor by tensor, with integer linears in its decoder.

The model is never re-serialized. config.json is the source's own, plus `quantization_config`, because older readers
misread what transformers 5 writes; tensors that quantization does not touch are copied under their names on disk.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onptq.checkpoint.card import PICTURE, write_card
from onptq.checkpoint.companions import STAGED_CONFIG, companion_bytes, copy_companions, reported, staged, write_text
from onptq.checkpoint.folder import BITS, DTYPES, Checkpoint, StoredTensor, open_source
from onptq.checkpoint.names import Decoder, disagreements, find_decoder, matches, storage_dtype
from onptq.checkpoint.packing import compress_linear, storage_format
from onptq.checkpoint.provenance import Provenance, Results
from onptq.checkpoint.quantization import Numbers, activation_numbers, cache_numbers, weight_numbers
from onptq.checkpoint.shards import MAX_SHARD_BYTES, Shard, header_room, name_shards
from onptq.errors import OnPTQError
from onptq.quantizer.folded import Folded, FoldedCache, FoldedFollower, FoldedLinear, FoldedNorm
from onptq.quantizer.mix import check_mix
from onptq.quantizer.numerics import product_dtype
from onptq.ranks import ALONE, Ranks
from onptq.schemes import UNQUANTIZED, Scheme

HEAD = "re:.*lm_head"
MIXED = "mixed-precision"  # the format of several
_LAYER = re.compile(r"layers\.(\d+)\.")
SCALE_DTYPES = {"E4M3": torch.float8_e4m3fn, "E8M0": torch.uint8}

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
    max_shard_bytes: int | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Rewrite `source` into `out` with the folded linears, norms and followers in place of the decoder's own.

    Names in `folded` are relative to the decoder ("layers.3.self_attn.q_proj"), layer by layer. Each item is packed, written
    and freed before the next one is drawn, so the host holds one linear and the pages of the source shard it is reading.
    Either the whole checkpoint appears in `out` or none of it. `provenance`, `results`, their `picture` as an SVG and the
    source's `name` are for the model card. Several `ranks` write shards in turn, each those of its `own_layers`, and the
    first the rest.
    """
    check_apart(source, out)
    checkpoint, decoder = check_exportable(source, (*ignore, *other_models), linears)
    check_mix(scheme, decoder.linears)
    patterns = _ignore_patterns(checkpoint, decoder, ignore, other_models)
    config = _with_quantization(checkpoint.config, quantization_config(scheme, patterns, decoder.linears))
    card = write_card(source, checkpoint.config, scheme, provenance, results, name, pictured=picture is not None)
    needed = output_bytes(checkpoint, decoder, scheme) + companion_bytes(source)
    plan = plan_shards(checkpoint, decoder, scheme, max_shard_bytes)
    replacing = _Replacing(checkpoint, decoder, scheme, folded)

    def write_shard(position: int) -> tuple[int, list[str], int]:
        with reported(out, needed), Shard(stage, position, header_room(_output_names(checkpoint, decoder))) as shard:
            for unit in plan[position]:
                for key, tensor in replacing.tensors(unit):
                    shard.add(key, tensor)
            shard.finish()
            return position, shard.names, shard.bytes

    def finish() -> None:
        with reported(out, needed):
            name_shards(stage, [names for _, names, _ in written], sum(size for _, _, size in written))
            copy_companions(source, stage)
            write_text(stage / "README.md", card)
            if picture is not None:
                write_text(stage / PICTURE, picture)
            write_text(stage / STAGED_CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        staging.close()

    def write_own() -> list[tuple[int, list[str], int]]:
        own = [write_shard(position) for position in range(ranks.rank, len(plan), ranks.size)]
        replacing.close()
        return own

    with ExitStack() as staging:
        stage = Path(ranks.lead(lambda: str(staging.enter_context(staged(out, needed)))))
        written = sorted(shard for shards in ranks.each(write_own) for shard in shards)
        ranks.lead(finish)


def quantization_config(scheme: Scheme, ignore: Sequence[str], linears: Sequence[str] = ()) -> dict[str, Any] | None:
    """The `quantization_config` of config.json; None when the scheme quantizes nothing.

    `linears` are those of the decoder, of which a mixed scheme names every one."""
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationConfig

    if not (scheme.quantizes_weights or scheme.quantizes_activations):
        return None
    cache, by_scheme = cache_numbers(scheme), linears_by_scheme(scheme, linears)
    dense = by_scheme.pop(UNQUANTIZED, ())
    groups = [_group(one, targets) for one, targets in by_scheme.items()]
    formats = {group["format"] for group in groups}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": [*ignore, *dense],
        "quantization_status": "compressed",
        "kv_cache_scheme": None if cache is None else _args(cache, "dtype", static=False),
        "global_compression_ratio": None,
    }
    # Written as it stands rather than dumped from the model: each version dumps fields that others refuse to read.
    QuantizationConfig.model_validate(config)
    return config | {"version": compressed_tensors.__version__}


def linears_by_scheme(scheme: Scheme, linears: Sequence[str]) -> dict[Scheme, tuple[str, ...]]:
    """The targets of every scheme: all linears, or those of a mixed one by patterns that match them on disk and at run
    time, in a server's fused modules as well."""
    if not scheme.others:
        return {scheme.base: ("Linear",)}
    layers: dict[tuple[Scheme, str], list[str]] = {}
    for path in linears:
        _, layer, name = path.split(".", 2)
        layers.setdefault((scheme.of(path), name), []).append(layer)
    alike: dict[tuple[Scheme, tuple[str, ...]], list[str]] = {}
    for (one, name), its in layers.items():
        alike.setdefault((one, tuple(its)), []).append(name)
    found: dict[Scheme, tuple[str, ...]] = {}
    for (one, numbers), names in alike.items():
        ending = "|".join(map(re.escape, names))
        found[one] = (*found.get(one, ()), rf"re:(?:.*\.)?layers\.(?:{'|'.join(numbers)})\.(?:{ending})$")
    return found


def _group(scheme: Scheme, targets: Sequence[str]) -> dict[str, Any]:
    group: dict[str, Any] = {"targets": list(targets), "weights": None, "input_activations": None}
    for side, numbers in (("weights", weight_numbers(scheme)), ("input_activations", activation_numbers(scheme))):
        if numbers is not None:
            group[side] = _args(numbers, scheme.scales, static=side == "input_activations" and scheme.scales_inputs)
    return group | {"format": storage_format(scheme)}


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


@dataclass
class Unit:
    """What lies in one shard: a layer of the decoder, or one tensor outside of its layers."""

    layer: int | None
    names: list[str]  # of the source's tensors
    bytes: int  # in the output


def plan_shards(checkpoint: Checkpoint, decoder: Decoder, scheme: Scheme, limit: int | None = None) -> list[list[Unit]]:
    """The units of every shard, which holds at most `limit` bytes or one unit."""
    limit = MAX_SHARD_BYTES if limit is None else limit
    layers: dict[int, Unit] = {}
    others = []
    for name, tensor in checkpoint.tensors.items():
        layer = _layer(name.removeprefix(decoder.prefix)) if name.startswith(decoder.prefix) else None
        if layer is None:
            others.append(Unit(None, [name], tensor.nbytes))
        else:
            unit = layers.setdefault(layer, Unit(layer, [], 0))
            unit.names.append(name)
            unit.bytes += tensor.nbytes
    for name, added in _growth(checkpoint, decoder, scheme):
        layers[_layer(name) or 0].bytes += added
    shards: list[list[Unit]] = [[]]
    for unit in (*(layers[layer] for layer in sorted(layers)), *others):
        if shards[-1] and sum(one.bytes for one in shards[-1]) + unit.bytes > limit:
            shards.append([])
        shards[-1].append(unit)
    return shards


def own_layers(
    source: Path,
    scheme: Scheme,
    ranks: Ranks,
    *,
    ignore: Sequence[str],
    other_models: Sequence[str] = (),
    linears: tuple[str, ...] = (),
    limit: int | None = None,
) -> list[int]:
    """The layers of the decoder that a rank folds and writes, in their order."""
    checkpoint, decoder = check_exportable(source, (*ignore, *other_models), linears)
    plan = plan_shards(checkpoint, decoder, scheme, limit)
    return sorted(unit.layer for shard in plan[ranks.rank :: ranks.size] for unit in shard if unit.layer is not None)


class _Replacing:
    """The output's tensors, unit by unit: folded ones, and the source's own where nothing stands for them."""

    def __init__(
        self, checkpoint: Checkpoint, decoder: Decoder, scheme: Scheme, folded: Iterable[tuple[str, Folded]]
    ) -> None:
        self.checkpoint, self.decoder, self.scheme = checkpoint, decoder, scheme
        self._groups = groupby(folded, key=lambda item: _layer(item[0]))
        self._next = next(self._groups, None)
        self._replaced, self._cached = set[str](), set[str]()
        self._layers: list[int] = []

    def tensors(self, unit: Unit) -> Iterator[tuple[str, Tensor]]:
        if unit.layer is not None:
            self._layers.append(unit.layer)
            while self._next is not None and (self._next[0] is None or self._next[0] <= unit.layer):
                yield from self._folded(self._next[1])
                self._next = next(self._groups, None)
        yield from self.checkpoint.read([name for name in unit.names if name not in self._replaced])

    def close(self) -> None:
        """Raise where something was not folded, or was folded and stands in no unit."""
        if self._next is not None:
            name, part = next(self._next[1])
            list(self._folded([(name, part)]))  # whatever else is wrong with it
            raise OnPTQError(f"{name} was folded behind later layers")
        expected = [name for name in self.decoder.linears if _layer(name) in self._layers]
        missing = [name for name in expected if f"{self.decoder.prefix}{name}.weight" not in self._replaced]
        if missing:
            raise OnPTQError(
                f"{len(missing)} of {len(expected)} decoder linears were not folded: {', '.join(missing[:7])}"
            )
        layers = {name for name in cached_layers(self.decoder) if _layer(name) in self._layers}
        if self.scheme.quantizes_cache and self._cached != layers:
            raise OnPTQError(
                f"{len(self._cached)} of {len(layers)} layers have scales of their KV cache: {sorted(layers - self._cached)}"
            )

    def _folded(self, parts: Iterable[tuple[str, Folded]]) -> Iterator[tuple[str, Tensor]]:
        for name, part in parts:
            if isinstance(part, FoldedCache):
                self._cached.add(name)
            tensors, taken = _replacement(self.checkpoint, self.decoder, name, part, self.scheme)
            if taken & self._replaced:
                raise OnPTQError(f"{name} was folded twice; expected every linear and norm at most once")
            self._replaced |= taken
            yield from tensors.items()
            del part, tensors


def _layer(name: str) -> int | None:
    """The layer of a name that is relative to the decoder."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def _replacement(
    checkpoint: Checkpoint, decoder: Decoder, name: str, part: Folded, scheme: Scheme
) -> tuple[dict[str, Tensor], set[str]]:
    """The new tensors under their names on disk, and the names of the source's tensors that they stand for."""
    key = decoder.prefix + name
    if isinstance(part, FoldedCache):
        return dict(zip(_cache_names(key), (part.key, part.value), strict=True)), set()
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
    _check_linear(key, part, weight, scheme.of(name))
    tensors = {f"{key}.{suffix}": tensor for suffix, tensor in compress_linear(part, scheme.of(name)).items()}
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
    if not scheme.quantizes_weights:
        _check(linear.codes.dtype == dtype, f"dense weight of {key} ({dtype})", weight.shape, linear.codes)
        return
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
    """Refuse groups that do not divide the input columns of every linear, and mixed schemes that do not fit the model."""
    check_mix(scheme, decoder.linears)
    for name in decoder.linears:
        size, columns = scheme.of(name).group_size, checkpoint.tensors[f"{decoder.prefix}{name}.weight"].shape[1]
        if columns % (size or columns):
            raise OnPTQError(f"{scheme}: {name} has {columns} input columns, which groups of {size} do not divide")


def check_cached(checkpoint: Checkpoint, scheme: Scheme, other_models: Sequence[str]) -> None:
    """Refuse a quantized KV cache beside other models: readers of the whole would quantize their caches, too."""
    others = [name for name in other_models if any(key.startswith(name) for key in checkpoint.tensors)]
    if scheme.quantizes_cache and others:
        raise OnPTQError(
            f"{scheme}: {checkpoint.folder} holds other models ({', '.join(others)}), for whose KV caches readers would miss "
            "scales; expected a checkpoint of the language model and its towers alone"
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
    """Every name that may be written; a linear has some of its parts only, a cache its scales or none."""
    parts = (
        *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
        *("weight_global_scale", "input_global_scale"),
    )
    linears = (f"{decoder.prefix}{name}.{part}" for name in decoder.linears for part in parts)
    caches = (name for layer in cached_layers(decoder) for name in _cache_names(decoder.prefix + layer))
    return [*checkpoint.tensors, *linears, *caches]


def cached_layers(decoder: Decoder) -> set[str]:
    """The attentions that have a KV cache, by name relative to the decoder."""
    return {name.rpartition(".")[0] for name in decoder.linears if name.endswith(".o_proj")}


def _cache_names(attention: str) -> tuple[str, str]:
    return f"{attention}.k_scale", f"{attention}.v_scale"


def output_bytes(checkpoint: Checkpoint, decoder: Decoder, scheme: Scheme) -> int:
    return checkpoint.weight_bytes + sum(added for _, added in _growth(checkpoint, decoder, scheme))


def _growth(checkpoint: Checkpoint, decoder: Decoder, scheme: Scheme) -> Iterator[tuple[str, int]]:
    """By how many bytes each linear and cache grows, or by minus so many."""
    if scheme.quantizes_cache:
        size = 2 * DTYPES[storage_dtype(checkpoint, decoder)].itemsize
        yield from ((name, size) for name in cached_layers(decoder))
    for name in decoder.linears:
        one = scheme.of(name)
        if not one.quantizes_weights:
            continue
        bits = one.weight_bits if "pack-quantized" in storage_format(one) else 8
        scale_bytes = None if one.scales == "dtype" else 1
        tensor_scales = 4 * ((one.scales == "E4M3") + one.scales_inputs)
        weight = checkpoint.tensors[f"{decoder.prefix}{name}.weight"]
        outputs, inputs = weight.shape
        itemsize = BITS[weight.dtype] // 8
        groups = math.prod(one.scale_shape(outputs, inputs))
        yield (
            name,
            math.ceil(weight.numel * bits / 8)
            - weight.numel * itemsize
            + tensor_scales
            + groups * ((scale_bytes or itemsize) + (not one.symmetric)),
        )
