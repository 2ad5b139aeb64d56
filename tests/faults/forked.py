"""A small quantization in a forked process: started, watched phase by phase, ended by a signal or left to end itself."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onptq.progress import Bar, QuietReporter

REFUSED, CRASHED = 2, 70
LONGEST = 300.0  # seconds an attempt may take
RECIPE: dict[str, Any] = {
    "rounds": 2,
    "data.prompts": 4,
    "data.holdout": 2,
    "follow.max_tokens": 8,
    "calibrate.epochs": 2,
    "calibrate.batch": 2,
    "calibrate.micro_batch": 2,
    "calibrate.gamma": 0.2,
    "calibrate.lr_smoothing": 0.02,
    "calibrate.lr_step": 0.02,
    "select.budget": 256,
    "compute.batch_tokens": 200,
    "compute.device": "cpu",
}
RECIPES: dict[str, dict[str, Any]] = {
    "free codes, blocks stored": {"init": "mbq", "calibrate.codes": "free"},
    "settled codes": {"init_steps": 4},
    "learned codes, no refresh": {"init_steps": 4, "calibrate.codes": "learned", "refresh": False},
}


@dataclass(frozen=True)
class Job:
    """What every attempt at one run is given."""

    name: str
    model: Path
    recipe: Mapping[str, Any]

    def begin(self, out: Path, changed: Callable[[], None] = lambda: None) -> Attempt:
        """Fork a process that quantizes into `out`; `changed` is called in it first."""
        phases_pipe, phases_end = os.pipe()
        output_pipe, output_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(phases_pipe)
            os.close(output_pipe)
            os.dup2(output_end, 1)
            os.dup2(output_end, 2)
            os._exit(_run(self, out, _Piped(phases_end), changed))
        os.close(phases_end)
        os.close(output_end)
        return Attempt(child, phases_pipe, output_pipe)

    def finish(self, out: Path, changed: Callable[[], None] = lambda: None) -> Attempt:
        """An attempt that has ended by itself."""
        attempt = self.begin(out, changed)
        attempt.wait()
        return attempt


@dataclass
class Attempt:
    """A process that works on a run, or that did."""

    pid: int
    phases_pipe: int  # where it phases_end its phases
    output_pipe: int  # its output
    begun: float = field(default_factory=time.monotonic)
    phases: list[tuple[str, float]] = field(default_factory=list)  # and when they began, in seconds
    status: int | None = None  # exit code, or minus a signal
    message: str = ""

    def wait_for(self, phase: str) -> bool:
        """Whether the phase has begun; False once the process has ended without it."""
        while all(name != phase for name, _ in self.phases):
            if not self._listen():
                return False
        return True

    def end_by(self, number: int) -> bool:
        """Send a signal and wait for the end. Return whether the signal came in time."""
        os.kill(self.pid, number)
        self.wait()
        return self.status != 0

    def wait(self) -> int:
        while self._listen():
            pass
        output = b""
        while part := os.read(self.output_pipe, 1 << 16):
            output += part
        self.message = output.decode(errors="replace").strip()
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.phases_pipe)
        os.close(self.output_pipe)
        return self.status

    def _listen(self) -> bool:
        """Read the names of phases that have begun; False at the end of the process."""
        ready = select.select([self.phases_pipe], [], [], max(0.0, self.begun + LONGEST - time.monotonic()))[0]
        if not ready:
            os.kill(self.pid, signal.SIGKILL)
            raise TimeoutError(f"an attempt took more than {LONGEST:g} s; its last phase: {self.phases[-1:]}")
        text = os.read(self.phases_pipe, 1 << 16).decode()
        self.phases += [(name, time.monotonic() - self.begun) for name in text.split("\n") if name]
        return bool(text)


class _Piped(QuietReporter):
    """Writes the name of every phase that begins to a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        os.write(self.pipe, f"{name}\n".encode())
        with super().phase(name) as bar:
            yield bar


def _run(job: Job, out: Path, reporter: QuietReporter, changed: Callable[[], None]) -> int:
    import torch

    import onptq
    from onptq.cycle import rounds
    from onptq.errors import OnPTQError
    from onptq.recipe import Recipe

    torch.set_num_threads(1)  # makes torch replace the pool it lost in the fork
    rounds.SAVE_SECONDS = 0.0
    try:
        changed()
        recipe = Recipe.preset("risk", RECIPE | dict(job.recipe))
        onptq.quantize(job.model, out, calibration=job.model / "prompts.jsonl", recipe=recipe, reporter=reporter)
    except OnPTQError as error:
        print(f"error: {error}", flush=True)
        return REFUSED
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        return CRASHED
    return 0


def prepare(model: Path) -> None:
    """Import in this process all that its forks use."""
    import gc

    import torch

    import onptq.pipeline
    from onptq.checkpoint.load import load_policy
    from onptq.checkpoint.source import find_source
    from onptq.data.manifest import load_manifest
    from onptq.models.encoding import encode
    from onptq.models.processing import PromptProcessor

    torch.set_num_threads(1)  # a fork has only the thread that forked
    source = find_source(model)
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    encode(load_policy(source, "W4A8", device="cpu"), [processor(load_manifest(model / "prompts.jsonl")[0])])
    onptq.pipeline.quantize  # noqa: B018
    gc.freeze()  # a collection in a fork would copy every page
