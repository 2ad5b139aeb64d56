"""Where the time of a phase goes: a few of its steps under PyTorch's profiler."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd.profiler_util import DeviceType

from onptq.progress import Bar

SKIPPED = 1  # steps before, which compile and allocate
STEPS = 2
KERNELS = 25  # that are kept, those of most time


class Profiled:
    """The first run through the phase of this name; a step lies between two advances of its bar."""

    def __init__(self, phase: str, device: torch.device) -> None:
        self.phase, self.device = phase, device
        self.found: dict[str, Any] | None = None
        self._advances, self._began = 0, 0.0
        activity = torch.profiler.ProfilerActivity
        self._activities = [activity.CPU, *([activity.CUDA] if device.type == "cuda" else [])]
        self._profiler: torch.profiler.profile | None = None

    def watching(self, phase: str, bar: Bar) -> Bar:
        return _Watched(self, bar) if self.found is None and phase == self.phase else bar

    def step(self) -> None:
        self._advances += 1
        if self._advances == SKIPPED:
            self._synchronize()
            self._profiler = torch.profiler.profile(activities=self._activities)
            self._profiler.start()
            self._began = time.perf_counter()
        elif self._profiler is not None and self._advances == SKIPPED + STEPS:
            self.end()

    def end(self) -> None:
        """Also where a phase is over before its steps are."""
        if self._profiler is None:
            return
        self._synchronize()
        wall, steps = time.perf_counter() - self._began, self._advances - SKIPPED
        self._profiler.stop()
        if steps:
            self.found = {"phase": self.phase, "steps": steps, "wall_ms": 1e3 * wall / steps} | self._kernels(steps)
        self._profiler = None

    def _kernels(self, steps: int) -> dict[str, Any]:
        """By step, what the device computed; a CPU's operations without those that they call."""
        assert self._profiler is not None
        on_gpu = self.device.type == "cuda"
        kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
        rows = [
            (one.key, one.count / steps, (one.self_device_time_total if on_gpu else one.self_cpu_time_total) / steps)
            for one in self._profiler.key_averages()
            if one.device_type == kind and not one.is_user_annotation
        ]
        rows.sort(key=lambda row: -row[2])
        return {
            "busy_ms": sum(row[2] for row in rows) / 1e3,
            "launches": sum(row[1] for row in rows),
            "kernels": [{"name": name, "launches": count, "us": spent} for name, count, spent in rows[:KERNELS]],
        }

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Watched:
    def __init__(self, profiled: Profiled, bar: Bar) -> None:
        self.profiled, self.bar = profiled, bar

    def advance(self, n: int = 1, **info: Any) -> None:
        self.bar.advance(n, **info)
        if n:
            self.profiled.step()


def show_profile(console: Console, found: Mapping[str, Any]) -> None:
    console.print(
        f"a step of {found['phase']}: {found['wall_ms']:.1f} ms, of which the device was busy for {found['busy_ms']:.1f}, in "
        f"{found['launches']:,.0f} operations"
    )
    table = Table("operation", box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("times", "us"):
        table.add_column(head, justify="right")
    for one in found["kernels"]:
        table.add_row(one["name"][:80], f"{one['launches']:,.0f}", f"{one['us']:,.0f}")
    console.print(table)
