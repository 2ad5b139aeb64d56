"""Quantize a model with other tools on OnPTQ's calibration prompts, and score their checkpoints beside its own.

    python benchmarks/peers/run.py --model zoo:qwen2.5-vl --scheme W4A16 --out peers

Each tool gets an environment of its own, since their requirements exclude each other. It writes a compressed-tensors
checkpoint to OUT/SCHEME/PEER, with its seconds and memory (PEER.json) and its log (PEER.log) beside it. The command
that scores them is printed; `--score` runs it. Killed at any moment, the same command continues: finished environments,
material and checkpoints are not made again.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onptq.checkpoint.catalogs import is_cataloged
from onptq.checkpoint.source import Source, find_source
from onptq.cli.drawing import calibration_prompts
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.progress import Reporter, RichReporter
from onptq.recipe import Recipe
from onptq.schemes import Scheme

HERE = Path(__file__).parent
OURS = ("rtn", "gptq", "awq", "search", "search+signround", "static", "onptq")
READY = "ready.json"  # in an environment: its requirements, written when all are installed
FAMILIES = ("qwen2.5-vl",)  # whose module names the scripts know


@dataclass(frozen=True)
class Peer:
    """A tool and one way of using it."""

    tool: str  # NAME of NAME.txt and quantize_NAME.py
    options: tuple[str, ...]
    label: str
    only: frozenset[str] | None = None  # schemes, groups apart, that the tool can write; None: any

    def named(self, peer: str) -> str:
        """The name in a comparison, unlike those of our methods."""
        return peer if peer.startswith(self.tool) else f"{self.tool}-{peer}"


AUTOROUND = frozenset({*(f"W{bits}A16" for bits in range(2, 9)), "W8A8", "NVFP4"})
NAMED = ("NVFP4", "NVFP4A16")  # schemes of floats that the tools know by the same names
PEERS = {
    "rtn": Peer("llmcompressor", ("--method", "rtn"), "llm-compressor, plain rounding"),
    "gptq": Peer("llmcompressor", ("--method", "gptq"), "llm-compressor, GPTQ"),
    "awq": Peer("llmcompressor", ("--method", "awq"), "llm-compressor, AWQ"),
    "smoothquant": Peer("llmcompressor", ("--method", "smoothquant"), "llm-compressor, SmoothQuant and GPTQ"),
    "autoround-modifier": Peer("llmcompressor", ("--method", "autoround"), "llm-compressor, AutoRound, 200 iterations"),
    "autoround-modifier-best": Peer(
        "llmcompressor", ("--method", "autoround-best"), "llm-compressor, AutoRound, 1,000 iterations"
    ),
    "autoround": Peer("autoround", ("--recipe", "default"), "AutoRound, 200 iterations", AUTOROUND),
    "autoround-best": Peer("autoround", ("--recipe", "best"), "AutoRound, 1,000 iterations", AUTOROUND),
}


@dataclass(frozen=True)
class Plan:
    """The settings of one call."""

    model: str
    scheme: Scheme
    peers: tuple[str, ...]
    out: Path
    environments: Path

    @property
    def dense(self) -> Path:
        return self.out / "dense"

    @property
    def material(self) -> Path:
        return self.out / "material"

    def checkpoint(self, peer: str) -> Path:
        return self.out / str(self.scheme) / peer

    def environment(self, peer: str) -> Path:
        return self.environments / PEERS[peer].tool

    def quantize_command(self, peer: str) -> list[str]:
        tool = PEERS[peer]
        command = [
            str(self.environment(peer) / "bin" / "python"),
            str(HERE / f"quantize_{tool.tool}.py"),
            *tool.options,
        ]
        if str(self.scheme) in NAMED:
            command += ["--named", str(self.scheme)]
        else:
            command += ["--bits", str(self.scheme.weight_bits), "--activation-bits", str(self.scheme.activation_bits)]
            command += ["--group-size", str(self.scheme.group_size)] if self.scheme.group_size else []
        folders = {"model": self.dense, "material": self.material, "out": self.checkpoint(peer)}
        return [*command, *(part for name, folder in folders.items() for part in (f"--{name}", str(folder)))]

    def score_command(self, preset: str, items: int, prompts: int) -> list[str]:
        """`onptq compare` of our methods on the same calibration prompts and of every peer's checkpoint."""
        ours = [f"{method}:{self.scheme}@{preset}" for method in OURS]
        if preset == "default":
            ours.append(f"onptq:{self.scheme}@best")
        theirs = [f"{PEERS[peer].named(peer)}={self.checkpoint(peer)}" for peer in self.peers]
        out = self.out / str(self.scheme) / "compared"
        counts = ["--items", str(items), "--prompts", str(prompts)]
        return ["onptq", "compare", self.model, *ours, *theirs, *counts, "--out", str(out)]


