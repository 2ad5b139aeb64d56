"""One whole calibration through the public API: seconds and peak memory of every phase, and its two floors."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from floors import Counts, Floors, Rates
from media_prompts import draw_prompts
from profiled import Profiled

import onptq
from onptq.checkpoint.source import choose_dtype, find_source
from onptq.data.prompts import Prompt
from onptq.plan.parts import find_parts
from onptq.plan.work import work_of
from onptq.progress import Bar, QuietReporter
from onptq.recipe import Recipe
from onptq.run import run_home
from onptq.schemes import Scheme
from onptq_vllm.bench.published import Published, write_published

PHASES = ("Hash", "Load", "Encode", "Initialize", "Follow", "Compare", "Branch", "Calibrate", "Export", "Verify")
BETWEEN = "Between"  # phases: folding, and files of the run


@dataclass(frozen=True)
class Setting:
    """The settings of one run."""

    shape: Published
    layers: int
    media_tokens: int
    recipe: Recipe


@dataclass
class Phase:
    seconds: float = 0.0
    peak_bytes: int | None = None

    def add(self, seconds: float, peak: int | None) -> None:
        self.seconds += seconds
        if peak is not None:
            self.peak_bytes = max(peak, self.peak_bytes or 0)


class Measuring(QuietReporter):
    """Seconds and peak memory of every phase, by its first word, and between phases; each is printed as it ends."""

    def __init__(
        self, device: torch.device, print_line: Callable[[str], None], profiled: Profiled | None = None
    ) -> None:
        self.device, self.print_line, self.profiled = device, print_line, profiled
        self.phases: dict[str, Phase] = {}
        self.reserved: int | None = None  # peak of what the allocator took on a GPU
        self._reset()

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        ended = self._began
        self._close(BETWEEN)
        began = time.perf_counter()
        first = name.split()[0]
        with super().phase(name, total, unit) as bar:
            yield bar if self.profiled is None else self.profiled.watching(first, bar)
        if self.profiled is not None:
            self.profiled.end()
        peak = self._close(first)
        memory = "" if peak is None else f", {peak / 2**30:.2f} GiB"
        self.print_line(
            f"{name}: {time.perf_counter() - began:.2f} s{memory}, {began - ended:.2f} s after the phase before"
        )

    @property
    def peak(self) -> int | None:
        return max((phase.peak_bytes for phase in self.phases.values() if phase.peak_bytes is not None), default=None)

    def note(self, text: str) -> None:
        self.print_line(text)

    def end(self) -> None:
        self._close(BETWEEN)

    def _close(self, name: str) -> int | None:
        peak = self._peak()
        self.phases.setdefault(name, Phase()).add(time.perf_counter() - self._began, peak)
        self._reset()
        return peak

    def _peak(self) -> int | None:
        """Bytes of tensors on a GPU, of the whole process on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.reserved = max(self.reserved or 0, torch.cuda.max_memory_reserved(self.device))
            return torch.cuda.max_memory_allocated(self.device)
        with suppress(OSError):
            lines = Path("/proc/self/status").read_text().splitlines()
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
        return None

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):  # resets the high-water mark on Linux
                Path("/proc/self/clear_refs").write_text("5")
        self._began = time.perf_counter()


def prompts_of(setting: Setting) -> dict[str, list[Prompt]]:
    """The prompts of a run, by the names of `onptq.quantize`."""
    count = setting.recipe.data.prompts
    prompts = draw_prompts(setting.shape.family, count + setting.recipe.data.holdout, setting.media_tokens)
    return {"calibration": prompts[:count], "holdout": prompts[count:]}


