"""Free memory of the host and of a device, within the limits of a container."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from onptq.ranks import on_this_machine

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
# Limit, usage, and the entry of memory.stat with the part of the usage that the kernel gives back on demand.
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take of the device: a GPU's memory, else the host's."""
    if device.type != "cuda":
        return host_free() // on_this_machine()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors of this process have held on a GPU, else that the process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def host_free(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes of host memory that are available, within the limits of all cgroups (v1 and v2) of this process."""
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min((available, *_left_by_cgroups(proc, cgroup)))


def _left_by_cgroups(proc: Path, cgroup: Path) -> Iterator[int]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroup / "memory", V1) if controllers else (cgroup, V2)
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield from _left(folder, *names)


def _left(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """The limit of one cgroup less its usage; nothing where it has no limit."""
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    if most.isdigit():
        yield max(0, int(most) - used + int(stat.get(reclaimable, 0)))
