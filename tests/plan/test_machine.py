"""The machine of a plan: this one, or one by its data sheet."""

from __future__ import annotations

import pytest
import torch
from plan_models import GIB

from onptq.errors import OnPTQError
from onptq.plan.machine import GPUS, Gpu, machine_with, this_machine
from onptq.recipe import ComputeConfig


def test_this_machine_has_memory_and_says_how_many_threads_it_uses() -> None:
    machine = this_machine(ComputeConfig(device="cpu"))
    assert (machine.device, machine.on_gpu, machine.dtype) == ("cpu", False, torch.float32)
    assert machine.device_free == machine.host_free
    assert machine.device_free > 2**20
    assert f"({torch.get_num_threads()} thread" in machine.name


@pytest.mark.parametrize("name", [*GPUS, "h100", "rtx50", "L4-24G"])
def test_a_gpu_goes_by_its_name_or_the_beginning_of_one(name: str) -> None:
    machine = machine_with(name, ComputeConfig())
    assert machine.on_gpu
    assert machine.name.startswith(name.lower())
    assert machine.device_free == int(GPUS[machine.name].gib * GIB)
    assert machine.host_free is None
    assert machine.dtype == torch.bfloat16


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_less_memory_is_free_than_the_name_says(gpu: Gpu) -> None:
    named = int(gpu.name.rpartition("-")[2].removesuffix("g"))
    assert 0.9 * named < gpu.gib < named


def test_an_unknown_or_ambiguous_gpu_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(OnPTQError, match=r"'a100' \(did you mean a100-40g or a100-80g\?\); expected one of a100-40g, "):
        machine_with("a100", ComputeConfig())
    with pytest.raises(OnPTQError, match=r"did you mean h100-80g\?"):
        machine_with("h10080g", ComputeConfig())
    with pytest.raises(OnPTQError, match=r"unknown --gpu ''; expected"):
        machine_with("", ComputeConfig())


def test_memory_alone_is_the_slowest_gpu_that_is_sold_with_so_much() -> None:
    machine = machine_with(None, ComputeConfig(), 80, 8)
    assert (machine.name, machine.gpus, machine.device_free) == ("a100-80g", 8, int(GPUS["a100-80g"].gib * GIB))
    assert machine_with(None, ComputeConfig(), 141).name == "h200-141g"
    with pytest.raises(OnPTQError, match=r"--gpu-memory 60: expected one of 24, 32, 40, 48, 80, 141, 192, or --gpu"):
        machine_with(None, ComputeConfig(), 60)


def test_memory_beside_a_name_is_what_is_free_of_it() -> None:
    machine = machine_with("h100", ComputeConfig(), 60)
    assert (machine.name, machine.gpus, machine.device_free) == ("h100-80g", 1, 60 * GIB)


def test_gpus_that_are_not_here_need_a_name() -> None:
    with pytest.raises(
        OnPTQError, match="--gpus 2: this machine has 0 for this recipe; expected --gpu or --gpu-memory"
    ):
        this_machine(ComputeConfig(device="cpu"), 2)


def test_a_recipe_that_contradicts_the_gpu_is_refused() -> None:
    with pytest.raises(OnPTQError, match=r"compute\.device is cpu"):
        machine_with("h100", ComputeConfig(device="cpu"))
    with pytest.raises(OnPTQError, match="16-bit GEMMs"):
        machine_with("h100", ComputeConfig(dtype="float32"))
    assert machine_with("h100", ComputeConfig(dtype="float16")).dtype == torch.float16
