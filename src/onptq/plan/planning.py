"""The plan of a run: what it will quantize, cost and write, who can serve the result, and why it cannot be done here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from onptq.checkpoint.folder import DENSE, DTYPES
from onptq.checkpoint.serving import Served, serving
from onptq.checkpoint.source import Source
from onptq.errors import OnPTQError
from onptq.models.processing import context_length
from onptq.plan.cost import Cost
from onptq.plan.machine import Machine, describe_machine, disk_free
from onptq.plan.memory import Kept, Memory, Terms
from onptq.plan.parts import Parts, find_parts, locate
from onptq.plan.work import CANDIDATES, Work, work_of
from onptq.recipe import Recipe
from onptq.schemes import Scheme

PROCESS_BYTES = 500 * 2**20  # Python, torch and transformers before any model, as measured on a CPU
# Assumed, not measured: the host's share of CUDA's libraries, and what they take of the GPU before the first tensor.
GPU_PROCESS_BYTES, GPU_CONTEXT_BYTES = 3 * 2**30, 600 * 2**20
MODELLED_INITS = ("search", "rtn", "signround", "search+signround")


@dataclass(frozen=True)
class Phase:
    """One phase of the run, all rounds together: how long, and the terms of its peaks in bytes."""

    name: str
    seconds: float
    gpu: Terms
    host: Terms

    @property
    def gpu_bytes(self) -> int:
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True)
class Plan:
    """Everything that can be said before a run; `refusals` says why it cannot work here, and is empty if it can."""

    model: str
    recipe: Recipe
    serving: tuple[Served, ...]
    family: str | None = None
    parts: Parts | None = None
    machine: Machine | None = None
    work: Work | None = None
    phases: tuple[Phase, ...] = ()
    disk_free: int | None = None
    assumptions: tuple[str, ...] = ()
    refusals: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        parts, machine, work = self.parts, self.machine, self.work
        return {
            "model": self.model,
            "family": self.family,
            "scheme": self.recipe.scheme,
            "method": self.recipe.method,
            "can_run": not self.refusals,
            "refusals": list(self.refusals),
            "assumptions": list(self.assumptions),
            "decoder": parts and {"prefix": parts.decoder.prefix, "layers": parts.decoder.layers},
            "parts": parts and [asdict(part) for part in parts.parts],
            "unmatched_patterns": parts and list(parts.unmatched),
            "output_bytes": parts and parts.output_bytes,
            "disk_free": self.disk_free,
            "machine": machine and asdict(machine) | {"dtype": str(machine.dtype).removeprefix("torch.")},
            "work": work and {name: value for name, value in asdict(work).items() if name != "recipe"},
            "phases": [asdict(one) | {"gpu_bytes": one.gpu_bytes, "host_bytes": one.host_bytes} for one in self.phases],
            "serving": [asdict(row) for row in self.serving],
        }


def make_plan(
    model: str | Path,
    recipe: Recipe,
    *,
    out: Path | None = None,
    prompt_tokens: int | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Reads config.json and safetensors headers and, unless it is told of another `machine`, probes this one and how fast it
    reads the weights' files for under a second; loads and writes nothing.

    Raises OnPTQError only where there is no such model; whatever stops the run itself is among the refusals.
    """
    scheme = Scheme.parse(recipe.scheme)
    known: dict[str, Any] = {"model": str(model), "recipe": recipe, "serving": tuple(serving(scheme))}
    if not Path(model).is_dir():
        model = locate(model).folder
    try:
        source = locate(model)
        known |= {"family": source.family.name, "work": work_of(recipe, source, prompt_tokens)}
        known["parts"] = parts = find_parts(source, scheme)
        machine = machine or describe_machine(recipe.compute, parts.shapes.largest, source.shards)
    except OnPTQError as error:
        return Plan(**known, refusals=(str(error),))
    known |= {"machine": machine}
    if parts.storage not in DENSE:  # no dense checkpoint: what it would cost means nothing
        return Plan(**known, refusals=parts.problems)
    work: Work = known["work"]
    phases = tuple(_phases(source, parts, machine, work, scheme))
    free = None if out is None else disk_free(out)
    refusals = (
        *parts.problems,
        *_too_long(source, work),
        *_too_large(phases, machine, recipe),
        *_no_room(parts, free, out),
    )
    return Plan(
        **known, phases=phases, disk_free=free, assumptions=tuple(_assumptions(work, prompt_tokens)), refusals=refusals
    )


