"""OnPTQ beside AutoRound: seconds and peak memory on one model of published shapes, one GPU and one set of prompts.

    python benchmarks/gpu_peers.py --model qwen2.5-vl-7b --out result.json
    python benchmarks/gpu_peers.py --model qwen2.5-vl-7b --layers 8 --settings light --out result.json
    python benchmarks/gpu_peers.py --tiny --autoround-python DIR/bin/python --out result.json      # on a CPU

Each setting runs OnPTQ's preset and AutoRound's recipe of that name (default: 200 iterations, light: 50), one process
after another. The time from a loaded model to finished weights counts: for OnPTQ all phases from Encode to the last
Calibrate, for AutoRound the conversion of prompts to tensors (Encode) and everything from its constructor to the end of
`quantize()` (Tune). Loading and saving are reported apart, imports are not. AutoRound is given the dense model's
responses; OnPTQ generates its own. Both write W4A16, AutoRound's only 4-bit scheme. AutoRound's samples are all prompts
of preset `default`; preset `light` takes the first of them. Killed at any moment, the same command continues with the
missing parts of FILE.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from floors import measure_rates
from gpu_calibration import COPIED, MATRIX, TINY_COPIED, TINY_MATRIX, environment, make_recipe, save, tiny_shape
from measured_run import BETWEEN, Measuring, Setting, prompts_of
from media_prompts import draw_prompts
from peers_report import START, TOOLS, counted, ratios, show
from rich.console import Console

import onptq
from onptq.checkpoint.source import choose_device, choose_dtype, find_source
from onptq.errors import OnPTQError
from onptq.progress import QuietReporter
from onptq.recipe import Recipe
from onptq.schemes import Scheme
from onptq_vllm.bench.published import PUBLISHED, Published, find_published, write_published

PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))  # before installed packages, which may have the same names

from peer_inputs import write_material  # noqa: E402
from run import AUTOROUND, FAMILIES  # noqa: E402

SETTINGS = ("default", "light")
TINY_POINT = {"prompts": 8, "tokens": 6, "horizon": 2}
TINY_HOLDOUT, TINY_MEDIA, MEDIA = 2, 12, 400
LINES = 15  # of the log of a process that failed
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Plan:
    """The settings that all processes of one call share."""

    shape: Published
    layers: int
    media_tokens: int
    scheme: Scheme
    recipes: Mapping[str, Recipe]
    folder: Path

    @property
    def model(self) -> Path:
        """The model, under the name that gpu_calibration.py uses too."""
        return self.folder / f"{self.shape.family}-{self.shape.dims.hidden}-{self.layers}"

    @property
    def material(self) -> Path:
        data, follow = self.recipes["default"].data, self.recipes["default"].follow
        name = f"material-{self.layers}-{data.prompts}-{self.media_tokens}-{follow.max_tokens}"
        return self.folder / name


def make_plan(arguments: argparse.Namespace, folder: Path) -> Plan:
    shape, scheme = find_published(arguments.model), Scheme.parse(arguments.scheme)
    bare = str(replace(scheme, group_size=None))
    if bare not in AUTOROUND:
        raise OnPTQError(f"--scheme {scheme}: AutoRound cannot write it; expected of {', '.join(sorted(AUTOROUND))}")
    if arguments.tiny:
        shape = tiny_shape(shape)
    changes = [f"data.holdout={TINY_HOLDOUT}", *arguments.changes] if arguments.tiny else arguments.changes
    changes = [f"compute.device={arguments.device}", *changes]
    recipes = {
        name: make_recipe(name, arguments.scheme, changes, TINY_POINT if arguments.tiny else {}) for name in SETTINGS
    }
    media = arguments.media_tokens or (TINY_MEDIA if arguments.tiny else MEDIA)
    return Plan(shape, arguments.layers or shape.dims.layers, media, scheme, recipes, folder)


def prepare(plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the model, and the prompts with the dense model's responses; measure the device's rates."""
    device = choose_device(arguments.device)
    seconds = {}
    began = time.perf_counter()
    if not plan.model.exists():
        write_published(plan.shape, plan.model, layers=plan.layers, device=device.type)
        seconds["model"] = time.perf_counter() - began
    recipe, began = plan.recipes["default"], time.perf_counter()
    prompts = draw_prompts(plan.shape.family, recipe.data.prompts, plan.media_tokens)
    write_material(find_source(plan.model), prompts, recipe.follow.max_tokens, plan.material, QuietReporter())
    seconds["material"] = time.perf_counter() - began
    sizes = (MATRIX, COPIED) if device.type == "cuda" else (TINY_MATRIX, TINY_COPIED)
    rates = measure_rates(device, choose_dtype("auto", device), *sizes)
    return {"seconds": seconds, "environment": environment(device) | {"rates": asdict(rates)}}


