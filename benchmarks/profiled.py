"""A few steps of a phase under PyTorch's profiler."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd.profiler_util import DeviceType

from onptq.progress import Bar

PLAIN = 8  # steps at most that are timed before, without the profiler
STEPS = 2
KERNELS = 25  # in the result, the longest


class Profiled:
    """The first phase of this name. A step lies between two advances of its bar. At least one is skipped: it compiles
    and allocates."""

    def __init__(self, phase: str, device: torch.device, skipped: int = 1) -> None:
        self.phase, self.device, self.skipped = phase, device, max(1, skipped)
        self.result: dict[str, Any] | None = None
        self._advances, self._began, self._computed = 0, 0.0, 0.0
        self._plain: dict[str, float] = {}
        activity = torch.profiler.ProfilerActivity
        self._activities = [activity.CPU, *([activity.CUDA] if device.type == "cuda" else [])]
        self._profiler: torch.profiler.profile | None = None

    def watching(self, phase: str, bar: Bar) -> Bar:
        return _Watched(self, bar) if self.result is None and phase == self.phase else bar

    def step(self) -> None:
        self._advances += 1
        first = max(1, self.skipped - PLAIN)
        if self._advances == first < self.skipped:
            self._start_clocks()
        elif self._advances == self.skipped:
            if first < self.skipped:
                self._plain = self._plain_step(self.skipped - first)
            self._profiler = torch.profiler.profile(activities=self._activities)
            self._profiler.start()
            self._start_clocks()
        elif self._profiler is not None and self._advances == self.skipped + STEPS:
            self.end()

    def end(self) -> None:
        """Stop the profiler, also where the phase has fewer steps than wanted."""
        if self._profiler is None:
            return
        self._synchronize()
        wall, steps = time.perf_counter() - self._began, self._advances - self.skipped
        self._profiler.stop()
        if steps:
            timed = {"phase": self.phase, "steps": steps, "wall_ms": 1e3 * wall / steps}
            self.result = timed | self._plain | self._kernels(steps)
        self._profiler = None

    def _start_clocks(self) -> None:
        self._synchronize()
        self._began, self._computed = time.perf_counter(), time.process_time()

    def _plain_step(self, steps: int) -> dict[str, float]:
        """Milliseconds of a step without the profiler, and those that the host computed."""
        computed = time.process_time() - self._computed
        self._synchronize()
        return {
            "plain_ms": 1e3 * (time.perf_counter() - self._began) / steps,
            "plain_host_ms": 1e3 * computed / steps,
        }

    def _kernels(self, steps: int) -> dict[str, Any]:
        """Per step, the operations of the device; on a CPU without the operations that they call."""
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


def show_profile(console: Console, profile: Mapping[str, Any]) -> None:
    console.print(
        f"a step of {profile['phase']}: {profile['wall_ms']:.1f} ms, of which the device was busy for {profile['busy_ms']:.1f}, "
        f"in {profile['launches']:,.0f} operations"
    )
    if "plain_ms" in profile:
        console.print(
            f"without the profiler {profile['plain_ms']:.1f} ms; the host computed for {profile['plain_host_ms']:.1f}"
        )
    table = Table("operation", box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("times", "us"):
        table.add_column(head, justify="right")
    for one in profile["kernels"]:
        table.add_row(one["name"][:80], f"{one['launches']:,.0f}", f"{one['us']:,.0f}")
    console.print(table)
