"""What the checks look at, and what they find."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from onptq.check.runtime import Layouts, read_layouts
from onptq.checkpoint.folder import Checkpoint, StoredTensor, read_folder
from onptq.checkpoint.quantization import Quantization, parse_quantization, storage
from onptq.errors import OnPTQError
from onptq.models import family_of
from onptq.models.family import Family, thinker_config

SHOWN = 3


@dataclass(frozen=True)
class Defect:
    """Something that is wrong with a checkpoint, or, as a `note`, only worth knowing."""

    name: str
    found: str
    why: str
    mendable: bool = False  # whether `--fix` mends it
    note: bool = False


@dataclass(frozen=True)
class Linear:
    """A linear of the checkpoint: its name on disk, and the names that the classes which load it give to it."""

    on_disk: str
    run_time: tuple[str, ...]
    classes: frozenset[str]
    stored: dict[str, StoredTensor]
    shape: tuple[int, ...]  # [outputs, inputs] by the config

    @property
    def storage(self) -> str | None:
        return storage(self.stored)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.on_disk, *self.run_time)


@dataclass(frozen=True)
class Subject:
    reading: Checkpoint
    layouts: Layouts

    @cached_property
    def quantization(self) -> Quantization | None:
        try:
            return parse_quantization(self.reading.quantization)
        except (TypeError, ValueError, AttributeError) as error:
            raise OnPTQError(
                f"{self.reading.folder / 'config.json'}: quantization_config is malformed ({error}); expected what "
                "compressed-tensors, GPTQ, AWQ, AutoRound, bitsandbytes or FP8 checkpoints have there"
            ) from error

    @property
    def family(self) -> Family | None:
        try:
            return family_of(self.reading.config)
        except OnPTQError:
            return None

    @property
    def multimodal(self) -> bool:
        inner = thinker_config(self.reading.config)
        family = self.family
        by_family = family is not None and len(family.modalities) > 1
        return by_family or any(key in inner for key in ("vision_config", "audio_config"))

    @property
    def thinker(self) -> dict[str, Any]:
        return dict(thinker_config(self.reading.config))

    @cached_property
    def linears(self) -> dict[str, Linear]:
        """By name on disk. A head tied to the embeddings has no tensor there and goes by its run-time name."""
        found: dict[str, Linear] = {}
        for layout in self.layouts.each:
            on_disk = layout.module_on_disk()
            for run, classes in layout.linears.items():
                disk = on_disk.get(run, run if f"{run}.weight" in layout.tied else None)
                if disk is None:
                    continue
                before = found[disk].run_time if disk in found else ()
                stored = self.reading.modules.get(disk, {})
                found[disk] = Linear(disk, (*before, run), classes, stored, layout.shapes[f"{run}.weight"])
        return found

    @cached_property
    def quantized_modules(self) -> dict[str, str]:
        """Name on disk -> how its weight is stored, of all modules with a quantized one."""
        stored = ((name, storage(parameters)) for name, parameters in self.reading.modules.items())
        return {name: kind for name, kind in stored if kind is not None}


def open_subject(folder: Path) -> Subject:
    reading = read_folder(folder)
    return Subject(reading, read_layouts(folder, reading.config, reading.modules))


def some(names: Iterable[str]) -> str:
    """A few of them, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
