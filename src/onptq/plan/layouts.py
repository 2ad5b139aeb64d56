"""Where the blocks of a decoder are: whole on every device, split over the devices, or over their hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from onptq.checkpoint.source import Source
from onptq.engine.budget import WHOLE, Budgets
from onptq.engine.memory import free_memory, host_free
from onptq.models.sharding import Layout
from onptq.plan.estimate import Memory
from onptq.plan.machine import Machine
from onptq.plan.parts import Shapes, find_parts
from onptq.plan.phases import CHANGES, THRIFTY, Phase, excess, run_phases
from onptq.plan.work import Work, work_of
from onptq.ranks import Ranks
from onptq.recipe import Recipe
from onptq.schemes import Scheme

CHOSEN: dict[str, Layout] = {"never": "whole", "always": "sharded", "offload": "offloaded"}
WHERE = {
    "whole": "on every GPU",
    "sharded": "split over the GPUs",
    "offloaded": "in the host's memory, split over the processes",
}


@dataclass(frozen=True)
class Model:
    """A model on a machine, in any layout."""

    shapes: Shapes
    scheme: Scheme
    work: Work
    machine: Machine
    converted: int  # bytes of files that are read into another dtype

    @classmethod
    def of(cls, source: Source, shapes: Shapes, work: Work, machine: Machine) -> Model:
        stored = source.storage()
        converted = 0 if stored == machine.dtype else shapes.loaded * stored.itemsize
        return cls(
            shapes, Scheme.parse(work.recipe.scheme).unmixed, replace(work, gpus=machine.gpus), machine, converted
        )

    def memory(self, recipe: Recipe, layout: Layout) -> Memory:
        shapes, machine, number = self.shapes, self.machine, self.machine.dtype.itemsize
        work = replace(self.work, recipe=recipe)
        memory = Memory(
            shapes, work, self.scheme, number, Budgets(), machine.on_gpu, converted=self.converted, layout=layout
        )
        free = max(0, machine.device_free - memory.weights)
        if layout == "whole":
            budgets = Budgets.within(free, shapes.linears * number, shapes.linears, recipe, machine.on_gpu)
        else:
            budgets = Budgets.of_shards(free - WHOLE * shapes.block * number, recipe)
        return replace(memory, budgets=budgets)

    def phases(self, recipe: Recipe, layout: Layout) -> tuple[Phase, ...]:
        return tuple(run_phases(self.memory(recipe, layout)))

    def excess(self, recipe: Recipe) -> int:
        """The bytes that phases have too much in the layout of the recipe."""
        return excess(self.phases(recipe, self.layout(recipe)), self.machine)

    def layout(self, recipe: Recipe) -> Layout:
        """The layout that the recipe names, or the fastest that fits; else the one that lacks the least. What a run does by
        itself where memory runs out is no reason for another layout."""
        chosen = CHOSEN.get(recipe.compute.shard)
        if chosen is not None:
            return chosen
        thrifty = recipe.with_overrides([change for changes in CHANGES[:THRIFTY] for change in changes])
        best: Callable[[Layout], int] = lambda layout: excess(self.phases(thrifty, layout), self.machine)  # noqa: E731
        return min(self._layouts(), key=best)

    def _layouts(self) -> Iterator[Layout]:
        """Those that the machine allows, the fastest first."""
        yield "whole"
        if self.machine.gpus > 1:
            yield "sharded"
        if self.machine.on_gpu:
            yield "offloaded"


def layout_of_run(source: Source, recipe: Recipe, prompts: int, holdout: int, machine: Machine) -> Layout:
    """The layout of a run on so many prompts, whose lengths are assumed."""
    chosen = CHOSEN.get(recipe.compute.shard)
    if chosen is not None:
        return chosen
    shapes = find_parts(source, Scheme.parse(recipe.scheme)).shapes
    work = replace(work_of(recipe, source), prompts=prompts, holdout=holdout)
    return Model.of(source, shapes, work, machine).layout(recipe)


def choose_layout(
    source: Source, recipe: Recipe, prompts: int, holdout: int, ranks: Ranks, device: torch.device, dtype: torch.dtype
) -> Layout:
    """The layout of a run on this machine, the same on all ranks."""
    free = min(ranks.gather(free_memory(device)))
    host = host_free() if device.type == "cuda" else free
    machine = Machine(str(device), "", dtype, free, host, gpus=ranks.size)
    return ranks.lead(lambda: layout_of_run(source, recipe, prompts, holdout, machine))
