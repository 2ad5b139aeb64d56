"""Checks of the tensors: missing ones, shapes that the config contradicts, values that cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from onptq.check.findings import Finding, some
from onptq.check.inspected import Inspected, Linear
from onptq.check.layouts import WEIGHTS
from onptq.checkpoint.folder import DTYPES
from onptq.checkpoint.names import find_decoder
from onptq.checkpoint.quantization import COMPRESSED, Group, Numbers
from onptq.errors import OnPTQError
from onptq.models.family import text_config

SCALES = (
    "weight_scale",
    "weight_scale_inv",
    "weight_global_scale",
    "scales",
    "input_scale",
    "input_global_scale",
    "k_scale",
    "v_scale",
)
FLOATS = {name for name, dtype in DTYPES.items() if dtype.is_floating_point}
WORD = 32  # bits

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Disagreement:
    tensor: str
    stored: str
    expected: str

    def __str__(self) -> str:
        return f"{self.tensor} is {self.stored}, expected {self.expected}"


def check_missing(inspected: Inspected) -> Iterator[Finding]:
    lost_shards = {shard.file.name for shard in inspected.checkpoint.shards if shard.unreadable is not None}
    named = {name for name, file in (inspected.checkpoint.weight_map or {}).items() if file in lost_shards}
    if named or not inspected.checkpoint.tensors:
        return  # the findings on shards name them
    for layout in inspected.layouts.each:
        if layout.converts:
            continue
        missing = sorted(set(layout.shapes) - set(layout.loads.values()) - set(layout.tied))
        if missing:
            yield Finding(
                "missing-tensors",
                f"{len(missing)} parameters of {layout.model_class} are in no shard: {some(missing)}",
                "transformers fills them with random numbers and only warns.",
            )
            return


def check_shapes(inspected: Inspected) -> Iterator[Finding]:
    wrong = [*_dense_shapes(inspected), *_quantized_shapes(inspected)]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        yield Finding(
            "wrong-shapes",
            f"tensors disagree with config.json: {wrong[0]}{more}",
            "The checkpoint does not load, or loads with random numbers in their place. Config and weights come from "
            "different models, or the weights were packed for another scheme.",
        )


def check_layers(inspected: Inspected) -> Iterator[Finding]:
    """Layers on disk that config.json does not count; layers that are not there are missing tensors."""
    checkpoint, family = inspected.checkpoint, inspected.family
    names = {f"{module}.weight" for module, stored in checkpoint.modules.items() if not WEIGHTS.isdisjoint(stored)}
    layers = text_config(checkpoint.config).get("num_hidden_layers")
    try:
        decoder = find_decoder(names, family.ignore if family else (), family.linears if family else ())
    except OnPTQError:
        return
    if isinstance(layers, int) and decoder.layers > layers:
        yield Finding(
            "unused-layers",
            f"there are {decoder.layers} layers, config.json says {layers}",
            "Readers leave out the others. Config and weights come from different models.",
        )


def check_values(inspected: Inspected) -> Iterator[Finding]:
    """Findings on scales, a small part of the files, and with `every_value` on all other floating-point tensors."""
    import torch

    checkpoint = inspected.checkpoint
    not_finite, zero = [], []
    for name, tensor in checkpoint.read(_read_values(inspected)):
        values = tensor if tensor.element_size() > 1 else tensor.half()  # float8 has no isfinite
        if not bool(torch.isfinite(values).all()):
            not_finite.append(name)
        elif _is_scale(name) and not bool(values.all()):
            zero.append(name)
    scales = [name for name in not_finite if _is_scale(name)]
    others = [name for name in not_finite if not _is_scale(name)]
    if scales:
        yield Finding(
            "scales-not-finite",
            f"{len(scales)} scale tensors hold NaN or infinity: {some(scales)}",
            "Every answer that passes through them is NaN. Quantize again; weights or calibration data were not finite.",
        )
    if others:
        yield Finding(
            "weights-not-finite",
            f"{len(others)} tensors hold NaN or infinity: {some(others)}",
            "Every answer that passes through them is NaN. Fetch or quantize the checkpoint again.",
        )
    if zero:
        yield Finding(
            "scales-zero",
            f"{len(zero)} scale tensors hold zeros: {some(zero)}",
            "These rows are zero, whatever the codes are; often scales that underflowed in float16.",
        )


def describe_values(inspected: Inspected) -> str:
    names = _read_values(inspected)
    scales = sum(map(_is_scale, names))
    return f"{scales:,} scales and {len(names) - scales:,} other tensors, all finite"


def _read_values(inspected: Inspected) -> list[str]:
    """The tensors whose values are checked. Integers are always finite."""
    readable = inspected.checkpoint.readable.items()
    floats = (name for name, tensor in readable if tensor.dtype in FLOATS)
    return [name for name in floats if inspected.every_value or _is_scale(name)]


def _is_scale(name: str) -> bool:
    return name.rpartition(".")[2] in SCALES


def check_stored_shapes(inspected: Inspected) -> Iterator[Finding]:
    """A packed weight carries its own shape, as two numbers."""
    checkpoint = inspected.checkpoint
    linears = {f"{name}.weight_shape": linear for name, linear in inspected.linears.items()}
    wrong = [
        f"{name} says {shape.tolist()}, config.json {list(linears[name].shape)}"
        for name, shape in checkpoint.read(name for name in linears if name in checkpoint.readable)
        if tuple(shape.tolist()) != linears[name].shape
    ]
    if wrong:
        yield Finding("wrong-weight-shape", some(wrong), "Readers unpack to the wrong shape, and fail or lose columns.")


def _dense_shapes(inspected: Inspected) -> Iterator[Disagreement]:
    quantized = inspected.quantized_modules
    seen = set()
    for layout in inspected.layouts.each:
        for disk, run in layout.loads.items():
            tensor = inspected.checkpoint.tensors.get(disk)
            packed = disk.endswith(".weight") and disk.removesuffix(".weight") in quantized
            if tensor is None or packed or disk in seen:
                continue
            seen.add(disk)
            if tensor.shape != layout.shapes[run]:
                yield Disagreement(disk, str(list(tensor.shape)), str(list(layout.shapes[run])))


def _quantized_shapes(inspected: Inspected) -> Iterator[Disagreement]:
    stated = inspected.quantization
    if stated is None or not stated.groups:
        return
    for linear in inspected.linears.values():
        kind = linear.storage
        if kind is None or len(linear.shape) != 2:
            continue
        treated = (stated.group(name, linear.classes) for name in linear.names)
        group = next((group for group in treated if group is not None), stated.groups[0])
        if group.weights is None:
            continue
        if stated.method == COMPRESSED:
            expected = _compressed_shapes(kind, linear, group)
        elif kind == "qweight":
            expected = _qweight_shapes(stated.method, linear, group.weights)
        else:
            continue
        for name, shapes in expected.items():
            stored = linear.stored.get(name)
            if stored is None or stored.shape not in shapes:
                described = str(list(stored.shape)) if stored is not None else "missing"
                yield Disagreement(f"{linear.on_disk}.{name}", described, " or ".join(str(list(s)) for s in shapes))


def _compressed_shapes(kind: str, linear: Linear, group: Group) -> dict[str, list[Shape]]:
    numbers, (outputs, inputs) = group.weights, linear.shape
    assert numbers is not None
    scales = _scale_shapes(numbers, outputs, inputs)
    expected = {"weight_scale": scales} if scales else {}
    if kind == "packed" and numbers.type == "int":
        # Widths that do not divide a word are packed tightly by new versions, and word by word by old ones.
        widths = {math.ceil(inputs * numbers.bits / WORD), math.ceil(inputs / (WORD // numbers.bits))}
        expected["weight_packed"] = [(outputs, width) for width in sorted(widths)]
        if not numbers.symmetric and scales:
            rows = math.ceil(outputs * numbers.bits / WORD)
            expected["weight_zero_point"] = [(rows, scales[0][1]), *scales]
    elif kind == "packed" and numbers.type == "float":
        expected["weight_packed"] = [(outputs, math.ceil(inputs * numbers.bits / 8))]
    elif kind in {"int8", "float8", "dense with scales"}:
        expected["weight"] = [(outputs, inputs)]
    return expected


def _scale_shapes(numbers: Numbers, outputs: int, inputs: int) -> list[Shape]:
    if numbers.strategy == "channel":
        return [(outputs, 1), (outputs,)]
    if numbers.strategy in {"group", "tensor_group"} and numbers.group_size:
        return [(outputs, math.ceil(inputs / numbers.group_size))]
    if numbers.strategy == "block" and numbers.block:
        return [(math.ceil(outputs / numbers.block[0]), math.ceil(inputs / numbers.block[1]))]
    return []


def _qweight_shapes(method: str, linear: Linear, numbers: Numbers) -> dict[str, list[Shape]]:
    (outputs, inputs), bits = linear.shape, numbers.bits
    groups = math.ceil(inputs / (numbers.group_size or inputs))
    words = math.ceil(outputs * bits / WORD)
    packed = (inputs, words) if method == "awq" else (math.ceil(inputs * bits / WORD), outputs)
    expected: dict[str, list[Shape]] = {"qweight": [packed], "scales": [(groups, outputs)]}
    if "qzeros" in linear.stored:
        expected["qzeros"] = [(groups, words)]
    return expected
