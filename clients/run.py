"""Does a real server compute what OnPTQ exports? Serve it with vLLM, ask, and hold the logprobs against transformers.

    python clients/run.py                 # all models and schemes
    python clients/run.py --quick         # one checkpoint of every kind

From nothing: makes vLLM's environment (CPU build), exports the checkpoints by plain rounding, serves each on loopback, and asks
over the OpenAI API about a picture, a sound (where the model hears) and in plain words. Every token of the answers is compared
with transformers. OUT gets results.json, server logs and the replies; the exit code is 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some CPUs announce AMX and then refuse bf16 products
os.environ.setdefault("OMP_NUM_THREADS", "1")

from cases import Case, choose_cases
from environment import make_environment, python_of, versions
from questions import Question, ask, questions, read
from reference import Compared, Reference
from server import Server, ServerError, free_port, kernels, serve_command, tail

import onptq
from onptq.checkpoint.load import open_checkpoint
from onptq.checkpoint.source import Source
from onptq.errors import OnPTQError
from onptq.files import cache_folder
from onptq.recipe import Recipe


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    model: str
    scheme: str
    dtype: str
    limit: float
    kernels: list[str]
    questions: list[Compared]
    seconds: float  # from the server's start to its end
    started_in: float
    error: str | None = None

    @property
    def difference(self) -> float:
        return max((one.difference for one in self.questions), default=float("inf"))

    @property
    def fault(self) -> str | None:
        if self.error is not None:
            return self.error
        for one in self.questions:
            if not one.difference <= self.limit:
                return (
                    f"{one.kind}: a logprob differs by {one.difference:.3f} from transformers', more than {self.limit}"
                )
            if one.blind is not None and one.blind <= self.limit:
                return f"{one.kind}: a blank one would differ by {one.blind:.3f} only; nothing shows that it was used"
        return None


@dataclass(frozen=True)
class Suite:
    python: Path
    out: Path
    patience: float

    def folder(self, case: Case) -> Path:
        return self.out / case.label

    def export(self, case: Case) -> Source:
        """The checkpoint to serve. A dense model of the zoo is served from where it lies."""
        source = case.source(self.out / "models")
        if case.scheme is None:
            return source
        recipe = Recipe.preset("light", {"scheme": str(case.scheme), "method": "rtn"})
        checkpoint = self.folder(case) / "checkpoint"
        onptq.quantize(source.folder, checkpoint, recipe=recipe)
        return open_checkpoint(str(checkpoint))

    def hear(self, case: Case, source: Source, asked: Sequence[Question]) -> tuple[list[dict[str, Any]], float, float]:
        """The server's replies, and the seconds of its start and in all. No torch: this runs beside others."""
        media = {"image": 1, "video": 0} | ({"audio": 1} if "audio" in source.family.modalities else {})
        port, began = free_port(), time.monotonic()
        command = serve_command(self.python, source.folder, port, case.dtype, media)
        log = self.folder(case) / "server.log"
        with Server(command, port, log, case.environment, self.patience) as server:
            replies = [ask(server, question) for question in asked]
            started_in = server.started_in
        return replies, started_in, time.monotonic() - began

    def judge(self, case: Case, source: Source, asked: Sequence[Question], heard: Future[Any]) -> Result:
        compared, error, started_in, seconds = [], None, 0.0, 0.0
        log = self.folder(case) / "server.log"
        try:
            replies, started_in, seconds = heard.result()
            (self.folder(case) / "replies.json").write_text(json.dumps(replies), encoding="utf-8")
            reference = Reference(source.folder)
            compared = [reference.compare(one, read(reply)) for one, reply in zip(asked, replies, strict=True)]
        except ServerError as failure:
            error = str(failure)
        said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        return Result(
            case.model, case.scheme_name, case.dtype, case.limit, kernels(said), compared, seconds, started_in, error
        )

    def run(self, cases: Sequence[Case], servers: int) -> list[Result]:
        """Servers spend their start importing: two share two cores well, while the next checkpoint is being exported."""
        waiting: dict[Future[Any], tuple[Case, Source, list[Question]]] = {}
        results = {}
        with ThreadPoolExecutor(servers) as pool:
            try:
                for case in cases:
                    source = self.export(case)
                    asked = questions(source.family)
                    waiting[pool.submit(self.hear, case, source, asked)] = (case, source, asked)
                for heard in as_completed(waiting):
                    case = waiting[heard][0]
                    results[case] = result = self.judge(*waiting[heard], heard)
                    say(f"{case.label}: {'ok' if result.fault is None else 'FAILED'}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                Server.end_all()
                raise
        return [results[case] for case in cases]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("model", "scheme", "dtype", "kernel", "question", "answer"):
        table.add_column(name, overflow="fold")
    for name in ("difference", "limit", "same choice", "seconds", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for one in results:
        head = (one.model, one.scheme, one.dtype, ", ".join(one.kernels) or "-")
        verdict = "ok" if one.fault is None else "FAIL"
        if not one.questions:
            table.add_row(*head, "", "", "", str(one.limit), "", f"{one.seconds:.0f}", verdict)
        for number, asked in enumerate(one.questions):
            first = number == 0
            figures = (f"{asked.difference:.4f}", str(one.limit), f"{asked.agreement:.0%}")
            last = (f"{one.seconds:.0f}", verdict) if first else ("", "")
            table.add_row(*(head if first else ("",) * 4), asked.kind, " ".join(asked.answer.split()), *figures, *last)
    Console(width=200, highlight=False, markup=False).print(table)


def write_results(path: Path, results: Sequence[Result], more: dict[str, Any]) -> None:
    rows = [asdict(one) | {"passed": one.fault is None, "fault": one.fault} for one in results]
    text = json.dumps(more | {"passed": all(row["passed"] for row in rows), "results": rows}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", help="comma-separated: zoo:NAME, random:FAMILY or folders; default: the zoo's and random ones"
    )
    parser.add_argument("--schemes", help="comma-separated: dense, W8A8, W4A16, W4A8, ...; default: these four")
    parser.add_argument(
        "--quick", action="store_true", help="a selection: every family, every kernel, one random model"
    )
    parser.add_argument("--out", type=Path, default=Path("clients-out"), help="new or empty folder for results")
    parser.add_argument(
        "--environment", type=Path, help="folder of vLLM's environment; default: in OnPTQ's cache folder"
    )
    parser.add_argument("--servers", type=int, default=2, help="how many run at a time")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds until a server must be ready")
    return parser.parse_args(arguments)


def cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def runnable(cases: Sequence[Case], flags: Set[str]) -> list[Case]:
    found = [case for case in cases if case.runs_on(flags)]
    if left := [case.label for case in cases if case not in found]:
        say(
            f"not run, because this CPU has no AVX-512, for which vLLM's kernel of 4-bit weights is made: {', '.join(left)}"
        )
    if not found:
        raise OnPTQError("no checkpoint is left to serve on this CPU; expected one that is dense or has 8-bit weights")
    return found


def run(args: argparse.Namespace) -> int:
    cases = runnable(choose_cases(args.models, args.schemes, args.quick), cpu_flags())
    if args.out.exists() and any(args.out.iterdir()):
        raise OnPTQError(f"--out {args.out} is not empty; expected a new or empty folder")
    began = time.monotonic()
    environment = (args.environment or cache_folder() / "clients" / "vllm").absolute()
    installed = make_environment(environment)
    say(f"environment {environment}: " + ("was there" if installed is None else f"made in {installed:.0f} s"))
    args.out.mkdir(parents=True, exist_ok=True)
    suite = Suite(python_of(environment), args.out.absolute(), args.patience)
    results = suite.run(cases, args.servers)
    print_table(results)
    seconds = time.monotonic() - began
    more = {"versions": versions(environment), "environment_seconds": installed, "seconds": round(seconds, 1)}
    write_results(args.out / "results.json", results, more)
    failed = [(case, one) for case, one in zip(cases, results, strict=True) if one.fault is not None]
    for case, one in failed:
        say(f"\n{case.label}: {one.fault}")
        if one.error is not None:
            log = suite.folder(case) / "server.log"
            say(f"{log}:\n{tail(log)}")
    print(
        f"{len(results) - len(failed)} of {len(results)} checkpoints passed in {seconds:.0f} s; {args.out / 'results.json'}"
    )
    return 1 if failed else 0


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end as they do on an interrupt
    try:
        code = run(parse_arguments())
    except OnPTQError as error:
        say(f"error: {error}")
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
