"""All checks that need no loaded model, in the order in which their findings are read.

`onptq inspect` shows the findings; `onptq verify` shows one row per group of them, and reads every value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onptq.check import config_checks, folder_checks, quantization_checks, tensor_checks
from onptq.check.description import Description, describe
from onptq.check.findings import Check, Finding
from onptq.check.inspected import Inspected, open_inspected
from onptq.checkpoint.companions import companions


@dataclass(frozen=True)
class Group:
    """Checks of one topic."""

    name: str
    checks: tuple[Callable[[Inspected], Iterator[Finding]], ...]
    summary: Callable[[Inspected], str]  # where nothing is wrong
    inherited: bool = False  # whether a finding may be the source's own

    def findings(self, inspected: Inspected) -> Iterator[Finding]:
        for check in self.checks:
            yield from check(inspected)


def _files(inspected: Inspected) -> str:
    return f"{len(companions(inspected.checkpoint.folder))} beside weights and config"


def _tensors(inspected: Inspected) -> str:
    checkpoint = inspected.checkpoint
    shards = f"{len(checkpoint.shards)} shard{'s' if len(checkpoint.shards) != 1 else ''}"
    return f"{len(checkpoint.tensors):,} in {shards}, {checkpoint.weight_bytes / 1e6:,.1f} MB"


def _shapes(inspected: Inspected) -> str:
    return inspected.layouts.unknown or f"{len(inspected.linears)} linears as config.json says"


def _config(inspected: Inspected) -> str:
    return "builds " + ", ".join(layout.model_class for layout in inspected.layouts.each)


def _quantization(inspected: Inspected) -> str:
    stated = inspected.quantization
    if stated is None:
        return "none"
    modules = f"{len(inspected.quantized_modules)} quantized modules"
    return f"{stated.scheme or stated.method}: {modules}, all {len(stated.ignore)} ignore patterns match"


GROUPS = (
    Group("files", (folder_checks.check_companions,), _files, inherited=True),
    Group(
        "tensors",
        (
            folder_checks.check_shards,
            folder_checks.check_index,
            folder_checks.check_doubles,
            tensor_checks.check_missing,
        ),
        _tensors,
    ),
    Group(
        "config",
        (
            config_checks.check_builds,
            config_checks.check_rope,
            config_checks.check_thinker,
            config_checks.check_dtype,
            config_checks.check_placeholders,
        ),
        _config,
        inherited=True,
    ),
    Group(
        "quantization",
        (
            quantization_checks.check_declared,
            quantization_checks.check_names,
            quantization_checks.check_patterns,
            quantization_checks.check_head,
            quantization_checks.check_tied_twice,
            quantization_checks.check_storage,
        ),
        _quantization,
    ),
    Group(
        "shapes",
        (tensor_checks.check_layers, tensor_checks.check_shapes, tensor_checks.check_stored_shapes),
        _shapes,
    ),
    Group("values", (tensor_checks.check_values,), tensor_checks.describe_values),
)


@dataclass(frozen=True)
class Inspection:
    """A description of a checkpoint, and all findings."""

    description: Description
    findings: tuple[Finding, ...]

    @property
    def defects(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.note)

    @property
    def notes(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.note)


def inspect_folder(folder: Path) -> Inspection:
    return inspect(open_inspected(folder))


def inspect(inspected: Inspected) -> Inspection:
    findings = (finding for group in GROUPS for finding in group.findings(inspected))
    return Inspection(describe(inspected), tuple(findings))


def check_folder(folder: Path, source: Path | None = None) -> list[Check]:
    """One check per group; the last one is of the tensors where some of them cannot be read.

    A missing file or an odd config is no defect where `source`, the folder of the dense model, has the same. Any other
    file that `source` has must be there too.
    """
    inspected = open_inspected(folder, every_value=True)
    checks = []
    for group in GROUPS:
        defects = [finding for finding in group.findings(inspected) if not finding.note]
        inherited = []
        if source is not None and group.inherited and defects:
            names = {finding.name for finding in group.findings(open_inspected(source))}
            inherited = [finding.name for finding in defects if finding.name in names]
            defects = [finding for finding in defects if finding.name not in names]
        if source is not None and group.name == "files" and not defects:
            defects = list(folder_checks.lost_companions(inspected, source))
        seen = "; ".join(f"{finding.name}: {finding.what}" for finding in defects) or group.summary(inspected)
        checks.append(Check(group.name, not defects, "; ".join([seen, *(f"{n}, as in the source" for n in inherited)])))
        if group.name == "tensors" and defects:
            break
    return checks