def _phases(source: Source, parts: Parts, machine: Machine, work: Work, scheme: Scheme) -> Iterator[Phase]:
    shapes, compute, storage = parts.shapes, machine.dtype.itemsize, DTYPES[parts.storage].itemsize
    free = max(0, machine.cacheable - shapes.loaded * compute)
    kept = Kept.of(free, shapes.linears * compute, shapes.linears, work.recipe, machine.on_gpu)
    memory = Memory(shapes, work, scheme, compute, storage, kept, machine.on_gpu)
    sizes = [shard.stat().st_size for shard in source.shards]
    seconds = Cost(shapes, work, scheme, machine, kept, sizes, parts.output_bytes).phases()
    for name, terms in memory.phases().items():
        host = _host_only(name, parts, memory)
        if machine.on_gpu:
            yield Phase(
                name, seconds[name], terms | {"context": GPU_CONTEXT_BYTES}, host | {"process": GPU_PROCESS_BYTES}
            )
        else:
            yield Phase(name, seconds[name], {}, terms | {"process": PROCESS_BYTES} | _mapped(name, parts, memory))


def _host_only(name: str, parts: Parts, memory: Memory) -> Terms:
    """What a run on a GPU holds beside it: models pass through the host when they are loaded."""
    if name == "Load":
        return {"weights": memory.weights} | _mapped(name, parts, memory)
    if name == "Initialize":
        return {f"{term}, being written": count for term, count in memory.start().items()}
    if name == "Export":
        return {"linear being packed": 2 * parts.shapes.largest}  # its codes, and the same packed
    if name == "Verify":
        packed = parts.shapes.linears * memory.scheme.weight_bits // 8
        return {"weights": memory.weights, "packed weights": packed}
    return {}


def _mapped(name: str, parts: Parts, memory: Memory) -> Terms:
    """Files are mapped while their tensors are converted; without a conversion the mapping is the weights."""
    if name != "Load" or memory.compute == memory.storage:
        return {}
    return {"mapped checkpoint": parts.shapes.loaded * memory.storage}


def _too_long(source: Source, work: Work) -> Iterator[str]:
    context = context_length(source.config)
    if context is not None and work.length > context:
        yield (
            f"prompts of {work.prompt_tokens} tokens and responses of {work.response_tokens} do not fit into the model's "
            f"context of {context} (max_position_embeddings); expected shorter prompts or follow.max_tokens"
        )


def _too_large(phases: tuple[Phase, ...], machine: Machine, recipe: Recipe) -> Iterator[str]:
    sides: Mapping[str, tuple[int, Any]] = {
        "GPU memory": (machine.device_free, lambda phase: phase.gpu),
        "host memory": (machine.host_free, lambda phase: phase.host),
    }
    for what, (free, side) in sides.items():
        worst = max(phases, key=lambda phase: sum(side(phase).values()))
        needed = sum(side(worst).values())
        if needed > free:
            terms = sorted(side(worst).items(), key=lambda term: -term[1])
            named = ", ".join(f"{name} {size(count)}" for name, count in terms[:3])
            remedy = _remedy([name for name, count in terms if count], recipe)
            yield f"{worst.name} needs {size(needed)} of {what} and {size(free)} is free: {named}{remedy}"


def _remedy(terms: list[str], recipe: Recipe) -> str:
    """The change that lowers the largest term of those that the recipe can still lower."""
    remedies = {
        "rounding offsets": ("calibrate.codes", "settled"),
        "offsets of the start": ("init", "search"),
        "activations in the graph": ("calibrate.micro_batch", 1),
        "residual streams and errors": ("calibrate.micro_batch", 1),
        "weights in the graph": ("calibrate.checkpointing", True),
        "prefix caches": ("compute.cache_gib", 0.5),
        "dense targets": ("compute.cache_gib", 0.5),
        "activations": ("compute.batch_tokens", 4096),
    }
    for setting, value in (remedies[name] for name in terms if name in remedies):
        now = attrgetter(setting)(recipe)
        less = value < now if type(value) in (int, float) and now is not None else value != now
        if less:
            return f"; --set {setting}={str(value).lower()} takes less"
    return ""


def _no_room(parts: Parts, free: int | None, out: Path | None) -> Iterator[str]:
    if free is not None and free < parts.output_bytes:
        yield f"the checkpoint takes {size(parts.output_bytes)} and {out} has {size(free)} free"


def _assumptions(work: Work, prompt_tokens: int | None) -> Iterator[str]:
    recipe = work.recipe
    if work.prompts:
        held_out = f" and {work.holdout} held-out ones" if work.holdout else ""
        media = f", {work.media_tokens} of them a picture or sound" if work.media_tokens else ""
        given = "as given" if prompt_tokens is not None else "assumed; --prompt-tokens says otherwise"
        yield f"{work.prompts} prompts{held_out} of {work.prompt_tokens} tokens{media} ({given})"
        yield f"every response {work.response_tokens} tokens long, its limit"
    if work.candidates:
        yield f"{CANDIDATES:.0%} of the states on the way are candidates"
    if recipe.init not in MODELLED_INITS:
        yield f"Initialize ({recipe.init}) is counted as if it were search"
    yield "without the comparison of arms on embedded tasks (quantize --evaluate)"
    yield "times from a probe of this machine as loaded as it is now: expect a factor of two either way"


def size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
