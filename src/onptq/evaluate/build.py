"""Theta and cost of a candidate: seconds, peak memory, bytes of the checkpoint."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from onptq import methods
from onptq.checkpoint.exportable import output_bytes
from onptq.cycle.rounds import Cycle
from onptq.data.manifest import manifest_digest
from onptq.evaluate.candidates import MethodCandidate, RunCandidate, folder_name
from onptq.evaluate.guard import keep_better
from onptq.evaluate.session import Session
from onptq.evaluate.shared import take_shared
from onptq.evaluate.store import COST, IDENTITY, THETA, path_of
from onptq.progress import LoggedReporter, NamedReporter
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import INIT, Run
from onptq.schemes import Scheme

# With the same theta^(0) these files of the first round are the same in every candidate, the former where Q itself is followed.
FOLLOWED = "rounds/0/trajectories.parquet"
HELD_OUT = tuple(f"rounds/0/{name}" for name in ("holdout_trajectories.parquet", "holdout.parquet"))


@dataclass(frozen=True)
class Cost:
    """Seconds and memory of a calibration that was done here, and the size of the checkpoint."""

    seconds: float | None = None
    peak_bytes: int | None = None
    checkpoint_bytes: int | None = None

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)


@dataclass
class Peak:
    """The most memory held while a block ran; None where the system does not say."""

    bytes: int | None = None


def build(candidates: Sequence[MethodCandidate | RunCandidate], session: Session) -> None:
    """Commit the theta and the cost of every candidate that has none yet."""
    run = session.run
    waiting = [one for one in candidates if not run.has(*path_of(one.name, COST))]
    for one in sorted(waiting, key=lambda one: (_in_rounds(one), str(one.scheme))):
        if isinstance(one, RunCandidate):
            theta, cost = Theta.load(one.theta), Cost()
        elif one.recipe.rounds:
            theta, cost = _by_rounds(one, session)
        else:
            theta, cost = _by_base_method(one.name, one.recipe, session)
        with run.writing(*path_of(one.name, THETA)) as path:
            theta.save(path)
        size = output_bytes(session.source, one.scheme)
        run.write_json(cost.to_dict() | {"checkpoint_bytes": size}, *path_of(one.name, COST))


def _in_rounds(one: MethodCandidate | RunCandidate) -> bool:
    return isinstance(one, MethodCandidate) and one.recipe.rounds > 0


def _by_base_method(name: str, recipe: Recipe, session: Session) -> tuple[Theta, Cost]:
    """theta^(0) of the recipe."""
    policy = session.policy(Scheme.parse(recipe.scheme))
    prompts = session.calibration_prompts(recipe)[0] if recipe.init != "rtn" else []
    with (
        session.reporter.phase(f"Build {name}", total=policy.blocks, unit="blocks") as bar,
        measured_peak(policy.device) as peak,
    ):
        began = time.monotonic()
        theta = methods.initialize(policy, prompts, recipe, bar.advance)
        seconds = time.monotonic() - began
    return theta, Cost(seconds, peak.bytes)


def _by_rounds(one: MethodCandidate, session: Session) -> tuple[Theta, Cost]:
    """Calibrate in the candidate's own part of the run, where a killed comparison goes on after its last finished step."""
    run, recipe = session.run.arm("/".join(path_of(one.name, "run"))), one.recipe
    init, init_seconds = _init(one, session)
    shared = first_rollouts(recipe)
    inputs = session.inputs(recipe, run)
    reporter = LoggedReporter(NamedReporter(session.plain_reporter, one.name), run.log)
    copy_missing(init, run, shared)
    take_shared(one, session.run, run)
    with measured_peak(session.device) as peak:
        cycle, read_init = Cycle(inputs, recipe, run, reporter), partial(Theta.load, init.file(THETA), session.device)
        theta = keep_better(cycle, cycle.rounds(read_init()), read_init)
    run.wait()
    copy_missing(run, init, shared)
    return theta, Cost(init_seconds + sum(run.seconds().values()), peak.bytes)


def _init(one: MethodCandidate, session: Session) -> tuple[Run, float]:
    """The folder of theta^(0), and the seconds it took: made once for all candidates with the same init and prompts."""
    run, recipe = session.run, one.recipe
    if one.init_run is not None:
        return _given_init(one, one.init_run, run), 0.0
    name, digest = f"{recipe.init}:{one.scheme}", manifest_digest(session.calibration[: recipe.data.prompts])
    same = path_of(name)  # the base method may be a candidate itself
    record = run.read_json(*same, IDENTITY) if run.has(*same, COST) else {}
    home = init_home(recipe, session)
    if not run.has(*home, COST):
        if (record.get("calibration"), record.get("init_steps")) == (digest, recipe.init_steps):
            cost = Cost(**run.read_json(*same, COST))
            with run.writing(*home, THETA) as path:
                shutil.copyfile(run.file(*same, THETA), path)
        else:
            theta, cost = _by_base_method(name, recipe, session)
            with run.writing(*home, THETA) as path:
                theta.save(path)
        run.write_json(cost.to_dict(), *home, COST)
    return run.arm("/".join(home)), run.read_json(*home, COST)["seconds"] or 0.0


def _given_init(one: MethodCandidate, home: Path, run: Run) -> Run:
    """theta^(0) and the first rollouts of another run, copied."""
    init = run.arm("/".join(("inits", folder_name(one.name))))
    for target, source in ((THETA, home / INIT), *((file, home / file) for file in first_rollouts(one.recipe))):
        if source.exists() and not init.has(target):
            with init.writing(target) as path:
                shutil.copyfile(source, path)
    return init


def first_rollouts(recipe: Recipe) -> tuple[str, ...]:
    return (FOLLOWED, *HELD_OUT) if recipe.follow.policy == "quantized" else HELD_OUT


def init_home(recipe: Recipe, session: Session) -> tuple[str, str]:
    """The folder of a recipe's theta^(0): one for every base method, scheme and set of prompts."""
    prompts = [*session.calibration[: recipe.data.prompts], *session.holdout[: recipe.data.holdout]]
    settings = f"{recipe.init_steps}-{recipe.follow.max_tokens}-{recipe.risk.near_miss_tol}"
    if recipe.follow.sampling != "greedy":
        settings += f"-{recipe.follow.responses}-{recipe.seed}"  # which decide the first rollouts that lie there, too
    name = folder_name(f"{recipe.init}:{recipe.scheme}")
    return "inits", f"{name}-{settings}-{manifest_digest(prompts)[:12]}"


def copy_missing(source: Run, target: Run, names: Sequence[str]) -> None:
    """Copy the files that only `source` has."""
    for name in names:
        if source.has(name) and not target.has(name):
            with target.writing(name) as path:
                shutil.copyfile(source.file(name), path)


def folder_bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


@contextmanager
def measured_peak(device: torch.device) -> Iterator[Peak]:
    """The peak of a with-block: on a GPU what tensors held, on a CPU what the process held."""
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    reset = False
    with suppress(OSError):  # Linux resets the high-water mark on this write
        Path("/proc/self/clear_refs").write_text("5")
        reset = True
    yield peak
    if reset:
        status = Path("/proc/self/status").read_text()
        peak.bytes = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
