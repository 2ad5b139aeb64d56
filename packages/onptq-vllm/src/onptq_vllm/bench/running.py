"""Every checkpoint in every mode, each in a process of its own: what one leaves in memory is no part of the next. They start one
by one or together; measured is always one alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from onptq import __version__
from onptq.errors import OnPTQError
from onptq.progress import Reporter
from onptq_vllm.bench.paper import is_papers_model
from onptq_vllm.bench.tables import problem
from onptq_vllm.bench.timing import Job, heard, is_ready
from onptq_vllm.bench.transformers_engine import BACKENDS
from onptq_vllm.bench.variants import Variant

Engine = Literal["vllm", "transformers"]
Mode = Literal["eager", "compiled"]
TAIL = 15  # lines of an engine's log
POLL = 0.1  # seconds
ABSENT = "No module named 'vllm'"


@dataclass(frozen=True)
class Settings:
    """What all checkpoints have in common."""

    engine: Engine
    modes: tuple[Mode, ...] = ("eager",)
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 2048
    new_tokens: int = 64
    repeats: int = 16
    dtype: str | None = None  # None: as each checkpoint states it
    linear_backend: str | None = None  # None: what the scheme needs
    graph_sizes: tuple[int, ...] = ()  # none: the forwards that are measured
    cache_gib: float = 4.0
    options: Mapping[str, Any] = field(default_factory=dict)  # further ones of vLLM
    timeout: float = 600.0  # seconds for one checkpoint in one mode
    together: bool = False  # whether all of a mode start at once
    python: str = field(default_factory=lambda: sys.executable)  # that has vLLM

    def __post_init__(self) -> None:
        for name, valid in (("engine", get_args(Engine)), ("modes", get_args(Mode))):
            given = getattr(self, name)
            for value in (given,) if isinstance(given, str) else given:
                if value not in valid:
                    raise OnPTQError(f"{name}: {value!r} is not known; expected {' or '.join(valid)}")
        if self.engine == "transformers" and self.modes != ("eager",):
            raise OnPTQError("transformers is measured as it generates by default; expected --mode eager alone")
        if self.engine == "transformers" and self.linear_backend not in (None, *BACKENDS):
            known = ", ".join(BACKENDS)
            raise OnPTQError(f"linear backend {self.linear_backend!r} is not known to transformers; expected {known}")
        if self.engine == "transformers" and self.options:
            raise OnPTQError(f"--set {', '.join(self.options)}: these are options of vLLM; expected --engine vllm")

    def job(self, variant: Variant, mode: Mode) -> Job:
        sizes = self.graph_sizes or tuple(sorted({*self.batches, *(one * self.prompt_tokens for one in self.batches)}))
        needed = variant.linear_backend if self.engine == "vllm" else None
        backend = variant.asked or (self.linear_backend if variant.scheme is not None else None) or needed
        return Job(
            folder=str(variant.source.folder.resolve()),
            mode=mode,
            dtype=self.dtype or variant.dtype,
            batches=self.batches,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            repeats=self.repeats,
            vocabulary=variant.vocabulary,
            linear_backend=backend,
            graph_sizes=sizes,
            cache_gib=self.cache_gib,
            options=self.options,
        )


def run_bench(
    model: str,
    variants: Sequence[Variant],
    settings: Settings,
    reporter: Reporter,
    logs: Path,
    save: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """All measurements, given to `save` as they come; one that failed has an `error` instead, and its log is under `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    papers_model = all(is_papers_model(variant.source.config) for variant in variants)
    with reporter.phase("Measure", total=len(variants) * len(settings.modes), unit="checkpoints") as bar:
        for mode in settings.modes:
            for started in _in_turn(variants, mode, settings, logs):
                found, variant = started.measured(), started.variant
                results.append({"name": variant.name, "mode": mode, "folder": variant.source.folder.name} | found)
                save(_report(model, settings, results, papers_model))
                if trouble := problem(found):
                    reporter.warn(f"{variant.name} ({mode}): {trouble}")
                bar.advance()
    return _report(model, settings, results, papers_model)


def _in_turn(variants: Sequence[Variant], mode: Mode, settings: Settings, logs: Path) -> Iterator[Started]:
    """Engines that may be measured now; nothing else runs meanwhile, and none outlives the caller."""
    for group in [variants] if settings.together else [[variant] for variant in variants]:
        running: list[Started] = []
        try:
            for variant in group:
                running.append(_start(variant, mode, settings, logs))
            for started in running:
                started.wait_until_ready()
            yield from running
        finally:
            for started in running:
                started.end()


def _report(model: str, settings: Settings, results: Sequence[Mapping[str, Any]], papers_model: bool) -> dict[str, Any]:
    whole = [one for one in results if "error" not in one]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "settings": {name: value for name, value in asdict(settings).items() if name != "python"},
        "device": whole[0]["device"] if whole else None,
        "papers_model": papers_model,
        "versions": {"onptq": __version__} | (whole[0]["versions"] if whole else {}),
        "results": list(results),
    }


@dataclass
class Started:
    """An engine on its way to be measured."""

    variant: Variant
    job: Job
    process: subprocess.Popen[str]
    python: str
    log: Path
    ends: float  # when its time is over
    late: bool = False
    ready_at: float = 0.0

    def wait_until_ready(self) -> None:
        while self.process.poll() is None and not is_ready(self.output()) and not self._over():
            time.sleep(POLL)
        self.ready_at = time.monotonic()

    def measured(self) -> dict[str, Any]:
        """Lets it measure, and waits for what it found. While others were measured, its clock stood still."""
        self.ends += time.monotonic() - self.ready_at
        assert self.process.stdin is not None
        with suppress(OSError):  # it may have died
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        while self.process.poll() is None and not self._over():
            time.sleep(POLL)
        output = self.output()
        asked = {"dtype": self.job.dtype, "linear_backend": self.job.linear_backend}
        found = heard(output)
        if found is not None:
            return asked | found
        if ABSENT in output:
            raise OnPTQError(
                f"{self.python} has no vLLM, which this engine needs: install vllm there, or name the interpreter that has it "
                "with --python"
            )
        ended = "stopped: its time was over" if self.late else f"exit code {self.process.returncode}"
        lines = [line for line in output.splitlines() if line.strip()]
        return asked | {"error": f"{ended}; the log ends: " + " | ".join(lines[-TAIL:])}

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        with suppress(OSError):  # it may have died with the line unread
            self.process.stdin.close()

    def _over(self) -> bool:
        if time.monotonic() < self.ends:
            return False
        self.late = True
        self.kill()
        return True


def _start(variant: Variant, mode: Mode, settings: Settings, logs: Path) -> Started:
    job = replace(settings.job(variant, mode), waits=True)
    log = logs / f"{variant.name.replace(' ', '-')}-{mode}.log"
    with log.open("w", encoding="utf-8") as stream:
        try:
            process = subprocess.Popen(
                command(settings, job),
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=_environment(settings),
                text=True,
            )
        except OSError as error:
            raise OnPTQError(
                f"{settings.python} does not run: {error}; expected the interpreter that has vLLM"
            ) from error
    return Started(variant, job, process, settings.python, log, time.monotonic() + settings.timeout)


def command(settings: Settings, job: Job) -> list[str]:
    if settings.engine == "transformers":
        return [sys.executable, "-m", "onptq_vllm.bench.transformers_engine", job.text()]
    return [settings.python, str(Path(__file__).with_name("vllm_engine.py")), job.text()]


def _environment(settings: Settings) -> Mapping[str, str]:
    """Another interpreter has packages of its own, which ours must not cover."""
    own = settings.engine == "transformers" or settings.python == sys.executable
    return {name: value for name, value in os.environ.items() if own or name != "PYTHONPATH"}
