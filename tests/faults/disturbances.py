"""The faults. Each gives None where the run survived it, or how it did not."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from forked import REFUSED, Attempt, Job
from outcomes import Reference, copy, delete, files

from onptq.run import remove

REFUSALS = 12  # after which a run that is refused again and again has no remedy
IDENTITY = {"run/recipe.yaml"}  # a run without it is no run: refused, and nothing brings it back
DAMAGES = ("a flipped bit", "a torn end", "a zeroed block", "emptied")
SIGNALS = {signal.SIGKILL: "SIGKILL", signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT", signal.SIGHUP: "SIGHUP"}


@dataclass
class Trial:
    """One run that is disturbed."""

    job: Job
    reference: Reference
    out: Path
    rng: random.Random
    kills: dict[str, int] = field(default_factory=dict)  # by phase
    refused: int = 0

    def interrupt(self, phase: str, seconds: float, number: int = signal.SIGKILL) -> str | None:
        """An attempt, ended by a signal at a random moment of a phase."""
        attempt = self.job.begin(self.out)
        if attempt.wait_for(phase):
            time.sleep(self.rng.uniform(0, seconds))
            if attempt.end_by(number):
                where = attempt.phases[-1][0]
                self.kills[where] = self.kills.get(where, 0) + 1
                return self.reference.false_checkpoint(self.out)
        return _trouble(attempt if attempt.status is not None else _waited(attempt))

    def finish(self, changed: Callable[[], None] = lambda: None) -> str | None:
        """The run to its end, which must be that of an undisturbed one."""
        return _trouble(self.job.finish(self.out, changed)) or self.reference.difference(self.out)

    def later_phases(self, count: int) -> Sequence[tuple[str, float]]:
        """Some phases of the run in their order."""
        chosen = sorted(self.rng.sample(range(len(self.reference.phases)), count))
        return [self.reference.phases[index] for index in chosen]


def signals(trial: Trial, number: int = signal.SIGKILL, times: int = 3) -> str | None:
    """Ended several times at random moments of random phases, each time begun again."""
    for phase, seconds in trial.later_phases(times):
        if trouble := trial.interrupt(phase, seconds, number):
            return trouble
    return trial.finish()


def damage(trial: Trial, snapshot: Path, name: str, how: str) -> str | None:
    """One file damaged while no process has the run. What an error says to delete is deleted."""
    copy(snapshot, trial.out)
    spoil(files(trial.out)[name], how, trial.rng)
    for _ in range(REFUSALS):
        attempt = trial.job.finish(trial.out)
        if attempt.status != REFUSED:
            return _trouble(attempt) or trial.reference.difference(trial.out)
        trial.refused += 1
        if (name in IDENTITY and "recipe.yaml" in attempt.message) or "another --out" in attempt.message:
            return None
        remedy = re.search(r"delete (.+?), and the same command", attempt.message)
        if remedy is None:
            return f"an error without a remedy: {attempt.message[-300:]}"
        remove(Path(remedy[1]))
    return f"refused {REFUSALS} times"


def spoil(path: Path, how: str, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    size = len(content)
    if how == "emptied":
        content = bytearray()
    elif how == "a torn end":
        del content[rng.randrange(max(1, size)) :]
    elif size:
        place = rng.randrange(size)
        if how == "a flipped bit":
            content[place] ^= 1 << rng.randrange(8)
        else:
            end = min(size, place + 64)
            content[place:end] = bytes(end - place)
    path.write_bytes(content)


def together(trial: Trial, processes: int = 2) -> str | None:
    """Several processes at once on one folder: one goes on, and the others are refused."""
    attempts = [trial.job.begin(trial.out) for _ in range(processes)]
    statuses = [attempt.wait() for attempt in attempts]
    for attempt in attempts:
        if attempt.status == REFUSED and "in use" in attempt.message:
            trial.refused += 1
        elif trouble := _trouble(attempt):
            return trouble
    return trial.reference.difference(trial.out) if 0 in statuses else "no process went on"


def clock(trial: Trial) -> str | None:
    """The wall clock jumps by decades, forwards and backwards, and so do the times of files."""

    def jump() -> None:
        import onptq.run

        rng = random.Random(trial.rng.random())
        real, now = time.time, datetime.now

        class Jumping(datetime):
            @classmethod
            def now(cls, tz=None):  # type: ignore[no-untyped-def, override]
                return now(tz) + timedelta(days=rng.randint(-20000, 20000))

        onptq.run.datetime = Jumping  # type: ignore[misc]
        time.time = lambda: real() + rng.randint(-(10**9), 10**9)
        for path in files(trial.out).values():
            os.utime(path, (moment := rng.choice([0, 4_733_510_400]), moment))

    phase, seconds = trial.later_phases(1)[0]
    attempt = trial.job.begin(trial.out, jump)
    if attempt.wait_for(phase):
        time.sleep(trial.rng.uniform(0, seconds))
        attempt.end_by(signal.SIGKILL)
    return trial.finish(jump)


def deleted(trial: Trial) -> str | None:
    """The run's folder is deleted under the process."""
    phase, seconds = trial.later_phases(1)[0]
    attempt = trial.job.begin(trial.out)
    if attempt.wait_for(phase):
        time.sleep(trial.rng.uniform(0, seconds))
        delete(trial.out)
    if attempt.wait() == REFUSED:
        trial.refused += 1
    elif trouble := _trouble(attempt):
        return trouble
    again = trial.job.finish(trial.out)
    if again.status == REFUSED and "choose another --out" in again.message:  # half of a checkpoint, without its run
        delete(trial.out)
    return trial.finish()


def full_disk(trial: Trial, disk: Path) -> str | None:
    """The disk is full at a random size; once there is room, the same command ends the run."""
    needed = sum(map(len, trial.reference.contents.values()))
    _remount(disk, f"size={trial.rng.randint(needed // 20, 2 * needed)}")
    attempt = trial.job.finish(trial.out)
    if attempt.status == REFUSED:
        trial.refused += 1
        if not any(word in attempt.message for word in ("No space left", "not enough room")):
            return attempt.message
    elif trouble := _trouble(attempt):
        return trouble
    if trouble := trial.reference.false_checkpoint(trial.out):
        return trouble
    _remount(disk, "size=1g")
    return trial.finish()


def read_only(trial: Trial, disk: Path) -> str | None:
    """The destination cannot be written; once it can, the same command ends the run."""
    phase, seconds = trial.later_phases(1)[0]
    trial.interrupt(phase, seconds)
    _remount(disk, "ro")
    try:
        attempt = trial.job.finish(trial.out)
    finally:
        _remount(disk, "rw")
    if attempt.status == REFUSED and ("Read-only" in attempt.message or "cannot use" in attempt.message):
        trial.refused += 1
        return trial.finish()
    return f"status {attempt.status} on a read-only disk: {attempt.message[-300:]}"


def mount(folder: Path) -> bool:
    """Whether a small file system could be mounted there."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(folder)]
    worked = os.geteuid() == 0 and shutil.which("mount") is not None
    return worked and subprocess.run(command, capture_output=True).returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", str(folder)], check=True)


def _remount(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


def _waited(attempt: Attempt) -> Attempt:
    attempt.wait()
    return attempt


def _trouble(attempt: Attempt) -> str | None:
    return None if attempt.status == 0 else f"exit status {attempt.status}: {attempt.message[-600:]}"