class MeasuringFromStart(Measuring):
    """The time before the model is loaded, mostly imports, is a phase of its own."""

    def _close(self, name: str) -> int | None:
        return super()._close(START if name == BETWEEN and "Load" not in self.phases else name)


def run_onptq(plan: Plan, arguments: argparse.Namespace, setting: str) -> dict[str, Any]:
    recipe = plan.recipes[setting]
    prompts = prompts_of(Setting(plan.shape, plan.layers, plan.media_tokens, recipe))
    measuring = MeasuringFromStart(choose_device(arguments.device), lambda text: print(text, flush=True))
    with tempfile.TemporaryDirectory(prefix="run-", dir=plan.folder) as scratch:
        out = Path(scratch) / "checkpoint"  # the files of the run go beside it
        onptq.quantize(
            plan.model,
            out,
            calibration=prompts["calibration"],
            holdout=prompts["holdout"],
            recipe=recipe,
            reporter=measuring,
            verify=False,
        )
        measuring.end()
    return {
        "phases": {name: phase.seconds for name, phase in measuring.phases.items()},
        "peak_bytes": measuring.peak,
        "reserved_bytes": measuring.reserved,
        "settings": recipe.model_dump(),
    }


def autoround_command(plan: Plan, arguments: argparse.Namespace, setting: str, record: Path) -> list[str]:
    scheme, out = plan.scheme, plan.folder / f"autoround-{setting}"
    command = [arguments.autoround_python, str(PEERS / "time_autoround.py"), "--recipe", setting]
    command += ["--bits", str(scheme.weight_bits), "--activation-bits", str(scheme.activation_bits)]
    if scheme.group_size:
        command += ["--group-size", str(scheme.group_size)]
    command += ["--device", choose_device(arguments.device).type]
    named = {"model": plan.model, "material": plan.material, "out": out, "record": record}
    command += [part for name, path in named.items() for part in (f"--{name}", str(path))]
    return command + [f"--{name}" for name in ("singly", "no-save") if getattr(arguments, name.replace("-", "_"))]


@dataclass(frozen=True)
class Processes:
    """Starts processes one after another; each writes a record, and a log beside the result."""

    folder: Path
    logs: Path
    own: Sequence[str]  # this script with its arguments

    def start(self, name: str, command: Sequence[str] | None = None) -> dict[str, Any]:
        record = self.record(name)
        record.unlink(missing_ok=True)
        log = self.logs.with_name(f"{self.logs.name}.{name}.log")
        began = time.perf_counter()
        with log.open("w", encoding="utf-8") as file:
            whole = command or [*self.own, "--arm", name, "--record", str(record)]
            code = subprocess.run(whole, stdout=file, stderr=file, env=os.environ | OFFLINE).returncode
        seconds = time.perf_counter() - began
        if code or not record.is_file():
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
            return {"error": "\n".join(tail) or f"ended with {code}", "process_seconds": seconds}
        written: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        return written | {"process_seconds": seconds}

    def record(self, name: str) -> Path:
        return self.folder / f"record-{name}.json"


