"""All checks, in the order in which their findings are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onptq.check import config_checks, folder_checks, quantization_checks, tensor_checks
from onptq.check.description import Description, describe
from onptq.check.subject import Defect, Subject, open_subject

CHECKS: tuple[Callable[[Subject], Iterator[Defect]], ...] = (
    folder_checks.check_shards,
    folder_checks.check_index,
    folder_checks.check_doubles,
    folder_checks.check_companions,
    config_checks.check_builds,
    config_checks.check_rope,
    config_checks.check_thinker,
    config_checks.check_dtype,
    config_checks.check_placeholders,
    quantization_checks.check_declared,
    quantization_checks.check_run_time_names,
    quantization_checks.check_disk_names,
    quantization_checks.check_patterns,
    quantization_checks.check_head,
    quantization_checks.check_tied_twice,
    quantization_checks.check_storage,
    tensor_checks.check_missing,
    tensor_checks.check_shapes,
    tensor_checks.check_stored_shapes,
    tensor_checks.check_scales,
)


@dataclass(frozen=True)
class Inspection:
    description: Description
    findings: tuple[Defect, ...]

    @property
    def defects(self) -> tuple[Defect, ...]:
        return tuple(finding for finding in self.findings if not finding.note)

    @property
    def notes(self) -> tuple[Defect, ...]:
        return tuple(finding for finding in self.findings if finding.note)


def inspect_folder(folder: Path) -> Inspection:
    return inspect_subject(open_subject(folder))


def inspect_subject(subject: Subject) -> Inspection:
    return Inspection(describe(subject), tuple(defect for check in CHECKS for defect in check(subject)))
