"""Defects of the tensors: missing ones, shapes that the config contradicts, scales that cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from onptq.check.subject import Defect, Linear, Subject, some
from onptq.checkpoint.quantization import COMPRESSED, Group, Numbers

SCALES = ("weight_scale", "weight_scale_inv", "weight_global_scale", "scales", "input_scale", "k_scale", "v_scale")
WORD = 32

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Disagreement:
    tensor: str
    stored: str
    expected: str

    def __str__(self) -> str:
        return f"{self.tensor} is {self.stored}, expected {self.expected}"


def check_missing(subject: Subject) -> Iterator[Defect]:
    lost_shards = {shard.file.name for shard in subject.reading.shards if shard.unreadable is not None}
    named = {name for name, file in (subject.reading.weight_map or {}).items() if file in lost_shards}
    if named or not subject.reading.tensors:
        return  # told by the shards already
    for layout in subject.layouts.each:
        if layout.converts:
            continue
        missing = sorted(set(layout.shapes) - set(layout.loads.values()) - set(layout.tied))
        if missing:
            yield Defect(
                "missing-tensors",
                f"{len(missing)} parameters of {layout.model_class} are in no shard: {some(missing)}",
                "transformers fills them with random numbers and only warns: a tower that sees nothing, a head that "
                "says anything.",
            )
            return


def check_shapes(subject: Subject) -> Iterator[Defect]:
    wrong = [*_dense_shapes(subject), *_quantized_shapes(subject)]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        yield Defect(
            "wrong-shapes",
            f"tensors disagree with config.json: {wrong[0]}{more}",
            "The checkpoint does not load, or loads with random numbers in their place. Config and weights come from "
            "different models, or the weights were packed for another scheme.",
        )


def check_scales(subject: Subject) -> Iterator[Defect]:
    """Reads nothing but the scales, a small part of the file."""
    import torch

    checkpoint = subject.reading
    names = [name for name in checkpoint.readable if name.rpartition(".")[2] in SCALES]
    not_finite, zero = [], []
    for name, scale in checkpoint.read(names):
        values = scale.float()
        if not bool(torch.isfinite(values).all()):
            not_finite.append(name)
        elif not bool(values.all()):
            zero.append(name)
    if not_finite:
        yield Defect(
            "scales-not-finite",
            f"{len(not_finite)} scale tensors hold NaN or infinity: {some(not_finite)}",
            "Every answer that passes through them is NaN. Quantize again; weights or calibration data had no numbers there.",
        )
    if zero:
        yield Defect(
            "scales-zero",
            f"{len(zero)} scale tensors hold zeros: {some(zero)}",
            "Whatever the codes say, these rows are zero; often scales that underflowed in float16.",
        )


def check_stored_shapes(subject: Subject) -> Iterator[Defect]:
    """A packed weight carries its own shape, as two numbers."""
    checkpoint = subject.reading
    linears = {f"{name}.weight_shape": linear for name, linear in subject.linears.items()}
    wrong = [
        f"{name} says {shape.tolist()}, config.json {list(linears[name].shape)}"
        for name, shape in checkpoint.read(name for name in linears if name in checkpoint.readable)
        if tuple(shape.tolist()) != linears[name].shape
    ]
    if wrong:
        yield Defect("wrong-weight-shape", some(wrong), "Readers unpack to the wrong shape, and fail or lose columns.")


def _dense_shapes(subject: Subject) -> Iterator[Disagreement]:
    quantized = subject.quantized_modules
    seen = set()
    for layout in subject.layouts.each:
        for disk, run in layout.loads.items():
            tensor = subject.reading.tensors.get(disk)
            packed = disk.endswith(".weight") and disk.removesuffix(".weight") in quantized
            if tensor is None or packed or disk in seen:
                continue
            seen.add(disk)
            if tensor.shape != layout.shapes[run]:
                yield Disagreement(disk, str(list(tensor.shape)), str(list(layout.shapes[run])))


def _quantized_shapes(subject: Subject) -> Iterator[Disagreement]:
    stated = subject.quantization
    if stated is None or not stated.groups:
        return
    for linear in subject.linears.values():
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
    elif kind in {"int8", "float8", "dense with scales"}:
        expected["weight"] = [(outputs, inputs)]
    return expected


def _scale_shapes(numbers: Numbers, outputs: int, inputs: int) -> list[Shape]:
    if numbers.strategy == "channel":
        return [(outputs, 1), (outputs,)]
    if numbers.strategy == "group" and numbers.group_size:
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
