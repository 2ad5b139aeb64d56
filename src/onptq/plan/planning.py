"""The plan of a run: whether it can run, what it quantizes, takes and writes, and who can serve the result."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch

from onptq.check.probes import probe_prompt
from onptq.checkpoint.catalogs import did_you_mean, is_cataloged
from onptq.checkpoint.companions import check_room
from onptq.checkpoint.exportable import check_apart, check_cached, check_exportable, check_groups
from onptq.checkpoint.served import Served
from onptq.checkpoint.serving import serving
from onptq.checkpoint.source import Source, find_source
from onptq.data.calibration import Prompts, check_on_bad_prompt, gather_prompts
from onptq.data.prompts import Prompt
from onptq.engine.budget import Held
from onptq.errors import OnPTQError
from onptq.files import size
from onptq.methods.experts import check_method
from onptq.models.processing import PromptProcessor, context_length
from onptq.models.sharding import Layout
from onptq.plan.estimate import Memory
from onptq.plan.layouts import WHERE, Model
from onptq.plan.machine import Machine, this_machine
from onptq.plan.parts import Parts, Shapes, find_parts
from onptq.plan.phases import Phase, duration, fitting_changes, refuse_too_large
from onptq.plan.probe import probe_rates
from onptq.plan.seconds import Rates, Seconds, datasheet_rates
from onptq.plan.work import CANDIDATES, Work, count_work, work_of
from onptq.recipe import Recipe
from onptq.run import check_place, run_home
from onptq.schemes import Scheme
from onptq.serving.vllm import Vllm

RANGE = 2.0  # a run takes between the estimate divided by this and the estimate times this
FEW_SECONDS = 5.0  # below which the estimate says little: starting and ending a run take about as long
CROWDED = 2.0  # times that the run's threads are slower than one, from which on it is worth a warning
DATA_PARALLEL, SHARDED, OFFLOADED = "data parallel", "sharded", "offloaded"
MODELLED_INITS = ("search", "rtn", "signround", "search+signround")
Given = str | Path | Sequence[Prompt] | None  # prompts: a manifest, or the prompts themselves


@dataclass(frozen=True)
class Plan:
    """Everything that is known before a run. `refusals` are the reasons why it cannot run; empty if it can."""

    model: str
    recipe: Recipe
    serving: tuple[Served, ...]
    family: str | None = None
    parts: Parts | None = None
    machine: Machine | None = None
    work: Work | None = None
    layout: Layout = "whole"
    phases: tuple[Phase, ...] = ()
    run_bytes: int | None = None  # of the run's files beside the checkpoint
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def peak(self) -> int:
        """Bytes on the device that computes."""
        on_gpu = self.machine is not None and self.machine.on_gpu
        return max((phase.gpu_bytes if on_gpu else phase.host_bytes for phase in self.phases), default=0)

    @property
    def strategy(self) -> str | None:
        """How the run uses its devices; None where it cannot run."""
        if self.refusals or self.machine is None:
            return None
        if self.layout != "whole":
            return SHARDED if self.layout == "sharded" else OFFLOADED
        return DATA_PARALLEL if self.machine.gpus > 1 else "one GPU" if self.machine.on_gpu else "one CPU"

    @property
    def verdict(self) -> str:
        """One sentence: whether the run fits and how long it takes, or why it cannot run."""
        if self.refusals or self.machine is None:
            return f"cannot run: {'; '.join(self.refusals)}"
        machine, kind = self.machine, "GPU memory" if self.machine.on_gpu else "memory"
        each = machine.name if machine.gpus == 1 else f"each of {machine.gpus} {machine.name}"
        plain = machine.gpus == 1 and self.layout == "whole"
        where = each if plain else f"{each} ({self.strategy})"
        fits = f"fits: needs {size(self.peak)} of {size(machine.device_free)} free {kind} on {where}"
        if self.seconds < FEW_SECONDS:
            return f"{fits}; takes a few seconds"
        least, most = (duration(self.seconds * factor) for factor in (1 / RANGE, RANGE))
        return f"{fits}; takes about {duration(self.seconds)} ({least} to {most})"

    def to_json(self) -> dict[str, Any]:
        parts, machine, work = self.parts, self.machine, self.work
        return {
            "model": self.model,
            "family": self.family,
            "scheme": self.recipe.scheme,
            "method": self.recipe.method,
            "init": self.recipe.init,
            "verdict": self.verdict,
            "strategy": self.strategy,
            "can_run": not self.refusals,
            "refusals": list(self.refusals),
            "warnings": list(self.warnings),
            "seconds": {"least": self.seconds / RANGE, "expected": self.seconds, "most": self.seconds * RANGE},
            "assumptions": list(self.assumptions),
            "decoder": parts and {"prefix": parts.decoder.prefix, "layers": parts.decoder.layers},
            "parts": parts and [asdict(part) for part in parts.parts],
            "unmatched_patterns": parts and list(parts.unmatched),
            "output_bytes": parts and parts.output_bytes,
            "run_bytes": self.run_bytes,
            "machine": machine and asdict(machine) | {"dtype": str(machine.dtype).removeprefix("torch.")},
            "work": work and {name: value for name, value in asdict(work).items() if name != "recipe"},
            "phases": [asdict(one) | {"gpu_bytes": one.gpu_bytes, "host_bytes": one.host_bytes} for one in self.phases],
            "serving": [asdict(row) for row in self.serving],
        }


def make_plan(
    model: str | Path,
    recipe: Recipe,
    *,
    calibration: Given = None,
    holdout: Given = None,
    on_bad_prompt: str = "fail",
    prompt_tokens: int | None = None,
    out: Path | None = None,
    machine: Machine | None = None,
    gpus: int = 1,
    vllm: Vllm | None = None,
) -> Plan:
    """The plan of quantizing `model`, by default on so many GPUs of this machine, which is measured for a few seconds.

    Reads config.json, safetensors headers, the processor's files and the prompts; loads no weight and writes nothing.
    Raises OnPTQError only where there is no such model or the arguments contradict each other. Whatever stops the run
    is a refusal. `vllm` is the server that writes the rollouts with follow.engine=vllm; one that `machine` would start is
    not looked for here.
    """
    if calibration is not None and prompt_tokens is not None:
        raise OnPTQError("expected one of --calibration and --prompt-tokens: prompts have lengths of their own")
    if calibration is None and holdout is not None:
        raise OnPTQError("expected --calibration beside --holdout: held-out prompts alone calibrate nothing")
    check_on_bad_prompt(on_bad_prompt)
    folder, scheme = local_folder(model), Scheme.parse(recipe.scheme)
    plan = Plan(str(model), recipe, tuple(serving(scheme)))
    try:
        source = find_source(folder)
        parts = find_parts(source, scheme)
        unmatched = (f"the ignore pattern {pattern} matches no tensor" for pattern in parts.unmatched)
        plan = replace(plan, family=source.family.name, parts=parts, warnings=tuple(unmatched))
        plan = replace(plan, serving=tuple(serving(scheme, source.family.has_experts)))
        _check(source, parts, recipe, out)
        if _served(recipe):
            server = vllm or Vllm.given()
            server.check(scheme)
            if machine is None:
                server.check_installed()
        processor = PromptProcessor.from_folder(source.folder, source.family, source.config, recipe.data.special_tokens)
        processor(probe_prompt(source.family.modalities))  # a chat template that takes all media
        if calibration is None:
            prompts, work = None, work_of(recipe, source, prompt_tokens)
        else:
            usable = partial(processor.check, max_new=recipe.follow.max_tokens) if on_bad_prompt == "skip" else None
            prompts = gather_prompts(
                calibration, holdout, recipe.data, source.family.modalities, seed=recipe.seed, usable=usable
            )
            work = count_work(recipe, processor, prompts)
        _check_length(source, work)
        machine = machine or this_machine(recipe.compute, gpus)
        work = replace(work, gpus=machine.gpus)
    except OnPTQError as error:
        return replace(plan, refusals=(str(error),))
    return _estimated(replace(plan, work=work, machine=machine), source, parts, work, machine, prompts, out)


def local_folder(model: str | Path) -> Path | str:
    """The folder of a model that is on this machine: planning never uses the network."""
    if is_cataloged(str(model)) or Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(str(model), local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise OnPTQError(
            f"{str(model)!r} is neither a folder nor a downloaded hub id{did_you_mean(str(model))}, and a plan uses no "
            "network: expected a checkpoint folder, a name of `onptq zoo list`, or a hub id that has been downloaded"
        ) from error


def _check(source: Source, parts: Parts, recipe: Recipe, out: Path | None) -> None:
    """Refuse what the run refuses before it computes anything, by its own checks."""
    scheme = Scheme.parse(recipe.scheme)
    if not scheme.quantizes_weights:
        raise OnPTQError(f"scheme {scheme} leaves the weights in 16 bits: there is nothing to write; expected W2 to W8")
    check_exportable(source)
    check_groups(source, scheme)
    check_cached(source, scheme)
    check_method(recipe.init, source.family)
    if out is not None:
        check_apart(source.folder, out)
        check_apart(source.folder, run_home(out))
        check_place(out, run_home(out))
        check_room(out, parts.output_bytes)


def _check_length(source: Source, work: Work) -> None:
    context = context_length(source.config)
    if context is not None and work.longest > context:
        raise OnPTQError(
            f"prompts of {work.prompt_tokens} tokens and responses of {work.response_tokens} do not fit into the "
            f"model's context of {context} (max_position_embeddings); expected shorter prompts or follow.max_tokens"
        )


def _estimated(
    plan: Plan, source: Source, parts: Parts, work: Work, machine: Machine, prompts: Prompts | None, out: Path | None
) -> Plan:
    """The plan with what every phase takes. A phase that does not fit is a refusal."""
    shapes, scheme = parts.shapes, Scheme.parse(plan.recipe.scheme).unmixed
    model = Model.of(source, shapes, work, machine)
    layout = model.layout(plan.recipe)
    memory, phases = model.memory(plan.recipe, layout), model.phases(plan.recipe, layout)
    refusals = list(refuse_too_large(phases, machine))
    if refusals:
        changes = fitting_changes(plan.recipe, model.excess)
        if machine.gpus > 1 or layout != "whole":
            refusals[-1] += f"; that is with the blocks {WHERE[layout]}"
        if changes:
            refusals[-1] += f"; it fits with {' '.join(f'--set {change}' for change in changes)}"
    rates = _rates(machine, shapes, scheme, memory.budgets.keep, plan.recipe.settles, layout)
    read, on_gpu = source.checkpoint.weight_bytes, machine.on_gpu
    seconds = Seconds(shapes, work, scheme, rates, read, parts.output_bytes, on_gpu).phases()
    return replace(
        plan,
        layout=layout,
        phases=tuple(replace(phase, seconds=seconds[phase.name]) for phase in phases),
        run_bytes=_written(plan.recipe, parts, memory) - parts.output_bytes,
        assumptions=tuple(_assumptions(work, machine, prompts, layout)),
        warnings=(
            *plan.warnings,
            *([] if refusals else _idle(work)),
            *([] if refusals or layout == "whole" else _whole(model, plan.recipe)),
            *_warnings(plan.recipe, rates, prompts, _written(plan.recipe, parts, memory), out),
        ),
        refusals=tuple(refusals),
    )


def _served(recipe: Recipe) -> bool:
    """Whether a server writes rollouts."""
    return bool(recipe.rounds) and recipe.follow.engine == "vllm"


def _written(recipe: Recipe, parts: Parts, memory: Memory) -> int:
    """Bytes of the checkpoint and the run, and of the one that a server has while it writes the rollouts."""
    return parts.output_bytes * (2 if _served(recipe) else 1) + memory.files


def _rates(machine: Machine, shapes: Shapes, scheme: Scheme, keep: Held, settled: bool, layout: Layout) -> Rates:
    if machine.gpu is not None:
        return datasheet_rates(machine.gpu, shapes, keep, layout, machine.gpus, settled)
    return probe_rates(shapes, scheme, keep, settled, torch.device(machine.device), machine.dtype)


def _assumptions(work: Work, machine: Machine, prompts: Prompts | None, layout: Layout) -> Iterator[str]:
    if work.every:
        media = f", {work.media_tokens} of them for images or audio" if work.media_tokens else ""
        if prompts is not None:
            lengths = f"{work.prompt_tokens} tokens on average{media}; the longest {work.longest_prompt}"
            yield f"{prompts.describe()}: {lengths}"
        else:
            held_out = f" and {work.holdout} held-out ones" if work.holdout else ""
            yield f"assumed: {work.prompts} prompts{held_out} of {work.prompt_tokens} tokens{media}"
        yield f"every response is as long as its limit, {work.response_tokens} tokens"
    if _served(work.recipe):
        yield (
            "Follow is that of OnPTQ's own rollouts: neither the start of vLLM nor its speed and memory are known here; on the "
            "GPU of the run it takes what the run leaves free"
        )
    if work.candidates:
        yield f"Branch looks ahead from {CANDIDATES:.0%} of the states"
    if work.recipe.init not in MODELLED_INITS:
        yield f"Initialize ({work.recipe.init}) takes as much as search"
    yield "the comparison of `quantize --evaluate` is not counted"
    if others := Scheme.parse(work.recipe.scheme).others:
        yield f"time and memory as if all linears were in one scheme, without the {len(others)} patterns of the mix"
    if machine.gpu is not None:
        memory = f"{size(machine.device_free)} of its memory free"
        yield f"{machine.name} by its data sheet, {memory}; host memory is not checked"
    if layout != "whole":
        yield (
            f"{layout}: the blocks of the decoder are {WHERE[layout]}, and gathered one by one where they are used; "
            "embeddings, head, towers and theta are on every GPU, and nothing of Q's weights is held"
        )
        known = (
            "GPUs of one machine, as connected as their data sheet says" if machine.gpu else "gathering takes no time"
        )
        yield f"{known}; every process waits for the pass of the slowest"
    if machine.gpus > 1 and layout == "whole":
        yield (
            f"{DATA_PARALLEL}: each GPU holds the whole model and takes its share of Follow, Compare, Branch and "
            "Calibrate; all of them encode every prompt, one computes the init, exports and verifies"
        )
    if machine.gpus > 1:
        yield "gradients and results that GPUs exchange take no time"


def _whole(model: Model, recipe: Recipe) -> Iterator[str]:
    """A warning where another recipe needs no gathering, unless this one asks for it."""
    changes = fitting_changes(recipe.with_overrides(["compute.shard=never"]), model.excess)
    if changes and recipe.compute.shard == "auto":
        yield f"with {' '.join(f'--set {change}' for change in changes)} the model fits whole on every GPU, which is faster"


def _idle(work: Work) -> Iterator[str]:
    """Warnings of GPUs that wait because there is not enough to deal out."""
    batches = work.batches(work.followed)
    if work.banks and batches < work.gpus:
        tokens = work.longest * ceil(work.followed / work.gpus)
        yield (
            f"{work.followed} responses make {batches} batch{'es' if batches > 1 else ''}, so {work.gpus - batches} of "
            f"{work.gpus} GPUs wait in Follow, Compare and Branch; --set compute.batch_tokens={tokens} makes about one for each"
        )
    if work.banks and work.batch < work.gpus:
        yield (
            f"a step of {work.batch} prompts leaves {work.gpus - work.batch} of {work.gpus} GPUs without any in Calibrate; "
            f"--set calibrate.batch={work.gpus} gives each one, and is another update"
        )


def _warnings(recipe: Recipe, rates: Rates, prompts: Prompts | None, written: int, out: Path | None) -> Iterator[str]:
    if prompts is not None:
        yield from prompts.warnings(recipe.rounds > 0)
    if rates.slowdown > CROWDED:
        alone = torch.get_num_threads() == 1
        yield (
            f"other processes hold the cores: right now the run would take {rates.slowdown:.0f} times as long as this "
            f"estimate, which is for one undisturbed thread{'' if alone else '; set OMP_NUM_THREADS=1 for it'}"
        )
    if out is not None and (free := _free(out)) < written:
        yield f"checkpoint and run files together take about {size(written)}, and {size(free)} are free at {out}"


def _free(out: Path) -> int:
    return shutil.disk_usage(next(path for path in (out, *out.absolute().parents) if path.is_dir())).free