def choose_peers(names: str | None, scheme: Scheme) -> tuple[str, ...]:
    """Those that were named, or all that can write the scheme."""
    able = [name for name, peer in PEERS.items() if peer.only is None or scheme.kind in peer.only]
    if names is None:
        return tuple(able)
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in PEERS:
            close = difflib.get_close_matches(name, PEERS, n=1, cutoff=0.6)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise OnPTQError(f"--peers: unknown peer {name!r}{hint}; expected of {', '.join(PEERS)}")
        if name not in able:
            raise OnPTQError(f"--peers: {name} cannot write {scheme}; of the peers {', '.join(able)} can")
    return chosen


def candidates_prompts(source: Source, manifest: Path | None, recipe: Recipe, reporter: Reporter) -> list[Prompt]:
    """The prompts that candidates of `onptq compare` with this recipe calibrate on."""
    family, cataloged = source.family.name, is_cataloged(source.name)
    return calibration_prompts(family, manifest, recipe.data, cataloged, reporter, seed=recipe.seed)[0]


def copy_model(source: Source, folder: Path) -> None:
    """Copy the dense checkpoint, config.json last."""
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.files, key=lambda path: path.name == "config.json"):
        shutil.copyfile(path, folder / path.name)


def make_environment(folder: Path, requirements: Path) -> None:
    """Make a virtual environment with these packages, unless it is there with the same requirements."""
    wanted = [line for line in requirements.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    ready = folder / READY
    if ready.is_file() and json.loads(ready.read_text(encoding="utf-8")) == wanted:
        return
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-r", str(requirements)]
    if subprocess.run(pip).returncode:
        raise OnPTQError(f"cannot install {requirements} into {folder}; pip says why above")
    ready.write_text(json.dumps(wanted), encoding="utf-8")


def quantize(plan: Plan, peer: str) -> None:
    out = plan.checkpoint(peer)
    log = out.with_name(f"{out.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            plan.quantize_command(peer), stdout=file, stderr=file, env=os.environ | offline
        ).returncode
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        raise OnPTQError(f"{PEERS[peer].label} failed on {plan.scheme} ({log}):\n" + "\n".join(tail))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    peers = "\n".join(f"  {name:24} {peer.label}" for name, peer in PEERS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\npeers:\n{peers}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="zoo:qwen2.5-vl", help="a folder, or a name of `onptq zoo list`")
    parser.add_argument("--scheme", default="W4A16", help="W4A16, W8A8, W4A8, any WbAb; -gN with A16; NVFP4, NVFP4A16")
    parser.add_argument("--peers", help="names with commas between them; default: all that can write the scheme")
    parser.add_argument("--out", type=Path, required=True, help="folder of material, checkpoints and scores")
    parser.add_argument(
        "--environments", type=Path, help="folder of the virtual environments; default: OUT/environments"
    )
    parser.add_argument("--calibration", type=Path, help="manifest of prompts; models of the zoo bring their own")
    parser.add_argument("--preset", default="default", help="preset with the number of prompts and the response length")
    parser.add_argument("--items", type=int, default=300, help="items per task to score with")
    parser.add_argument("--prompts", type=int, default=96, help="prompts to compare behaviour on")
    parser.add_argument("--score", action="store_true", help="run the command that scores the checkpoints")
    return parser.parse_args(arguments)


def make_plan(args: argparse.Namespace) -> Plan:
    scheme = Scheme.parse(args.scheme)
    if not scheme.symmetric:
        raise OnPTQError(f"--scheme {scheme}: the peers are run with symmetric weights; expected no -asym")
    if not scheme.of_integers and str(scheme) not in NAMED:
        raise OnPTQError(f"--scheme {scheme}: the peers are run with WbAb, -gN, {' and '.join(NAMED)}")
    environments = args.environments or args.out / "environments"
    return Plan(args.model, scheme, choose_peers(args.peers, scheme), args.out.absolute(), environments.absolute())


def run(args: argparse.Namespace) -> int:
    plan, reporter, recipe = make_plan(args), RichReporter(), Recipe.preset(args.preset)
    source = find_source(args.model)
    if source.family.name not in FAMILIES:
        raise OnPTQError(f"{args.model} is a {source.family.name} model; the peers are run on {', '.join(FAMILIES)}")
    from peer_inputs import write_material

    prompts = candidates_prompts(source, args.calibration, recipe, reporter)
    write_material(source, prompts, recipe.follow.max_tokens, plan.material, reporter)
    copy_model(source, plan.dense)
    waiting = [peer for peer in plan.peers if not plan.checkpoint(peer).is_dir()]
    with reporter.phase("Install", total=len(waiting), unit="environments") as bar:
        for peer in waiting:
            make_environment(plan.environment(peer), HERE / f"{PEERS[peer].tool}.txt")
            bar.advance()
    with reporter.phase(f"Quantize to {plan.scheme}", total=len(waiting), unit="checkpoints") as bar:
        for peer in waiting:
            quantize(plan, peer)
            bar.advance()
    command = plan.score_command(args.preset, args.items, args.prompts)
    print(shlex.join(command))
    return subprocess.run(command).returncode if args.score else 0


def main() -> None:
    try:
        code = run(parse_arguments())
    except OnPTQError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
