"""The compressed-tensors writer: a source folder rewritten tensor by tensor, with integer linears in its decoder.

The model is never re-serialized. config.json is the source's own, plus `quantization_config`, because older readers
misread what transformers 5 writes; tensors that quantization does not touch are copied under their names on disk.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onptq.checkpoint.card import PICTURE, write_card
from onptq.checkpoint.companions import STAGED_CONFIG, companion_bytes, copy_companions, reported, staged, write_text
from onptq.checkpoint.exportable import cached_layers, check_apart, check_exportable, output_bytes
from onptq.checkpoint.folder import DTYPES, Checkpoint, StoredTensor
from onptq.checkpoint.names import Decoder, matches
from onptq.checkpoint.packing import compress_linear, storage_format
from onptq.checkpoint.parts import Unit, layer_of, plan_shards
from onptq.checkpoint.provenance import Provenance, Results
from onptq.checkpoint.quantization import Numbers, activation_numbers, cache_numbers, weight_numbers
from onptq.checkpoint.shards import Shard, header_room, name_shards
from onptq.checkpoint.source import Source
from onptq.errors import OnPTQError
from onptq.quantizer.folded import Folded, FoldedCache, FoldedFollower, FoldedLinear, FoldedNorm
from onptq.quantizer.mix import check_mix
from onptq.quantizer.numerics import product_dtype
from onptq.ranks import ALONE, Ranks
from onptq.schemes import UNQUANTIZED, Scheme

HEAD = "re:.*lm_head"
MIXED = "mixed-precision"  # the format of several
SCALE_DTYPES = {"E4M3": torch.float8_e4m3fn, "E8M0": torch.uint8}

logger = logging.getLogger(__name__)


def write_checkpoint(
    source: Source,
    out: Path,
    folded: Iterable[tuple[str, Folded]],
    scheme: Scheme,
    *,
    provenance: Provenance | None = None,
    results: Results | None = None,
    picture: str | None = None,
    max_shard_bytes: int | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Rewrite `source` into `out` with the folded linears, norms and followers in place of the decoder's own.

    Names in `folded` are relative to the decoder ("layers.3.self_attn.q_proj"), layer by layer. Each item is packed, written
    and freed before the next one is drawn, so the host holds one linear and the pages of the source shard it is reading.
    Either the whole checkpoint appears in `out` or none of it. `provenance`, `results` and their `picture` as an SVG are
    for the model card. Several `ranks` write shards in turn, each those of its `own_layers`, and the
    first the rest.
    """
    check_apart(source.folder, out)
    check_exportable(source)
    checkpoint, decoder = source.whole, source.decoder
    check_mix(scheme, decoder.linears)
    patterns = _ignore_patterns(source)
    config = _with_quantization(checkpoint.config, quantization_config(scheme, patterns, decoder.linears))
    card = write_card(
        source.folder, source.config, scheme, provenance, results, source.name, pictured=picture is not None
    )
    needed = output_bytes(source, scheme) + companion_bytes(source.folder)
    plan = plan_shards(source, scheme, max_shard_bytes)

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
            copy_companions(source.folder, stage)
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
        replacing = _Replacing(source, scheme, folded)  # draws the first part: not before there is room
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
    targets: dict[Scheme, tuple[str, ...]] = {}
    for (one, numbers), names in alike.items():
        ending = "|".join(map(re.escape, names))
        targets[one] = (*targets.get(one, ()), rf"re:(?:.*\.)?layers\.(?:{'|'.join(numbers)})\.(?:{ending})$")
    return targets


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


class _Replacing:
    """The output's tensors, unit by unit: folded ones, and the source's own where nothing stands for them."""

    def __init__(self, source: Source, scheme: Scheme, folded: Iterable[tuple[str, Folded]]) -> None:
        self.checkpoint, self.decoder, self.scheme = source.whole, source.decoder, scheme
        self._groups = groupby(folded, key=lambda item: layer_of(item[0]))
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
        expected = [name for name in self.decoder.linears if layer_of(name) in self._layers]
        missing = [name for name in expected if f"{self.decoder.prefix}{name}.weight" not in self._replaced]
        if missing:
            raise OnPTQError(
                f"{len(missing)} of {len(expected)} decoder linears were not folded: {', '.join(missing[:7])}"
            )
        layers = {name for name in cached_layers(self.decoder) if layer_of(name) in self._layers}
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


def _ignore_patterns(source: Source) -> list[str]:
    """Regexes that match names on disk and names at run time alike, which exact names do not; none for models that the
    checkpoint lacks."""
    family, decoder, tensors = source.family, source.decoder, source.whole.tensors
    absent = {
        pattern
        for name, pattern in zip(family.other_models, family.other_patterns, strict=True)
        if not any(key.startswith(name) for key in tensors)
    }
    patterns = [pattern for pattern in dict.fromkeys((HEAD, *family.ignore)) if pattern not in absent]
    for pattern in patterns:
        # A head tied to the embeddings is a module without a tensor of its own.
        if pattern != HEAD and not any(matches(key, pattern) for key in tensors):
            logger.warning("the ignore pattern %s matches no tensor of %s", pattern, source.folder)
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


def _cache_names(attention: str) -> tuple[str, str]:
    return f"{attention}.k_scale", f"{attention}.v_scale"
