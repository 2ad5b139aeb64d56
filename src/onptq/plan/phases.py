"""The phases of a run: the seconds and bytes of each, whether they fit, and what would make them fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from onptq.files import size
from onptq.plan.estimate import Memory, Terms
from onptq.plan.machine import Machine
from onptq.recipe import Recipe

# Of the process: Python, torch and transformers on a CPU, as measured; with CUDA's libraries; its context on a GPU.
PROCESS_BYTES, GPU_PROCESS_BYTES, GPU_CONTEXT_BYTES = 600 * 2**20, 3 * 2**30, 600 * 2**20
# Changes that may lower memory, in the order in which they are tried: the first four leave the result as it is. Running out
# of memory leads to about what the first THRIFTY of them do.
CHANGES = (
    ("compute.cache_gib=0.5",),
    ("calibrate.micro_batch=1",),
    ("compute.batch_tokens=4096",),
    ("calibrate.checkpointing=true",),
    ("calibrate.codes=settled",),
    ("init=search",),
    ("init=search", "calibrate.codes=free"),
)

THRIFTY = 3


@dataclass(frozen=True)
class Phase:
    """One phase of the run, all rounds together: the terms of its peaks in bytes, and its seconds."""

    name: str
    gpu: Terms
    host: Terms
    seconds: float = 0.0

    @property
    def gpu_bytes(self) -> int:
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def run_phases(memory: Memory) -> Iterator[Phase]:
    """Every phase in the order of the run: on each GPU, and on the host of all of them."""
    processes = memory.work.gpus
    for name, terms in memory.phases().items():
        if not memory.on_gpu:
            yield Phase(name, {}, terms | {"process": PROCESS_BYTES})
            continue
        host = {"process": processes * GPU_PROCESS_BYTES}
        if memory.layout == "offloaded":
            host |= {"blocks": memory.blocks}
            if memory.work.recipe.settles and name != "Load":
                host |= memory.whole_theta
        if name == "Load" and memory.layout != "whole":  # pages of the files, which processes share
            host |= {"weights": memory.whole, "files being read": processes * memory.converted}
        elif name == "Load":  # models pass through the host
            host |= {"weights": processes * memory.weights, "files being read": processes * memory.converted}
        elif name == "Verify":  # by one process
            if memory.layout == "whole":
                host |= {"weights": memory.whole, "files being read": memory.converted, "packed weights": memory.packed}
        elif name == "Initialize" and memory.init_rounds:
            host |= {f"{term}, being written": count for term, count in memory.whole_theta.items()}
        yield Phase(name, terms | {"context": GPU_CONTEXT_BYTES}, host)


def refuse_too_large(phases: Sequence[Phase], machine: Machine) -> Iterator[str]:
    """The reasons why the largest phase does not fit, for GPU and host."""
    for what, free, side in _sides(machine):
        worst = max(phases, key=lambda phase: sum(side(phase).values()))
        needed = sum(side(worst).values())
        if needed > free:
            terms = sorted(side(worst).items(), key=lambda term: -term[1])
            named = ", ".join(f"{name} {size(count)}" for name, count in terms[:3])
            yield f"{worst.name} needs {size(needed)} of {what} and {size(free)} is free: {named}"


def excess(phases: Sequence[Phase], machine: Machine) -> int:
    """The bytes that phases have too much, all together; 0 where everything fits."""
    return sum(max(0, sum(side(phase).values()) - free) for _, free, side in _sides(machine) for phase in phases)


def fitting_changes(recipe: Recipe, excess: Callable[[Recipe], int]) -> list[str]:
    """Overrides with which the run fits; none where no known ones are enough."""
    chosen: list[str] = []
    left = excess(recipe)
    for changes in CHANGES:
        if left and not (recipe.init == recipe.method and "init=search" in changes):
            both = list(dict.fromkeys((*chosen, *changes)))
            after = excess(recipe.with_overrides(both))
            if after < left:
                chosen, left = both, after
    if left:
        return []
    for change in tuple(chosen):
        others = [one for one in chosen if one != change]
        chosen = chosen if excess(recipe.with_overrides(others)) else others
    return chosen


def _sides(machine: Machine) -> Iterator[tuple[str, int, Callable[[Phase], Terms]]]:
    """The memories that a run must fit into, as far as their size is known."""
    if machine.on_gpu:
        each = f" on each of {machine.gpus} GPUs" if machine.gpus > 1 else ""
        yield f"GPU memory{each}", machine.device_free, lambda phase: phase.gpu
    if machine.host_free is not None:
        yield "host memory", machine.host_free, lambda phase: phase.host


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 1 else "< 1 s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
