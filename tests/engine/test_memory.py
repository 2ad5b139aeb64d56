"""Free memory of the host within the limits of a container, read from files such as Linux has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onptq.engine.memory import free_memory, host_free

MIB = 2**20


def machine(folder: Path, cgroups: str) -> dict[str, Path]:
    """1000 MiB available, and a process in `cgroups`."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text("MemTotal: 4096000 kB\nMemAvailable: 1024000 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(cgroups)
    return {"proc": folder / "proc", "cgroup": folder / "cgroup"}


def limit(folder: Path, names: tuple[str, str], most: str, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (most, str(used), stat), strict=True):
        (folder / name).write_text(f"{text}\n")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_without_a_limit_it_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    paths = machine(tmp_path, "0::/\n")
    assert host_free(**paths) == 1000 * MIB
    limit(paths["cgroup"], V2, "max", 5 * MIB, "inactive_file 0")
    assert host_free(**paths) == 1000 * MIB


def test_a_limit_of_cgroup_v2_counts_without_the_page_cache(tmp_path: Path) -> None:
    paths = machine(tmp_path, "0::/\n")
    limit(paths["cgroup"], V2, str(512 * MIB), 200 * MIB, f"anon 0\ninactive_file {50 * MIB}")
    assert host_free(**paths) == 362 * MIB


def test_the_tightest_of_all_ancestors_counts(tmp_path: Path) -> None:
    paths = machine(tmp_path, "0::/slice/job\n")
    limit(paths["cgroup"] / "slice" / "job", V2, "max", 0, "inactive_file 0")
    limit(paths["cgroup"] / "slice", V2, str(100 * MIB), 40 * MIB, "inactive_file 0")
    assert host_free(**paths) == 60 * MIB


@pytest.mark.parametrize("seen", ["docker/1", "."])
def test_a_limit_of_cgroup_v1_counts(tmp_path: Path, seen: str) -> None:
    """A container sees its own cgroup either under its path or as the root."""
    paths = machine(tmp_path, "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n")
    limit(paths["cgroup"] / "memory" / seen, V1, str(300 * MIB), 100 * MIB, f"total_inactive_file {MIB}")
    assert host_free(**paths) == 201 * MIB


def test_a_limit_below_the_usage_leaves_nothing(tmp_path: Path) -> None:
    paths = machine(tmp_path, "0::/\n")
    limit(paths["cgroup"], V2, str(MIB), 2 * MIB, "inactive_file 0")
    assert host_free(**paths) == 0


def test_this_machine_has_some() -> None:
    assert free_memory(torch.device("cpu")) > 0
