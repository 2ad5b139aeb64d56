"""The fault campaign: `python tests/faults/campaign.py --kills 100`. Exit code 1 if a run did not survive."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import disturbances
import outcomes
from disturbances import DAMAGES, SIGNALS, Trial
from forked import RECIPES, Job, prepare
from outcomes import Reference

KILLS = 3  # of one run
SNAPSHOTS = (
    "Initialize",
    "Branch 1",
    "Calibrate 1",
    "Compare 2",
    "Calibrate 2",
    "Export",
    "Verify",
)  # where damage is done


@dataclass
class Campaign:
    """The trials so far: by fault, how many were tried, and what went wrong."""

    folder: Path
    rng: random.Random
    jobs: dict[str, Job]
    until: float = float("inf")  # of the monotonic clock, when no other trial begins
    references: dict[str, Reference] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # errors with a remedy that worked
    kills: Counter[str] = field(default_factory=Counter)  # by phase
    lost: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until

    def begin(self) -> None:
        """Run everything undisturbed first."""
        for name, job in self.jobs.items():
            out = self.folder / f"reference {len(self.references)}"
            started = time.monotonic()
            attempt = job.finish(out)
            if attempt.status != 0:
                raise SystemExit(f"the undisturbed run fails: {attempt.message}")
            self.references[name] = Reference.of(out, attempt.phases, time.monotonic() - started)

    def trial(self, fault: str, act: Callable[[Trial], str | None], job: str | None = None, count: int = 1) -> None:
        """Try one fault; the folder of a run that does not survive is kept."""
        if self.over:
            return
        name = job or self.rng.choice(sorted(self.jobs))
        out = self.folder / f"{fault.split(':')[0]} {self.tried.total()}" / "out"
        out.parent.mkdir(exist_ok=True)
        trial = Trial(self.jobs[name], self.references[name], out, random.Random(self.rng.random()))
        trouble = act(trial)
        kind = fault.split(":")[0]
        self.tried[kind] += max(count, sum(trial.kills.values())) if trial.kills else count
        self.refused[kind] += trial.refused
        self.kills.update(trial.kills)
        if trouble is None:
            outcomes.delete(out)
        else:
            self.lost.append(f"{fault} ({name}, {out}): {trouble}")
            print(f"LOST {self.lost[-1]}", flush=True)

    def print(self) -> None:
        print(f"{'fault':32} {'tried':>6} {'refused first':>14}")
        for fault, count in self.tried.items():
            print(f"{fault:32} {count:6} {self.refused[fault]:14}")
        print(f"signals by phase: {', '.join(f'{phase} {count}' for phase, count in sorted(self.kills.items()))}")
        print(f"{self.tried.total()} faults tried, {self.tried.total() - len(self.lost)} survived")


def snapshots(campaign: Campaign, wanted: int) -> Iterator[tuple[str, Path]]:
    """Runs of every recipe, killed in some phases and finished."""
    for number, (name, job) in enumerate(campaign.jobs.items()):
        reference = campaign.references[name]
        yield name, reference.out
        phases = [phase for phase, _ in reference.phases if phase.startswith(SNAPSHOTS)]
        for phase in campaign.rng.sample(phases, min(wanted, len(phases))):
            out = campaign.folder / f"snapshot {number}-{phase}"
            Trial(job, reference, out, campaign.rng).interrupt(phase, dict(reference.phases)[phase])
            if out.exists() or outcomes.home(out).exists():
                yield name, out


def damages(campaign: Campaign, count: int, wanted: int) -> None:
    """Damaged files of every kind; each file of each snapshot comes up before one comes up again."""
    if not count or campaign.over:
        return
    places = [(job, out, name) for job, out in snapshots(campaign, wanted) for name in outcomes.files(out)]
    campaign.rng.shuffle(places)
    places.sort(key=lambda place: sum(place[2] == other[2] for other in places))  # rare files first
    for number in range(count):
        job, out, name = places[number % len(places)]
        how = DAMAGES[number % len(DAMAGES)] if number < len(places) else campaign.rng.choice(DAMAGES)

        def act(trial: Trial, out: Path = out, name: str = name, how: str = how) -> str | None:
            return disturbances.damage(trial, out, name, how)

        campaign.trial(f"a damaged file: {how} of {name} in {out.name}", act, job)


def on_disk(campaign: Campaign, fault: str, act: Callable[[Trial, Path], str | None]) -> None:
    """A fault of a file system of its own; left out where none can be mounted."""
    disk = campaign.folder / "disk"
    if not disturbances.mount(disk):
        print(f"no small file system can be mounted here: no trial of {fault}", flush=True)
        disk.rmdir()
        return

    def on(trial: Trial) -> str | None:
        trial.out = disk / "out"
        return act(trial, disk)

    campaign.trial(fault, on)
    disturbances.unmount(disk)
    disk.rmdir()


def run(campaign: Campaign, kills: int, damaged: int, others: int, wanted: int) -> None:
    campaign.begin()
    while campaign.tried["SIGKILL"] < kills and not campaign.over:
        campaign.trial("SIGKILL", lambda trial: disturbances.signals(trial, times=KILLS), count=0)
    for number in list(SIGNALS)[1:]:
        for _ in range(others):
            campaign.trial(SIGNALS[number], lambda trial, n=number: disturbances.signals(trial, n, 1), count=0)  # type: ignore[misc]
    damages(campaign, damaged, wanted)
    for _ in range(others):
        campaign.trial("processes at once", lambda trial: disturbances.together(trial, trial.rng.randint(2, 3)))
        campaign.trial("a clock that jumps", disturbances.clock)
        campaign.trial("the folder deleted", disturbances.deleted)
        on_disk(campaign, "a full disk", disturbances.full_disk)
        on_disk(campaign, "a read-only disk", disturbances.read_only)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/faults/campaign.py", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs; a third as many damages and more of the rest")
    parser.add_argument("--damages", type=int, help="damaged files; by default twice as many as kills")
    parser.add_argument("--others", type=int, help="trials of every other fault; by default a tenth of the kills")
    parser.add_argument("--recipes", type=int, default=len(RECIPES), help="how many of the recipes")
    parser.add_argument("--snapshots", type=int, default=4, help="interrupted runs of a recipe whose files are damaged")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no other trial begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    from onptq.zoo.random import write_random

    folder = given.folder or Path(tempfile.mkdtemp(prefix="onptq-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = write_random(
        "qwen2.5-vl", folder / "model", prompts=6, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512, image_size=56
    )
    prepare(model)
    jobs = {name: Job(name, model, recipe) for name, recipe in list(RECIPES.items())[: given.recipes]}
    campaign = Campaign(folder, random.Random(given.seed), jobs, time.monotonic() + given.seconds)
    damaged = 2 * given.kills if given.damages is None else given.damages
    others = max(1, given.kills // 10) if given.others is None else given.others
    run(campaign, given.kills, damaged, others, given.snapshots)
    campaign.print()
    return 1 if campaign.lost else 0


if __name__ == "__main__":
    sys.exit(main())
