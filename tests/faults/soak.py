"""One process that quantizes again and again: `python tests/faults/soak.py --runs 200`.

Exit code 1 if open files or memory grow in the last half of the runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from forked import RECIPE

MEBI = 2**20
ALLOWED = 0.25  # MiB a run that the allocator's own unrest may look like


@dataclass(frozen=True)
class Held:
    """What the process has after a run."""

    files: int
    bytes: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE"))


def soak(model: Path, runs: int, folder: Path) -> list[Held]:
    """What was held after each of so many runs, which leave nothing else behind."""
    from onptq.pipeline import quantize
    from onptq.progress import SilentReporter
    from onptq.recipe import Recipe
    from onptq.run import run_home

    held = []
    recipe = Recipe.preset("default", RECIPE | {"rounds": 1, "init": "smoothquant", "calibrate.epochs": 1})
    for number in range(runs):
        out = folder / f"run {number}"
        manifest = model / "prompts.jsonl"
        quantize(model, out, calibration=manifest, recipe=recipe, verify=number % 4 == 0, reporter=SilentReporter())
        for place in (out, run_home(out)):
            shutil.rmtree(place)
        held.append(Held.now())
    return held


def growth(held: Sequence[Held]) -> tuple[int, float]:
    """Of the last half of the runs: the most files over the fewest, and MiB per run, by the medians of its two halves."""
    last = held[len(held) // 2 :]
    files = [one.files for one in last]
    middle = len(last) // 2
    before, after = (statistics.median(one.bytes for one in part) for part in (last[:middle], last[middle:]))
    return max(files) - min(files), (after - before) / MEBI / (len(last) / 2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/faults/soak.py", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    given = parser.parse_args()
    import torch

    from onptq.zoo.random import write_random

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="onptq-soak-") as folder:
        model = write_random(
            "qwen2.5-vl",
            Path(folder) / "model",
            prompts=6,
            hidden=64,
            heads=2,
            kv_heads=1,
            ffn=128,
            vocab=512,
            image_size=56,
        )
        held = soak(model, given.runs, Path(folder))
    files, memory = growth(held)
    first, middle, last = held[0], held[len(held) // 2], held[-1]
    for name, one in (("first", first), ("middle", middle), ("last", last)):
        print(f"after the {name} of {given.runs} runs: {one.files} open files, {one.bytes / MEBI:.0f} MiB")
    print(f"in the last half: {files} more files at most, {memory:+.3f} MiB a run")
    return int(files > 0 or memory > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
