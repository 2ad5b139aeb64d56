"""The machine that a plan is for: this one, or one with a GPU that is not here."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from onptq.checkpoint.served import ADA, AMPERE, BLACKWELL, HOPPER
from onptq.checkpoint.source import DTYPES, choose_device, choose_dtype
from onptq.engine.memory import free_memory, host_free
from onptq.errors import OnPTQError, did_you_mean
from onptq.recipe import ComputeConfig


@dataclass(frozen=True)
class Gpu:
    """Figures of a data sheet, without sparsity. `gib` is about what a process can allocate."""

    name: str
    gib: float
    bf16: float  # TFLOP/s
    int8: float  # TOP/s
    bandwidth: float  # GB/s
    link: float  # GB/s that it receives from the other GPUs of its machine
    generation: str  # as the serving table names it


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40g", 39.4, 312, 624, 1555, 300, AMPERE),
        Gpu("a100-80g", 79.2, 312, 624, 2039, 300, AMPERE),
        Gpu("h100-80g", 79.1, 989, 1979, 3350, 450, HOPPER),
        Gpu("h200-141g", 139.8, 989, 1979, 4800, 450, HOPPER),
        Gpu("l40s-48g", 44.4, 362, 733, 864, 32, ADA),
        Gpu("l4-24g", 22.0, 121, 242, 300, 32, ADA),
        Gpu("rtx4090-24g", 23.5, 165, 661, 1008, 32, ADA),
        Gpu("rtx5090-32g", 31.4, 210, 838, 1792, 64, BLACKWELL),
        Gpu("b200-192g", 178.0, 2250, 4500, 8000, 900, BLACKWELL),
    )
}


@dataclass(frozen=True)
class Machine:
    device: str  # cpu or cuda:N
    name: str
    dtype: torch.dtype  # of the run's computations
    device_free: int  # bytes of GPU memory, or of the host's on a CPU
    host_free: int | None  # bytes; None where nobody knows
    gpu: Gpu | None = None  # whose data sheet gives the rates; None where they are measured
    gpus: int = 1  # of this kind, each with so much free memory and a process of its own

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def this_machine(compute: ComputeConfig, gpus: int = 1) -> Machine:
    """This machine. Raises where it lacks the recipe's device, or so many GPUs."""
    device = choose_device(compute.device)
    here = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus > max(1, here):
        raise OnPTQError(
            f"--gpus {gpus}: this machine has {here} for this recipe; expected --gpu or --gpu-memory, for GPUs that are "
            "not here"
        )
    dtype, free = choose_dtype(compute.dtype, device), free_memory(device)
    if device.type == "cuda":
        return Machine(str(device), torch.cuda.get_device_name(device), dtype, free, host_free(), gpus=gpus)
    threads = torch.get_num_threads()
    name = f"{_processor()} ({threads} thread{'s' if threads > 1 else ''})"
    return Machine("cpu", name, dtype, free, free)


def machine_with(gpu: str | None, compute: ComputeConfig, memory: float | None = None, gpus: int = 1) -> Machine:
    """A machine with so many of that GPU, all of whose memory is free, or `memory` GiB of each.

    The beginning of a name will do where no other has it. Without one, the slowest GPU that is sold with so much memory."""
    sheet = _named(gpu) if gpu is not None else _sold_with(memory)
    if compute.device == "cpu":
        raise OnPTQError(f"--gpu {sheet.name} plans for a GPU, and compute.device is cpu: expected one of them")
    if compute.dtype == "float32":
        raise OnPTQError("--gpu knows the rates of 16-bit GEMMs: expected compute.dtype auto, bfloat16 or float16")
    dtype = torch.bfloat16 if compute.dtype == "auto" else DTYPES[compute.dtype]
    gib = sheet.gib if gpu is None or memory is None else memory
    return Machine("cuda:0", sheet.name, dtype, int(gib * 2**30), None, sheet, gpus)


def _named(gpu: str) -> Gpu:
    names = [name for name in GPUS if name.startswith(gpu.lower())]
    if len(names) != 1:
        hint = did_you_mean(gpu, GPUS, names if gpu else ())
        raise OnPTQError(f"unknown --gpu {gpu!r}{hint}; expected one of {', '.join(GPUS)}")
    return GPUS[names[0]]


def _sold_with(memory: float | None) -> Gpu:
    by_memory = {gpu: float(gpu.name.rpartition("-")[2].removesuffix("g")) for gpu in GPUS.values()}
    alike = [gpu for gpu, gib in by_memory.items() if gib == memory]
    if not alike:
        known = ", ".join(f"{gib:g}" for gib in sorted(set(by_memory.values())))
        raise OnPTQError(f"--gpu-memory {memory:g}: expected one of {known}, or --gpu beside it, whose rates are taken")
    return min(alike, key=lambda gpu: gpu.bf16)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
