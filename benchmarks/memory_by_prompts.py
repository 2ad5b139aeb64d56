"""Memory and time of a whole run and of its page by the number of calibration prompts, on a small random model.

    python benchmarks/memory_by_prompts.py [--prompts 128 1024 8192] [--tokens 64] [--tiny] [--json FILE] [--svg FILE]

Every number of prompts is a run of its own, in a process of its own, with an eighth of a GiB for caches; then a process makes
the page of the run. A peak is the most that a process has held, Python and libraries included. Needs `onptq[figures]` for --svg.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onptq.page.vega import category, coloured, picture, quantity, values, write_svg
from onptq.run import LOG, run_home
from onptq.zoo.random import write_random

HELD_OUT = 24
MEBI = 2**20
TINY = {"hidden": 64, "ffn": 128, "heads": 2, "kv_heads": 1, "vocab": 512}
SIDES = ["the run", "its page"]
COMMAND = (sys.executable, "-c", "from onptq.cli import main; main()")
SETTINGS = {
    "init": "search",
    "data.holdout": HELD_OUT,
    "rounds": 1,
    "calibrate.epochs": 1,
    "calibrate.batch": 16,
    "calibrate.micro_batch": 16,
    "calibrate.checkpointing": False,
    "compute.cache_gib": 0.125,
    "compute.dtype": "float32",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    parser.add_argument("--tiny", action="store_true", help="a model of 64 channels, for ten thousand prompts")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--svg", type=Path, help="draw the result here")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="onptq-memory-") as folder:
        size: dict[str, Any] = TINY if given.tiny else {"hidden": 128, "ffn": 256}
        prompts = max(given.prompts) + HELD_OUT
        model = write_random("qwen2.5-vl", Path(folder) / "model", prompts=prompts, image_size=56, **size)
        runs = []
        for count in sorted(given.prompts):
            runs.append(run := measure(model, Path(folder) / str(count), count, given.tokens))
            print(
                f"{run['prompts']:>8} prompts  {run['peak_bytes'] / MEBI:8.0f} MiB {run['seconds']:8.1f} s"
                f"  page {run['page_peak_bytes'] / MEBI:8.0f} MiB {run['page_seconds']:8.1f} s",
                flush=True,
            )
    result = {"tokens": given.tokens, "settings": SETTINGS, "runs": runs}
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if given.svg is not None:
        draw(runs, given.svg)
    return 0


def measure(model: Path, out: Path, prompts: int, tokens: int) -> dict[str, Any]:
    """Peaks in bytes and seconds of a run, after each of its phases too, and of its page."""
    settings = SETTINGS | {"data.prompts": prompts, "follow.max_tokens": tokens}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    manifest = ["--calibration", str(model / "prompts.jsonl"), "--out", str(out), "--no-verify", "--quiet"]
    seconds, peak = timed(["quantize", str(model), *manifest, *words])
    events = [json.loads(line) for line in (run_home(out) / LOG).read_text(encoding="utf-8").splitlines()]
    phases = {event["phase"]: event["peak_bytes"] for event in events if "peak_bytes" in event}
    page_seconds, page_peak = timed(["report", str(out), "--quiet"])
    page = {"page_seconds": page_seconds, "page_peak_bytes": page_peak}
    return {"prompts": prompts, "peak_bytes": peak, "seconds": seconds, **page, "phases": phases}


def timed(words: Sequence[str]) -> tuple[float, int]:
    """Seconds of a command, and the most bytes that its process held."""
    started = time.monotonic()
    child = os.posix_spawn(sys.executable, [*COMMAND, *words], os.environ | {"OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"onptq {' '.join(words)} failed")
    return time.monotonic() - started, usage.ru_maxrss * 1024


def draw(runs: Sequence[dict[str, Any]], file: Path) -> None:
    rows = [
        {"prompts": f"{run['prompts']:,}", "of": name, "mib": run[key] / MEBI}
        for run in runs
        for name, key in zip(SIDES, ("peak_bytes", "page_peak_bytes"), strict=True)
    ]
    body = {
        "data": values(rows),
        "mark": {"type": "bar"},
        "encoding": {
            "x": category(
                "prompts",
                "calibration prompts",
                sort=[f"{run['prompts']:,}" for run in runs],
                axis={"labelAngle": 0},
            ),
            "xOffset": {"field": "of", "sort": SIDES},
            "color": coloured("of", SIDES),
            "y": quantity("mib", "most memory of the process, MiB", scale={"zero": True}),
        },
    }
    write_svg(picture("memory", "Memory by prompts", "Peaks of a whole run and of its page.", body), file)


if __name__ == "__main__":
    sys.exit(main())
