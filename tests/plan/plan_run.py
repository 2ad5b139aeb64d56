"""A whole run in a process of its own, with the most memory each phase held; prints JSON.

Arguments: model, recipe, out, warm. The environment makes the allocator return every large tensor when it dies; what it keeps
of small ones is returned before each phase.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

import onptq
from onptq.progress import Bar, QuietReporter
from onptq.recipe import Recipe
from onptq.run import run_home

LIBC = ctypes.CDLL(None)


class Measuring(QuietReporter):
    """Peak resident bytes of each phase, by the first word of its name."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        LIBC.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
        with super().phase(name, total, unit) as bar:
            yield bar
        word = name.split()[0]
        self.peaks[word] = max(self.peaks.get(word, 0), resident("VmHWM"))


def resident(line: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) * 1024 for text in status if text.startswith(line))


def main(model: Path, recipe: Recipe, out: Path, warm: Path) -> None:
    torch.set_num_threads(1)
    few = recipe.with_overrides({"data.prompts": 2, "data.holdout": 1})
    onptq.quantize(warm, out / "warm", calibration=warm / "prompts.jsonl", recipe=few)  # imports are no part of a run
    gc.collect()
    before, reporter = resident("VmRSS"), Measuring()
    onptq.quantize(model, out / "run", calibration=model / "prompts.jsonl", recipe=recipe, reporter=reporter)
    with safe_open(run_home(out / "run") / "init.safetensors", "pt") as init:
        kinds = Counter(name.partition("/")[0] for name in init.keys())  # noqa: SIM118 - safe_open is no mapping
    print(json.dumps({"before": before, "peaks": reporter.peaks, "init": kinds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Recipe.from_yaml(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
