"""A checkpoint folder together with the models that transformers builds from its config: the input of all checks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from onptq.check.layouts import Layouts, read_layouts
from onptq.checkpoint.folder import Checkpoint, StoredTensor, read_folder
from onptq.checkpoint.quantization import Quantization, parse_quantization, storage
from onptq.errors import OnPTQError
from onptq.models import family_of
from onptq.models.family import Family, thinker_config


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
class Inspected:
    """A checkpoint folder, read as far as it goes."""

    checkpoint: Checkpoint
    layouts: Layouts
    every_value: bool = False  # whether checks read all tensors, not the scales alone

    @cached_property
    def quantization(self) -> Quantization | None:
        try:
            return parse_quantization(self.checkpoint.quantization)
        except (TypeError, ValueError, AttributeError) as error:
            raise OnPTQError(
                f"{self.checkpoint.folder / 'config.json'}: quantization_config is malformed ({error}); expected what "
                "compressed-tensors, GPTQ, AWQ, AutoRound, bitsandbytes or FP8 checkpoints have there"
            ) from error

    @property
    def family(self) -> Family | None:
        try:
            return family_of(self.checkpoint.config, self.checkpoint.tensors)
        except OnPTQError:
            return None

    @property
    def multimodal(self) -> bool:
        inner = thinker_config(self.checkpoint.config)
        family = self.family
        by_family = family is not None and len(family.modalities) > 1
        return by_family or any(key in inner for key in ("vision_config", "audio_config"))

    @property
    def thinker(self) -> dict[str, Any]:
        return dict(thinker_config(self.checkpoint.config))

    @cached_property
    def linears(self) -> dict[str, Linear]:
        """The linears by name on disk. A head tied to the embeddings has no tensor there: it has its run-time name."""
        linears: dict[str, Linear] = {}
        for layout in self.layouts.each:
            on_disk = layout.module_on_disk()
            for run, classes in layout.linears.items():
                disk = on_disk.get(run, run if f"{run}.weight" in layout.tied else None)
                if disk is None:
                    continue
                before = linears[disk].run_time if disk in linears else ()
                stored = self.checkpoint.modules.get(disk, {})
                linears[disk] = Linear(disk, (*before, run), classes, stored, layout.shapes[f"{run}.weight"])
        return linears

    @cached_property
    def quantized_modules(self) -> dict[str, str]:
        """How the weight is stored, by the module's name on disk, of all modules with a quantized weight."""
        stored = ((name, storage(parameters)) for name, parameters in self.checkpoint.modules.items())
        return {name: kind for name, kind in stored if kind is not None}


def open_inspected(folder: Path, *, every_value: bool = False) -> Inspected:
    """The checkpoint in `folder`; `every_value` for the deeper checks, which read all tensors."""
    checkpoint = read_folder(folder)
    return Inspected(checkpoint, read_layouts(folder, checkpoint.config, checkpoint.modules), every_value)
