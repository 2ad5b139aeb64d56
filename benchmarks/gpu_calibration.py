"""Time, memory and distance from the floors of a whole calibration, on a model of published shapes with random weights.

    python benchmarks/gpu_calibration.py --model qwen2.5-vl-7b --preset paper --out result.json
    python benchmarks/gpu_calibration.py --model qwen2.5-vl-7b --layers 8 --sweep --out sweep.json
    python benchmarks/gpu_calibration.py --tiny --out result.json                                   # on a CPU

One call of `onptq.quantize`, as a user makes it, with images of about 400 tokens. Reported per phase: seconds, tokens
per second, peak memory of tensors, and the shares of the seconds that the two floors explain (benchmarks/floors.py).
`--sweep` runs smaller settings instead, changing one of them at a time. `--profile Calibrate` profiles a few steps of a
phase.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from floors import Rates, measure_rates
from measured_run import PHASES, Bench, Setting
from profiled import show_profile
from rich.console import Console
from rich.table import Table

import onptq
from onptq.checkpoint.source import choose_device, choose_dtype
from onptq.overrides import parse_override
from onptq.recipe import Recipe
from onptq.zoo.configs import RANDOM_TOWERS
from onptq_vllm.bench.published import PUBLISHED, Published, find_published

PACKAGES = ("torch", "transformers", "compressed-tensors", "triton")
MATRIX, COPIED = 8192, 2**32  # sizes for measuring the rates on a GPU
TINY_MATRIX, TINY_COPIED = 256, 2**22
PROFILED = ("Follow", "Compare", "Branch", "Calibrate")

# A sweep changes one of these at a time; every value is a run of its own. With --layers all depths are scaled.
BASE = {"prompts": 32, "tokens": 32, "horizon": 4, "media_tokens": 400, "layers": 8}
SWEEPS: Mapping[str, Sequence[int]] = {
    "prompts": (16, 32, 64),
    "tokens": (16, 32, 64),
    "horizon": (2, 4, 8),
    "media_tokens": (200, 400, 800),
    "layers": (4, 8, 16),
}
TINY_BASE = {"prompts": 3, "tokens": 6, "horizon": 2, "media_tokens": 12, "layers": 1}


def tiny_shape(shape: Published) -> Published:
    """The same family, small enough for a CPU and a test."""
    dims = replace(shape.dims, layers=1, hidden=64, ffn=128, heads=2, kv_heads=1, vocab=512, context=4096, width=None)
    if dims.experts:
        dims = replace(dims, experts=4, active=2, expert_ffn=64)
    return Published(shape.family, dims, RANDOM_TOWERS, (28 * 28, 512 * 512))


def make_recipe(preset: str, scheme: str, changes: Sequence[str], point: Mapping[str, int]) -> Recipe:
    """The preset with the settings of a point; --set wins."""
    named = {"prompts": "data.prompts", "tokens": "follow.max_tokens", "horizon": "branch.horizon"}
    options = {"scheme": scheme} | {name: point[key] for key, name in named.items() if key in point}
    return Recipe.preset(preset, options | dict(map(parse_override, changes)))


def sweep(
    bench: Bench, arguments: argparse.Namespace, shape: Published, save: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """The base point once and every other value of each sweep, saved as they end; the recipe has one round. On a GPU an
    uncounted run comes first, which compiles kernels."""
    base = dict(TINY_BASE if arguments.tiny else BASE)
    if arguments.layers is not None:
        base["layers"] = arguments.layers
    changes = ["rounds=1", f"data.holdout={2 if arguments.tiny else 8}", *arguments.changes]

    def point(values: Mapping[str, int]) -> dict[str, Any]:
        recipe = make_recipe(arguments.preset, arguments.scheme, changes, values)
        run = bench.run(Setting(shape, values["layers"], values["media_tokens"], recipe))
        bench.print_line(f"{dict(values)}: {run['seconds']:.1f} s")
        return {"setting": dict(values)} | run

    if bench.device.type == "cuda":
        point(base)
    middle = point(base)
    curves: dict[str, list[dict[str, Any]]] = {}
    for name in arguments.sweep:
        curves[name] = []
        values = (
            (base[name], 2 * base[name]) if arguments.tiny else [v * base[name] // BASE[name] for v in SWEEPS[name]]
        )
        for value in values:
            curves[name].append(middle if value == base[name] else point(base | {name: value}))
            save({"base": base, "curves": curves})
    return {"base": base, "curves": curves}


def environment(device: torch.device) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "onptq": onptq.__version__}
    for name in PACKAGES:
        with suppress(ImportError):
            versions[name] = version(name)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def show_run(console: Console, run: Mapping[str, Any], rates: Rates) -> None:
    table = Table("phase", box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("seconds", "tokens/s", "peak GiB", "arithmetic", "bytes"):
        table.add_column(head, justify="right")
    for name, row in run["phases"].items():
        rate, peak = row["tokens_per_second"], row["peak_bytes"]
        floors = [f"{100 * row[key]:.1f}%" if key in row else "" for key in ("arithmetic_floor", "bytes_floor")]
        peak_text = "" if peak is None else f"{peak / 2**30:.2f}"
        table.add_row(name, f"{row['seconds']:.2f}", "" if rate is None else f"{rate:,.0f}", peak_text, *floors)
    peak = run["peak_bytes"]
    table.add_row("in all", f"{run['seconds']:.2f}", "", "" if peak is None else f"{peak / 2**30:.2f}", "", "")
    console.print(table)
    console.print(
        f"arithmetic and bytes: the share of a phase's seconds that its least work takes at {rates.flops / 1e12:.3g} TFLOP/s "
        f"and {rates.bandwidth / 1e9:.4g} GB/s, both measured here"
    )
    seconds = {name: row["seconds"] for name, row in run["phases"].items()}
    if seconds.get("Follow") and "Branch" in seconds:
        console.print(
            f"Branch takes {seconds['Branch'] / seconds['Follow']:.2f} and Compare "
            f"{seconds['Compare'] / seconds['Follow']:.2f} of Follow's time"
        )


def show_sweep(console: Console, curves: Mapping[str, Any]) -> None:
    for name, points in curves.items():
        values = [point["setting"][name] for point in points]
        table = Table(name, *map(str, values), box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
        for phase in PHASES:
            if all(phase in point["phases"] for point in points):
                table.add_row(phase, *(f"{point['phases'][phase]['seconds']:.2f}" for point in points))
        console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-vl-7b", choices=PUBLISHED)
    parser.add_argument("--preset", default="paper", help="preset of the recipe")
    parser.add_argument("--scheme", default="W4A8")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--layers", type=int, help="decoder blocks, instead of all of them")
    parser.add_argument("--media-tokens", type=int, help="tokens of a prompt's image or audio, about; default 400")
    parser.add_argument("--memory-gib", type=float, help="limit of the GPU's memory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, help="folder of the model, which stays for the next call")
    parser.add_argument("--verify", action="store_true", help="also reload the checkpoint and compare it")
    parser.add_argument("--profile", choices=PROFILED, help="profile two steps of a phase")
    parser.add_argument("--profile-after", type=int, default=1, metavar="N", help="steps of the phase before them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every number to FILE")
    parser.add_argument("--sweep", nargs="*", choices=SWEEPS, help="change one of these at a time; without names, each")
    parser.add_argument("--tiny", action="store_true", help="a model of the family that a CPU runs in seconds")
    parser.add_argument("--quiet", action="store_true", help="print the tables only")
    arguments = parser.parse_args(argv)
    if arguments.sweep == []:
        arguments.sweep = list(SWEEPS)
    return arguments


def measure(arguments: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    device = choose_device(arguments.device)
    if arguments.memory_gib is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.memory_gib * 2**30 / total), device)
    shape = find_published(arguments.model)
    if arguments.tiny:
        shape = tiny_shape(shape)
    sizes = (MATRIX, COPIED) if device.type == "cuda" else (TINY_MATRIX, TINY_COPIED)
    rates = measure_rates(device, choose_dtype("auto", device), *sizes)
    bench = Bench(folder, device, rates, (lambda text: None) if arguments.quiet else _print_line)
    about = {"model": arguments.model, "tiny": arguments.tiny, "preset": arguments.preset}
    about |= {"scheme": arguments.scheme, "changes": arguments.changes, "memory_gib": arguments.memory_gib}
    report = about | environment(device) | {"rates": asdict(rates)}
    if arguments.sweep is not None:
        report |= {"sweep": sweep(bench, arguments, shape, lambda part: save(arguments.out, report | {"sweep": part}))}
        show_sweep(console, report["sweep"]["curves"])
        return report
    point = {key: TINY_BASE[key] for key in ("prompts", "tokens", "horizon")} if arguments.tiny else {}
    changes = ["data.holdout=2", *arguments.changes] if arguments.tiny else arguments.changes
    media = arguments.media_tokens or (TINY_BASE if arguments.tiny else BASE)["media_tokens"]
    recipe = make_recipe(arguments.preset, arguments.scheme, changes, point)
    setting = Setting(shape, arguments.layers or shape.dims.layers, media, recipe)
    run = bench.run(setting, arguments.verify, arguments.profile, arguments.profile_after)
    report |= {"recipe": recipe.model_dump(), "layers": setting.layers, "run": run}
    show_run(console, run, rates)
    if run.get("profile"):
        show_profile(console, run["profile"])
    return report


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    console = Console(width=110 if not sys.stdout.isatty() else None, highlight=False)
    with tempfile.TemporaryDirectory(prefix="onptq-calibration-") as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = measure(arguments, folder, console)
    save(arguments.out, report)
    return 0


def save(path: Path | None, report: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
