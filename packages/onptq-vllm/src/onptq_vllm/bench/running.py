"""Run every checkpoint in every mode, each in a process of its own, so that no memory is shared.

Engines start one by one or together. They are always measured one at a time."""

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
from onptq_vllm.bench.timing import Job, is_ready, parse_result
from onptq_vllm.bench.transformers_engine import BACKENDS
from onptq_vllm.bench.variants import Variant

Engine = Literal["vllm", "transformers"]
Mode = Literal["eager", "compiled"]
TAIL = 15  # lines of an engine's log
POLL = 0.1  # seconds
ABSENT = "No module named 'vllm'"


@dataclass(frozen=True)
class Settings:
    """Settings that all checkpoints share."""

    engine: Engine
    modes: tuple[Mode, ...] = ("eager",)
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 2048
    new_tokens: int = 64
    repeats: int = 16
    dtype: str | None = None  # None: that of each checkpoint's config.json
    linear_backend: str | None = None  # None: the one that the scheme needs
    graph_sizes: tuple[int, ...] = ()  # empty: the sizes of the measured forwards
    cache_gib: float = 4.0
    options: Mapping[str, Any] = field(default_factory=dict)  # further options of vLLM
    timeout: float = 600.0  # seconds for one checkpoint in one mode
    together: bool = False  # whether all of a mode start at once
    python: str = field(default_factory=lambda: sys.executable)  # that has vLLM

    def __post_init__(self) -> None:
        for name, valid in (("engine", get_args(Engine)), ("modes", get_args(Mode))):
            given = getattr(self, name)
            for value in (given,) if isinstance(given, str) else given:
                if value not in valid:
                    raise OnPTQError(f"{name}: unknown value {value!r}; expected {' or '.join(valid)}")
        if self.engine == "transformers" and self.modes != ("eager",):
            raise OnPTQError("--engine transformers runs in eager mode only; expected --mode eager alone")
        if self.engine == "transformers" and self.linear_backend not in (None, *BACKENDS):
            valid_names = ", ".join(BACKENDS)
            raise OnPTQError(
                f"unknown linear backend {self.linear_backend!r} of --engine transformers: expected one of {valid_names}"
            )
        if self.engine == "transformers" and self.options:
            raise OnPTQError(f"--set {', '.join(self.options)}: these are options of vLLM; expected --engine vllm")

    def job(self, variant: Variant, mode: Mode) -> Job:
        sizes = self.graph_sizes or tuple(sorted({*self.batches, *(one * self.prompt_tokens for one in self.batches)}))
        needed = variant.linear_backend if self.engine == "vllm" else None
        backend = variant.named_backend or (self.linear_backend if variant.scheme is not None else None) or needed
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
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """The report of all measurements, passed to `save` after each. A failed one has an `error`; logs are written to
    `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    papers_model = all(is_papers_model(variant.source.config) for variant in variants)
    with reporter.phase("Measure", total=len(variants) * len(settings.modes), unit="checkpoints") as bar:
        for mode in settings.modes:
            for started in _in_turn(variants, mode, settings, logs):
                measurement, variant = started.measure(), started.variant
                results.append({"name": variant.name, "mode": mode, "folder": variant.source.folder.name} | measurement)
                save(_report(model, settings, results, papers_model))
                if trouble := problem(measurement):
                    reporter.warn(f"{variant.name} ({mode}): {trouble}")
                bar.advance()
    return _report(model, settings, results, papers_model)


def _in_turn(variants: Sequence[Variant], mode: Mode, settings: Settings, logs: Path) -> Iterator[Started]:
    """Engines that are ready, one at a time. All are ended with the iterator."""
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
    measured = [one for one in results if "error" not in one]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "settings": {name: value for name, value in asdict(settings).items() if name != "python"},
        "device": measured[0]["device"] if measured else None,
        "papers_model": papers_model,
        "versions": {"onptq": __version__} | (measured[0]["versions"] if measured else {}),
        "results": list(results),
    }


@dataclass
class Started:
    """An engine in its process."""

    variant: Variant
    job: Job
    process: subprocess.Popen[str]
    python: str
    log: Path
    ends: float  # time limit, by time.monotonic()
    late: bool = False
    ready_at: float = 0.0

    def wait_until_ready(self) -> None:
        while self.process.poll() is None and not is_ready(self.output()) and not self._over():
            time.sleep(POLL)
        self.ready_at = time.monotonic()

    def measure(self) -> dict[str, Any]:
        """Let it measure, and wait for the result. Time in which others were measured does not count."""
        self.ends += time.monotonic() - self.ready_at
        assert self.process.stdin is not None
        with suppress(OSError):  # the process may have ended
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        while self.process.poll() is None and not self._over():
            time.sleep(POLL)
        output = self.output()
        settings = {"dtype": self.job.dtype, "linear_backend": self.job.linear_backend}
        result = parse_result(output)
        if result is not None:
            return settings | result
        if ABSENT in output:
            raise OnPTQError(
                f"{self.python} has no vLLM: install vllm there, or name an interpreter that has it with --python"
            )
        ended = "stopped at the time limit" if self.late else f"exit code {self.process.returncode}"
        lines = [line for line in output.splitlines() if line.strip()]
        return settings | {"error": f"{ended}; the log ends: " + " | ".join(lines[-TAIL:])}

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        with suppress(OSError):  # the process may have ended with the line unread
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
            process = subprocess.Popen(  # noqa: S603  (no shell: the words of a list)
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
    """The environment of an engine. Another interpreter has packages of its own, so PYTHONPATH is left out."""
    own = settings.engine == "transformers" or settings.python == sys.executable
    return {name: value for name, value in os.environ.items() if own or name != "PYTHONPATH"}
