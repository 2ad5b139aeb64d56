"""The inputs of a quantization: checked before any work, so that nothing fails later which could fail now."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from onptq.bank import ROLLOUTS
from onptq.checkpoint.companions import check_room, companion_bytes
from onptq.checkpoint.exportable import check_apart, check_cached, check_exportable, check_groups, output_bytes
from onptq.checkpoint.folder import CONFIG
from onptq.checkpoint.source import Source, choose_device, find_source, is_hub_id
from onptq.cycle.served import ServedPolicy
from onptq.data.calibration import Prompts, check_on_bad_prompt, gather_prompts
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.methods.experts import check_method
from onptq.models.processing import PromptProcessor
from onptq.progress import Reporter
from onptq.recipe import Recipe
from onptq.run import Run, check_place, is_contract_1, run_home
from onptq.schemes import Scheme
from onptq.serving.vllm import Vllm
from onptq.version import __version__

PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors")
Manifest = str | Path | Sequence[Prompt] | None


@dataclass(frozen=True)
class Job:
    """The checked inputs of a quantization."""

    source: Source
    out: Path
    recipe: Recipe
    scheme: Scheme
    prompts: Prompts
    manifest: str | None  # of the calibration prompts, as the user named it
    device: torch.device
    vllm: Vllm

    @property
    def served(self) -> ServedPolicy | None:
        """Who writes the rollouts, where it is not this package."""
        served = self.recipe.rounds and self.recipe.follow.engine == "vllm"
        return ServedPolicy(self.source, self.prompts.calibration, self.vllm) if served else None

    def check_server(self, run: Run) -> None:
        """Refuse a Python without vLLM before any work, where rollouts are still to be written by one."""
        written = range(self.recipe.rounds if self.recipe.refresh else 1)
        if self.served is not None and not all(run.has(f"rounds/{k}/{ROLLOUTS}") for k in written):
            self.vllm.check_installed()

    def processor(self) -> PromptProcessor:
        return open_processor(self.source, self.recipe)

    def identify(self, reporter: Reporter) -> dict[str, Any]:
        """Everything that makes this run the same as another one: see `Run.open`."""
        with reporter.phase("Hash the model", total=len(self.source.files), unit="files") as bar:
            sha256 = self.source.sha256(bar.advance)
        return {
            "recipe": self.recipe.model_dump(),
            "model": {"source": self.source.name, "family": self.source.family.name, "sha256": sha256},
            "prompts": {
                "source": self.manifest,
                "sha256": manifest_digest(self.prompts.every),
                "calibration": len(self.prompts.calibration),
                "holdout": len(self.prompts.holdout),
            },
            "seeds": {"recipe": self.recipe.seed},
            "versions": {
                "onptq": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in PACKAGES},
                "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            },
        }


def check_job(
    model: str | Path | Source,
    out: Path,
    recipe: Recipe,
    calibration: Manifest,
    holdout: Manifest,
    on_bad_prompt: str,
    device: torch.device,
    reporter: Reporter,
    vllm: Vllm,
) -> Job:
    """Refuse before any work what would fail later, beside what `check_settings` refuses."""
    check_on_bad_prompt(on_bad_prompt)
    if not isinstance(model, Source) and not is_hub_id(str(model)):
        model = find_source(model)
    if calibration is None and recipe.needs_prompts:
        fetched = "" if isinstance(model, Source) else f"; {str(model)!r} is no folder here and would be fetched"
        raise OnPTQError(
            f"method {recipe.method} needs --calibration, a .jsonl or .parquet manifest of prompts{fetched}"
        )
    source = model if isinstance(model, Source) else find_source(model)
    check_apart(source.folder, out)
    check_apart(source.folder, run_home(out))
    scheme = Scheme.parse(recipe.scheme)
    if recipe.rounds and recipe.follow.engine == "vllm":
        vllm.check(scheme)
    check_exportable(source)
    check_groups(source, scheme)
    check_cached(source, scheme)
    check_method(recipe.init, source.family)
    if not (out / CONFIG).exists():
        check_room(out, output_bytes(source, scheme) + companion_bytes(source.folder))
    seed = None if is_contract_1(out) else recipe.seed
    prompts = _gather(source, calibration, holdout, recipe, seed, on_bad_prompt, reporter)
    named = str(calibration) if isinstance(calibration, str | Path) else None
    return Job(source, out, recipe, scheme, prompts, named, device, vllm)


def check_settings(out: Path, recipe: Recipe, calibration: Manifest, holdout: Manifest) -> torch.device:
    """Refuse what can be refused without the model; return the device."""
    if not Scheme.parse(recipe.scheme).quantizes_weights:
        raise OnPTQError(
            f"scheme {recipe.scheme} leaves the weights in 16 bits: there is nothing to write; expected W2 to W8"
        )
    for manifest in (calibration, holdout):
        if isinstance(manifest, str | Path) and not Path(manifest).exists():
            raise OnPTQError(f"cannot read the manifest {manifest}: no such file; expected a .jsonl or .parquet file")
    check_place(out, run_home(out))
    return choose_device(recipe.compute.device)


def _gather(
    source: Source,
    calibration: Manifest,
    holdout: Manifest,
    recipe: Recipe,
    seed: int | None,
    on_bad_prompt: str,
    reporter: Reporter,
) -> Prompts:
    """The prompts of the run, with a line on how many are used and a warning where that is worth one."""
    usable = None
    if on_bad_prompt == "skip":
        processor = open_processor(source, recipe)
        usable = partial(processor.check, max_new=recipe.follow.max_tokens)
    modalities = source.family.modalities
    prompts = gather_prompts(
        calibration, holdout, recipe.data, modalities, seed=seed, usable=usable, note=reporter.note
    )
    for text in prompts.warnings(recipe.rounds > 0):
        reporter.warn(text)
    if prompts.every:
        reporter.note(prompts.describe())
    return prompts


def open_processor(source: Source, recipe: Recipe) -> PromptProcessor:
    return PromptProcessor.from_folder(source.folder, source.family, source.config, recipe.data.special_tokens)
