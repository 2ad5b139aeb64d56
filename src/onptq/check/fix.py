"""A corrected copy of a checkpoint: config.json and index as they should be, every tensor and every other file as it is.

Mended is what the files themselves decide: which modules are ignored (the dense ones), where quantization_config must stand,
which dtype the tensors have, which shard holds what. What is lost stays lost, and is said."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onptq.check.config_checks import DTYPE_KEYS, stored_dtype
from onptq.check.defects import Inspection, inspect_subject
from onptq.check.subject import Subject, open_subject
from onptq.checkpoint.companions import STAGED_CONFIG, companion_bytes, copy_companions, reported, staged, write_text
from onptq.checkpoint.folder import INDEX
from onptq.errors import OnPTQError

TARGETS = {"quantized-but-ignored", "ignored-on-disk"}
NAMES = {"ignored-under-other-names", "dense-but-not-ignored", "ignore-matches-nothing"} | TARGETS
LINEAR = "Linear"


@dataclass(frozen=True)
class Mended:
    """`after` is the inspection of the copy; without mendable defects there is no copy."""

    before: Inspection
    after: Inspection
    changes: tuple[str, ...]
    out: Path | None


def mend_folder(folder: Path, out: Path) -> Mended:
    """Inspects `folder`, writes a copy into `out` with every mendable defect mended, and inspects that."""
    _check_new(folder, out)
    subject = open_subject(folder)
    before = inspect_subject(subject)
    mendable = {defect.name for defect in before.findings if defect.mendable}
    if not mendable:
        return Mended(before, before, (), None)
    config, changes = _mend_config(subject, mendable)
    index = _rebuilt_index(subject) if "wrong-index" in mendable else None
    if index is not None:
        changes.append(f"{INDEX} rebuilt from the headers of {len(subject.reading.shards)} shards")
    _write_copy(subject, out, config, index)
    return Mended(before, inspect_subject(open_subject(out)), tuple(changes), out)


def ignore_patterns(subject: Subject) -> list[str]:
    """Patterns for exactly the dense linears, that hold for their names on disk and at run time alike."""
    dense = [linear for linear in subject.linears.values() if linear.storage is None]
    quantized = [name for linear in subject.linears.values() if linear.storage is not None for name in linear.names]
    stated = subject.quantization
    kept = [pattern for pattern in (stated.ignore if stated else ()) if pattern.startswith("re:")]
    family = subject.family.ignore if subject.family else ()
    patterns: list[str] = []
    for linear in dense:
        for candidate in (*patterns, *kept, *family, *_candidates(linear.names)):
            if _covers(candidate, linear.names) and not any(_covers(candidate, [name]) for name in quantized):
                if candidate not in patterns:
                    patterns.append(candidate)
                break
        else:
            patterns += linear.names  # no ending in common: every name it goes by
    return patterns


def _candidates(names: Iterable[str]) -> Iterator[str]:
    """From the widest, all of a tower, to the narrowest, the module itself behind whatever prefix."""
    parts = [name.split(".") for name in names]
    common = _common_ending(parts)
    if len(common) == 1:
        yield f"re:.*{re.escape(common[0])}"
    for component in common[:-1]:
        if not component.isdigit():
            yield rf"re:.*{re.escape(component)}\..*"
    yield "re:(.*\\.)?" + re.escape(".".join(common)) + "$"


def _common_ending(names: list[list[str]]) -> list[str]:
    length = 0
    while length < min(map(len, names)) and len({name[-length - 1] for name in names}) == 1:
        length += 1
    return names[0][len(names[0]) - length :]


def _covers(pattern: str, names: Iterable[str]) -> bool:
    from compressed_tensors.utils.match import match_name

    return all(match_name(name, pattern) for name in names)


def _mend_config(subject: Subject, mendable: set[str]) -> tuple[dict[str, Any], list[str]]:
    config = copy.deepcopy(subject.reading.config)
    changes = []
    if mendable & NAMES:
        patterns = ignore_patterns(subject)
        sections = [_at(config, place)["quantization_config"] for place in subject.reading.quantizations]
        old = len(subject.quantization.ignore) if subject.quantization else 0
        changes.append(f"ignore: {old} entries replaced by {', '.join(patterns) or 'none'}")
        for section in sections:
            section["ignore"] = patterns
        if mendable & TARGETS and _misses_targets(subject):
            changes.append(f"targets: replaced by {LINEAR}, all that is not ignored")
            for section in sections:
                next(iter(section["config_groups"].values()))["targets"] = [LINEAR]
    if "thinker-without-quantization" in mendable:
        config["thinker_config"]["quantization_config"] = copy.deepcopy(config["quantization_config"])
        changes.append("quantization_config copied into thinker_config")
    if "quantization-only-in-thinker" in mendable:
        config["quantization_config"] = copy.deepcopy(config["thinker_config"]["quantization_config"])
        changes.append("quantization_config copied from thinker_config to the top")
    if "wrong-dtype" in mendable:
        stored = stored_dtype(subject)
        key = next(key for key in DTYPE_KEYS if config.get(key))
        changes.append(f"{key}: {config[key]} replaced by {stored}")
        config[key] = stored
    return config, changes


def _misses_targets(subject: Subject) -> bool:
    """Whether quantized linears go untreated for want of a target, whatever is ignored."""
    if subject.quantization is None:
        return False
    unhindered = replace(subject.quantization, ignore=())
    quantized = (linear for linear in subject.linears.values() if linear.storage is not None)
    return any(unhindered.group(name, linear.classes) is None for linear in quantized for name in linear.names)


def _at(config: dict[str, Any], place: str) -> dict[str, Any]:
    if place == "text_config":
        config = config.get("thinker_config") or config
    part: dict[str, Any] = config[place] if place else config
    return part


def _rebuilt_index(subject: Subject) -> dict[str, Any]:
    tensors = subject.reading.tensors
    return {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: tensors[name].file.name for name in sorted(tensors)},
    }


def _write_copy(subject: Subject, out: Path, config: dict[str, Any], index: dict[str, Any] | None) -> None:
    source, shards = subject.reading.folder, [shard for shard in subject.reading.shards if shard.file.is_file()]
    needed = sum(shard.actual_bytes for shard in shards) + companion_bytes(source)
    with staged(out, needed) as stage, reported(out, needed):
        for shard in shards:
            shutil.copyfile(shard.file, stage / shard.file.name)
        copy_companions(source, stage)
        if (source / "README.md").is_file():
            shutil.copyfile(source / "README.md", stage / "README.md")
        if index is not None:
            write_text(stage / INDEX, json.dumps(index, indent=2) + "\n")
        elif (source / INDEX).is_file():
            shutil.copyfile(source / INDEX, stage / INDEX)
        write_text(stage / STAGED_CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _check_new(folder: Path, out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OnPTQError(f"{out} exists and is not empty; --fix writes into a new folder, never in place")
    if out.resolve().is_relative_to(folder.resolve()):
        raise OnPTQError(f"{out} lies in the folder {folder} itself; choose another one for --fix")
