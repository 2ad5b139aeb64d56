"""Memory and time of a whole run by the number of calibration prompts, on a small random model.

    python benchmarks/memory_by_prompts.py [--prompts 128 1024 8192] [--tokens 64] [--json FILE] [--svg FILE]

Every number of prompts is a run of its own, in a process of its own, with an eighth of a GiB for caches. The peak is the most
that the process has held, Python and libraries included. Needs `onptq[figures]` for --svg.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onptq.page.vega import BLUE, category, picture, quantity, values, write_svg
from onptq.run import LOG, run_home
from onptq.zoo.random import write_random

HELD_OUT = 24
MEBI = 2**20
RUN = "from onptq.cli import main; main()"
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
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--svg", type=Path, help="draw the result here")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="onptq-memory-") as folder:
        model = write_random(
            "qwen2.5-vl",
            Path(folder) / "model",
            prompts=max(given.prompts) + HELD_OUT,
            hidden=128,
            ffn=256,
            image_size=56,
        )
        runs = [measure(model, Path(folder) / str(count), count, given.tokens) for count in sorted(given.prompts)]
    for run in runs:
        print(f"{run['prompts']:>8} prompts  {run['peak_bytes'] / MEBI:8.0f} MiB  {run['seconds']:8.1f} s")
    result = {"tokens": given.tokens, "settings": SETTINGS, "runs": runs}
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if given.svg is not None:
        draw(runs, given.svg)
    return 0


def measure(model: Path, out: Path, prompts: int, tokens: int) -> dict[str, Any]:
    """The peak of a run in bytes, after each phase too, and its seconds."""
    settings = SETTINGS | {"data.prompts": prompts, "follow.max_tokens": tokens}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    manifest = ["--calibration", str(model / "prompts.jsonl"), "--out", str(out), "--no-verify", "--quiet"]
    started = time.monotonic()
    command = [sys.executable, "-c", RUN, "quantize", str(model), *manifest, *words]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    seconds = time.monotonic() - started
    events = [json.loads(line) for line in (run_home(out) / LOG).read_text(encoding="utf-8").splitlines()]
    phases = {event["phase"]: event["peak_bytes"] for event in events if "peak_bytes" in event}
    return {"prompts": prompts, "peak_bytes": max(phases.values()), "seconds": seconds, "phases": phases}


def draw(runs: Sequence[dict[str, Any]], file: Path) -> None:
    rows = [{"prompts": f"{run['prompts']:,}", "mib": run["peak_bytes"] / MEBI} for run in runs]
    body = {
        "data": values(rows),
        "mark": {"type": "bar", "color": BLUE},
        "encoding": {
            "x": category(
                "prompts", "calibration prompts", sort=[row["prompts"] for row in rows], axis={"labelAngle": 0}
            ),
            "y": quantity("mib", "most memory of the process, MiB", scale={"zero": True}),
        },
    }
    write_svg(picture("memory", "Memory by prompts", "Peak of a whole run.", body), file)


if __name__ == "__main__":
    sys.exit(main())