@dataclass(frozen=True)
class Bench:
    """The folder of models and runs, and the device."""

    folder: Path
    device: torch.device
    rates: Rates
    print_line: Callable[[str], None]

    def run(
        self, setting: Setting, verify: bool = False, profile: str | None = None, skipped: int = 1
    ) -> dict[str, Any]:
        """One whole run. Its checkpoint is deleted, the model is left for the next run. `skipped` steps of the profiled
        phase come before the profiled ones."""
        model, write_seconds = self._model(setting)
        scratch = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
        out = scratch / "checkpoint"  # the files of the run go beside it
        prompts = prompts_of(setting)
        profiled = None if profile is None else Profiled(profile, self.device, skipped)
        measuring = Measuring(self.device, self.print_line, profiled)
        began = time.perf_counter()
        try:
            result = onptq.quantize(
                model,
                out,
                calibration=prompts["calibration"],
                holdout=prompts["holdout"],
                recipe=setting.recipe,
                reporter=measuring,
                verify=verify,
            )
            measuring.end()
            seconds = time.perf_counter() - began
            floors = self._floors(setting, model, out, result.summary)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        figures = {
            "seconds": seconds,
            "made_in": write_seconds,
            "peak_bytes": measuring.peak,
            "reserved_bytes": measuring.reserved,
            "counts": asdict(floors.counts),
            "phases": self._rows(measuring.phases, floors),
            "rounds": result.summary["rounds"],
        }
        return figures if profiled is None else figures | {"profile": profiled.result}

    def _model(self, setting: Setting) -> tuple[Path, float | None]:
        """The checkpoint, and the seconds it took to write; None if it was there."""
        folder = self.folder / f"{setting.shape.family}-{setting.shape.dims.hidden}-{setting.layers}"
        if folder.exists():
            return folder, None
        for other in self.folder.glob(f"{setting.shape.family}-{setting.shape.dims.hidden}-*"):
            shutil.rmtree(other)  # sixteen gigabytes each: one at a time
        began = time.perf_counter()
        write_published(setting.shape, folder, layers=setting.layers, device=self.device.type)
        return folder, time.perf_counter() - began

    def _floors(self, setting: Setting, model: Path, out: Path, summary: Mapping[str, Any]) -> Floors:
        source = find_source(model)
        shapes = find_parts(source, Scheme.parse(setting.recipe.scheme)).shapes
        work = replace(
            work_of(setting.recipe, source), prompts=setting.recipe.data.prompts, holdout=setting.recipe.data.holdout
        )
        lengths = [len(ids) for ids in pq.read_table(run_home(out) / "prompts.parquet")["input_ids"].to_pylist()]
        rounds = summary["rounds"]
        states = sum(one["states"] for one in rounds) / max(1, len(rounds))
        candidates = sum(one["mismatches"] + one["near_misses"] for one in rounds) / max(1, len(rounds))
        counts = Counts(
            prompt_tokens=sum(lengths) / len(lengths),
            media_tokens=float(setting.media_tokens),
            response_tokens=states / max(1, work.prompts),
            candidates=candidates if setting.recipe.calibrate.gamma else 0.0,
        )
        dtype = choose_dtype(setting.recipe.compute.dtype, self.device)
        return Floors(shapes, work, counts, dtype.itemsize, summary["checkpoint"]["bytes"])

    def _rows(self, measured: Mapping[str, Phase], floors: Floors) -> dict[str, dict[str, Any]]:
        least, tokens = floors.phases(), floors.tokens()
        rows: dict[str, dict[str, Any]] = {}
        for name in (*PHASES, BETWEEN):
            if name not in measured:
                continue
            phase = measured[name]
            row: dict[str, Any] = {"seconds": phase.seconds, "peak_bytes": phase.peak_bytes}
            row["tokens"] = tokens.get(name)
            row["tokens_per_second"] = tokens[name] / phase.seconds if name in tokens else None
            if name in least:
                arithmetic, moved = least[name].flops / self.rates.flops, least[name].bytes / self.rates.bandwidth
                row |= {"flops": least[name].flops, "bytes": least[name].bytes}
                row |= {"arithmetic_floor": arithmetic / phase.seconds, "bytes_floor": moved / phase.seconds}
            rows[name] = row
        return rows