def measured_before(path: Path | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """The results of an earlier call with the same settings on the same device."""
    if path is None or not path.is_file():
        return {}
    earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    same = all(earlier.get(name) == value for name, value in about.items())
    return dict(earlier["arms"]) if same else {}


def head(plan: Plan, arguments: argparse.Namespace, prepared: Mapping[str, Any]) -> dict[str, Any]:
    """The report before anything is measured in this call."""
    if "error" in prepared:
        raise OnPTQError(f"the model or its prompts could not be written:\n{prepared['error']}")
    environment = prepared["environment"]
    about = {"model": arguments.model, "tiny": arguments.tiny, "layers": plan.layers, "scheme": str(plan.scheme)}
    about |= {"changes": arguments.changes, "media_tokens": plan.media_tokens, "singly": arguments.singly}
    about |= {"device": environment["device"]}
    measured = {"arms": measured_before(arguments.out, about), "ratios": {}}
    return about | environment | {"prepared": prepared["seconds"]} | measured


def measure(plan: Plan, arguments: argparse.Namespace, processes: Processes, console: Console) -> dict[str, Any]:
    def print_line(text: str) -> None:
        if not arguments.quiet:
            print(text, file=sys.stderr, flush=True)

    report = head(plan, arguments, processes.start("prepare"))
    print_line(f"prepared: {report['prepared']}")
    for setting, tool in itertools.product(arguments.settings, TOOLS):
        arms, name = report["arms"].setdefault(setting, {}), f"{tool}-{setting}"
        if "seconds" not in arms.get(tool, {}):
            theirs = tool == "autoround"
            command = autoround_command(plan, arguments, setting, processes.record(name)) if theirs else None
            arms[tool] = counted(processes.start(name, command))
            print_line(f"{name}: {arms[tool].get('error') or format(arms[tool]['seconds'], '.2f') + ' s'}")
        report["ratios"][setting] = ratios(arms)
        save(arguments.out, report)
    show(console, report)
    return report


def run_arm(plan: Plan, arguments: argparse.Namespace) -> None:
    """The part of a process that this script started with --arm."""
    name = arguments.arm
    record = prepare(plan, arguments) if name == "prepare" else run_onptq(plan, arguments, name.removeprefix("onptq-"))
    save(arguments.record, record)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    models = [name for name, shape in PUBLISHED.items() if shape.family in FAMILIES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models[0], choices=models)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--scheme", default="W4A16", help="W4A16, W8A8, -gN with A16")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="FIELD=VALUE", help="of the presets"
    )
    parser.add_argument("--layers", type=int, help="decoder blocks, instead of all of them")
    parser.add_argument("--media-tokens", type=int, help="tokens of a prompt's image, about; default 400")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--autoround-python", default=sys.executable, help="the Python that has AutoRound")
    parser.add_argument("--singly", action="store_true", help="AutoRound: accumulate single samples, without padding")
    parser.add_argument("--no-save", action="store_true", help="AutoRound: end with the weights in memory")
    parser.add_argument("--folder", type=Path, help="folder of the model, which stays for the next call")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every number to FILE, logs beside it")
    parser.add_argument("--tiny", action="store_true", help="a model of the family that a CPU runs in seconds")
    parser.add_argument("--quiet", action="store_true", help="print the table only")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(argv: Sequence[str], folder: Path) -> int:
    arguments = parse(argv)
    folder = arguments.folder or folder
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(arguments, folder.absolute())
    if arguments.arm:
        run_arm(plan, arguments)
        return 0
    logs = arguments.out.absolute().with_suffix("") if arguments.out else plan.folder / "peers"
    logs.parent.mkdir(parents=True, exist_ok=True)
    own = [sys.executable, str(Path(__file__).absolute()), *argv, "--folder", str(plan.folder)]
    console = Console(width=110 if not sys.stdout.isatty() else None, highlight=False)
    report = measure(plan, arguments, Processes(plan.folder, logs, own), console)
    return int(any("error" in record for arms in report["arms"].values() for record in arms.values()))


def main(argv: Sequence[str] | None = None) -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="onptq-peers-") as scratch:
            return run(list(sys.argv[1:] if argv is None else argv), Path(scratch))
    except OnPTQError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
