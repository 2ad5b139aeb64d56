"""Runs of many prompts and their pages: `python tests/faults/load.py --prompts 1000 4000 10000`.

Prints the seconds and the most memory of each, in processes of their own. The model is tiny, so that what grows with the prompts
is what is measured: the host's work, the caches, the bank and the page.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

RECIPE: dict[str, Any] = {
    "init": "search",
    "rounds": 1,
    "data.holdout": 64,
    "calibrate.codes": "free",
    "calibrate.epochs": 1,
    "calibrate.batch": 64,
    "calibrate.micro_batch": 64,
    "calibrate.evaluations": 1,
    "branch.horizon": 2,
    "compute.device": "cpu",
}


def run(model: Path, out: Path, prompts: int, tokens: int, changes: dict[str, Any]) -> dict[str, Any]:
    """A run of the preset `risk`, which branches and selects beside what every preset does."""
    from onptq.pipeline import quantize
    from onptq.recipe import Recipe

    recipe = Recipe.preset("risk", RECIPE | {"data.prompts": prompts, "follow.max_tokens": tokens} | changes)
    summary = quantize(model, out, calibration=model / "prompts.jsonl", recipe=recipe).summary
    return {"states": summary["rounds"][0]["states"], "phases": summary["seconds"]}


def page(out: Path) -> dict[str, Any]:
    from onptq.cli import app

    try:
        app(["report", str(out), "--out", str(out.with_suffix(".html"))])
    except SystemExit as end:
        if end.code:
            raise
    return {"bytes": out.with_suffix(".html").stat().st_size}


def measured(*arguments: object) -> dict[str, Any]:
    """What a part prints in a process of its own."""
    command = [sys.executable, __file__, "--part", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def part(name: str, *arguments: str) -> None:
    begun = time.monotonic()
    if name == "run":
        model, out, prompts, tokens, changes = arguments
        result = run(Path(model), Path(out), int(prompts), int(tokens), json.loads(changes))
    else:
        result = page(Path(arguments[0]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result | {"seconds": round(time.monotonic() - begun, 1), "MiB": round(peak)}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/faults/load.py", description=__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000, 4000, 10_000])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a change of the recipe")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    from onptq.zoo.random import write_random

    folder = given.folder or Path(tempfile.mkdtemp(prefix="onptq-load-"))
    size: dict[str, Any] = {"hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 128, "vocab": 512, "image_size": 56}
    most = max(given.prompts)
    if not (folder / "model" / "prompts.jsonl").exists():
        write_random("qwen2.5-vl", folder / "model", prompts=most + RECIPE["data.holdout"], **size)
    changes = {name: json.loads(value) for name, value in (each.split("=", 1) for each in given.set)}
    for prompts in given.prompts:
        out = folder / f"run {prompts}"
        for what in (("run", folder / "model", out, prompts, given.tokens, json.dumps(changes)), ("page", out)):
            print(prompts, what[0], json.dumps(measured(*what)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        part(*sys.argv[2:])
    else:
        main()
