"""What can be told of a checkpoint folder without running it: files, tensors, shapes, values, and its ignore list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onptq.check import tensor_checks
from onptq.check.subject import open_subject
from onptq.checkpoint.companions import companions
from onptq.checkpoint.folder import Checkpoint, read_folder, read_json
from onptq.checkpoint.names import disagreements, find_decoder, matches
from onptq.errors import OnPTQError
from onptq.models.family import Family
from onptq.models.processing import SETTINGS_FILES, TOKENIZER_FILES

TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
SPEAKERS = "spk_dict.pt"  # a full Omni model that speaks does not load without it
STEPS = ("weight_scale", "weight_zero_point", "weight_global_scale", "input_scale")
STORED_AS = (
    ".weight_packed",
    ".qweight",
)  # what stands for a quantized linear's weight, by compressed-tensors and GPTQ


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, and what was seen."""

    name: str
    passed: bool
    seen: str


def check_folder(folder: Path, family: Family, dense: Path | None = None) -> list[Check]:
    """`dense` is the folder of the source: what that has and this has not is missing; what neither has is not."""
    files = check_files(folder, family, dense)
    try:
        checkpoint = read_folder(folder).require_whole()
    except OnPTQError as error:
        return [files, Check("tensors", False, str(error))]
    shards = len({tensor.file for tensor in checkpoint.tensors.values()})
    seen = f"{len(checkpoint.tensors):,} in {shards} {'shard' if shards == 1 else 'shards'}"
    checks = [files, Check("tensors", True, f"{seen}, {checkpoint.weight_bytes / 1e6:,.1f} MB")]
    return [*checks, check_shapes(checkpoint, family), check_values(checkpoint), check_ignored(checkpoint)]


def check_files(folder: Path, family: Family, dense: Path | None = None) -> Check:
    needed = [alternatives for alternatives in _needed(folder, family) if not _has(folder, alternatives)]
    if dense is not None:
        needed = [alternatives for alternatives in needed if _has(dense, alternatives)]
        left = sorted(set(companions(dense)) - set(companions(folder)))
        needed += [(str(path),) for path in left if not any(str(path) in alternatives for alternatives in needed)]
    if needed:
        return Check("files", False, "missing: " + "; ".join(" or ".join(alternatives) for alternatives in needed))
    beside = "all that the source has" if dense is not None else "tokenizer, processor, chat template"
    return Check("files", True, f"{len(companions(folder))} beside weights and config: {beside}")


def check_shapes(checkpoint: Checkpoint, family: Family) -> Check:
    try:
        decoder = find_decoder(_plain_names(checkpoint), (*family.ignore, *family.other_models))
    except OnPTQError as error:
        return Check("shapes", False, str(error))
    wrong = disagreements(checkpoint.config, checkpoint.tensors, decoder)
    if wrong:
        return Check("shapes", False, wrong[0] + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""))
    for defect in tensor_checks.check_shapes(open_subject(checkpoint.folder)):
        return Check("shapes", False, defect.found)
    return Check("shapes", True, f"{decoder.layers} layers as config.json says")


def check_values(checkpoint: Checkpoint) -> Check:
    """Every scale and every other number that is stored as it is; integers cannot be anything but finite."""
    broken, scales, others = [], 0, 0
    for name, tensor in checkpoint.read(checkpoint.tensors):
        if not tensor.is_floating_point():
            continue
        scale = name.endswith(STEPS)
        scales, others = scales + scale, others + (not scale)
        if not _finite(tensor):
            broken.append(name)
    if broken:
        return Check("values", False, f"NaN or infinity in {len(broken)} tensors: {', '.join(broken[:3])}")
    return Check("values", True, f"{scales:,} scales and {others:,} other tensors, all finite")


def check_ignored(checkpoint: Checkpoint) -> Check:
    """A pattern without a match is told, and no failure: it may name a module that has no tensor of its own."""
    quantization: Mapping[str, Any] = checkpoint.config.get("quantization_config") or {}
    patterns: Sequence[str] = quantization.get("ignore") or ()
    # A head tied to the embeddings is a module without a tensor of its own.
    modules = {"lm_head", *(name.rpartition(".")[0] for name in checkpoint.tensors)}
    unmatched = [pattern for pattern in patterns if not any(_ignores(pattern, module) for module in modules)]
    if unmatched:
        return Check(
            "ignore list", True, f"{len(unmatched)} of {len(patterns)} match no tensor: {', '.join(unmatched[:3])}"
        )
    return Check("ignore list", True, f"all {len(patterns)} match" if patterns else "none")


def _ignores(pattern: str, module: str) -> bool:
    return matches(module, pattern) or matches(module + ".", pattern)


def _needed(folder: Path, family: Family) -> Iterator[tuple[str, ...]]:
    yield TOKENIZER_FILES
    if family.image or family.audio:
        yield SETTINGS_FILES
        yield TEMPLATES
    config = read_json(folder / "config.json")
    if isinstance(config.get("talker_config"), dict) and config.get("enable_audio_output", True):
        yield (SPEAKERS,)


def _has(folder: Path, alternatives: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in alternatives)


def _plain_names(checkpoint: Checkpoint) -> set[str]:
    """Names as a dense checkpoint has them."""
    names = set(checkpoint.tensors)
    for end in STORED_AS:
        names |= {name.removesuffix(end) + ".weight" for name in checkpoint.tensors if name.endswith(end)}
    return names


def _finite(tensor: torch.Tensor) -> bool:
    if tensor.element_size() == 1:  # float8 knows no isfinite
        tensor = tensor.to(torch.float16)
    return bool(torch.isfinite(tensor).all())
