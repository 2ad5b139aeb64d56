"""What this machine has: free memory, and how fast it multiplies, copies, starts operations and reads the model's files, measured
in under a second."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onptq.checkpoint.source import choose_device, choose_dtype
from onptq.engine.memory import free_memory, host_free
from onptq.recipe import ComputeConfig

PROBE_SECONDS = 0.12  # for each of the four rates
PIECE = 2**22  # bytes of a file read at a time
SPANS = (2**16, 2**25)  # numbers of an elementwise operation in the probe


@dataclass(frozen=True)
class Machine:
    device: str  # cpu or cuda:N
    name: str
    dtype: torch.dtype  # what the run computes in
    device_free: int  # GPU memory, or the host's own on a CPU
    host_free: int
    cacheable: int  # what the run itself will call free when it decides how much to keep
    flops: float  # per second, of a large product in that dtype
    bandwidth: float  # bytes per second, read and written by an elementwise operation
    launch: float  # seconds that an operation takes on next to nothing
    reading: float = 1.0e9  # bytes per second of the model's files; unless probed, typical of one NVMe disk
    cores: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def describe_machine(compute: ComputeConfig, span: int, files: Sequence[Path]) -> Machine:
    """Raises where the recipe's device is not here. `span` is how many numbers a large operation of the run has: a fresh
    tensor beyond what caches and allocator hold costs many times as much per byte. `files` are the model's weights."""
    device = choose_device(compute.device)
    dtype = choose_dtype(compute.dtype, device)
    host = host_free()
    rates = (*_rates(device, dtype, span), _reading(files), len(os.sched_getaffinity(0)))
    if device.type == "cuda":
        free = free_memory(device)
        name = torch.cuda.get_device_name(device)
        return Machine(str(device), name, dtype, free, host, free, *rates)
    threads = torch.get_num_threads()
    name = f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"
    return Machine("cpu", name, dtype, host, host, host, *rates)


def disk_free(folder: Path) -> int:
    """Free bytes where `folder` is or would be made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _rates(device: torch.device, dtype: torch.dtype, span: int) -> tuple[float, float, float]:
    width = 4096 if device.type == "cuda" else 512
    left, right = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    long = torch.ones(min(max(span, SPANS[0]), SPANS[1]), device=device)
    small = torch.ones(8, 8, dtype=dtype, device=device)
    product = _seconds(lambda: left @ right, device)
    copy = _seconds(lambda: long * 2, device)
    launch = _seconds(lambda: small * 2, device)
    return 2 * width**3 / product, 2 * long.nbytes / copy, launch


def _reading(files: Sequence[Path]) -> float:
    """From the disk, or from memory where they were read lately."""
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("rb", buffering=0) as file:
        file.seek(largest.stat().st_size // 2)
        began, read = time.perf_counter(), 0
        while piece := file.read(PIECE):
            read += len(piece)
            if time.perf_counter() - began > PROBE_SECONDS:
                break
        return read / (time.perf_counter() - began)


def _seconds(operation: Callable[[], object], device: torch.device) -> float:
    """Of one call, averaged over as many as fit into the probe, after one that warms up."""
    wait: Callable[[], object] = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    operation()
    wait()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < PROBE_SECONDS:
        for _ in range(4):
            operation()
        wait()
        calls += 4
    return (time.perf_counter() - began) / calls


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
