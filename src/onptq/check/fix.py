"""A corrected copy of a checkpoint: config.json and index as they should be, every tensor and every other file as it is.

Corrected is what the files themselves decide: the ignored modules (the dense ones), the places of quantization_config, the
dtype of the tensors, the shard of each tensor. Lost files and tensors are reported, never made up.
"""

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
from onptq.check.inspected import Inspected, open_inspected
from onptq.check.static import Inspection, inspect
from onptq.checkpoint.companions import (
    STAGED_CONFIG,
    check_links,
    companion_bytes,
    copy_companions,
    reported,
    staged,
    write_text,
)
from onptq.checkpoint.folder import INDEX
from onptq.checkpoint.provenance import CARD
from onptq.errors import OnPTQError

TARGETS = {"quantized-but-ignored", "ignored-on-disk"}
NAMES = {"ignored-under-other-names", "dense-but-not-ignored", "ignore-matches-nothing"} | TARGETS
LINEAR = "Linear"


@dataclass(frozen=True)
class Fix:
    """`after` is the inspection of the copy; without fixable defects there is no copy."""

    before: Inspection
    after: Inspection
    changes: tuple[str, ...]
    out: Path | None


def fix_folder(folder: Path, out: Path) -> Fix:
    """Inspect `folder`, write a copy without the fixable defects into `out`, and inspect the copy."""
    _check_new(folder, out)
    inspected = open_inspected(folder)
    before = inspect(inspected)
    fixable = {finding.name for finding in before.findings if finding.fixable}
    if not fixable:
        return Fix(before, before, (), None)
    config, changes = _fix_config(inspected, fixable)
    index = _rebuilt_index(inspected) if "wrong-index" in fixable else None
    if index is not None:
        changes.append(f"{INDEX} rebuilt from the headers of {len(inspected.checkpoint.shards)} shards")
    _write_copy(inspected, out, config, index)
    return Fix(before, inspect(open_inspected(out)), tuple(changes), out)


def ignore_patterns(inspected: Inspected) -> list[str]:
    """Patterns for exactly the dense linears, which match their names on disk and at run time alike."""
    dense = [linear for linear in inspected.linears.values() if linear.storage is None]
    quantized = [name for linear in inspected.linears.values() if linear.storage is not None for name in linear.names]
    stated = inspected.quantization
    regexes = [pattern for pattern in (stated.ignore if stated else ()) if pattern.startswith("re:")]
    family = inspected.family.ignore if inspected.family else ()
    patterns: list[str] = []
    for linear in dense:
        for candidate in (*patterns, *regexes, *family, *_candidates(linear.names)):
            if _covers(candidate, linear.names) and not any(_covers(candidate, [name]) for name in quantized):
                if candidate not in patterns:
                    patterns.append(candidate)
                break
        else:
            patterns += linear.names  # no ending in common: every name it goes by
    return patterns


def _candidates(names: Iterable[str]) -> Iterator[str]:
    """Patterns from the widest, all of a tower, to the narrowest, the module itself behind any prefix."""
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


def _fix_config(inspected: Inspected, fixable: set[str]) -> tuple[dict[str, Any], list[str]]:
    config = copy.deepcopy(inspected.checkpoint.config)
    changes = []
    if fixable & NAMES:
        patterns = ignore_patterns(inspected)
        sections = [_at(config, place)["quantization_config"] for place in inspected.checkpoint.quantizations]
        old = len(inspected.quantization.ignore) if inspected.quantization else 0
        changes.append(f"ignore: {old} entries replaced by {', '.join(patterns) or 'none'}")
        for section in sections:
            section["ignore"] = patterns
        if fixable & TARGETS and _misses_targets(inspected):
            changes.append(f"targets: replaced by {LINEAR}, all that is not ignored")
            for section in sections:
                next(iter(section["config_groups"].values()))["targets"] = [LINEAR]
    if "thinker-without-quantization" in fixable:
        config["thinker_config"]["quantization_config"] = copy.deepcopy(config["quantization_config"])
        changes.append("quantization_config copied into thinker_config")
    if "quantization-only-in-thinker" in fixable:
        config["quantization_config"] = copy.deepcopy(config["thinker_config"]["quantization_config"])
        changes.append("quantization_config copied from thinker_config to the top")
    if "wrong-dtype" in fixable:
        stored = stored_dtype(inspected)
        key = next(key for key in DTYPE_KEYS if config.get(key))
        changes.append(f"{key}: {config[key]} replaced by {stored}")
        config[key] = stored
    return config, changes


def _misses_targets(inspected: Inspected) -> bool:
    """Whether some quantized linears are no target, even if nothing were ignored."""
    if inspected.quantization is None:
        return False
    unignoring = replace(inspected.quantization, ignore=())
    quantized = (linear for linear in inspected.linears.values() if linear.storage is not None)
    return any(unignoring.group(name, linear.classes) is None for linear in quantized for name in linear.names)


def _at(config: dict[str, Any], place: str) -> dict[str, Any]:
    if place == "text_config":
        config = config.get("thinker_config") or config
    part: dict[str, Any] = config[place] if place else config
    return part


def _rebuilt_index(inspected: Inspected) -> dict[str, Any]:
    tensors = inspected.checkpoint.stored
    return {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: tensors[name].file.name for name in sorted(tensors)},
    }


def _write_copy(inspected: Inspected, out: Path, config: dict[str, Any], index: dict[str, Any] | None) -> None:
    source, shards = (
        inspected.checkpoint.folder,
        [shard for shard in inspected.checkpoint.shards if shard.file.is_file()],
    )
    # A shard may be a link to anywhere if it is one; any other file is copied from the model folder alone.
    check_links(source, *(shard.file for shard in shards if not shard.whole), source / CARD, source / INDEX)
    needed = sum(shard.actual_bytes for shard in shards) + companion_bytes(source)
    with staged(out, needed) as stage, reported(out, needed):
        for shard in shards:
            shutil.copyfile(shard.file, stage / shard.file.name)
        copy_companions(source, stage)
        if (source / CARD).is_file():
            shutil.copyfile(source / CARD, stage / CARD)
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
