"""Serve exported checkpoints with vLLM, ask questions, and compare the log-probabilities with transformers.

    python clients/run.py                 # all models and schemes
    python clients/run.py --quick         # one checkpoint of every kind
    python clients/run.py --policy        # only the rollouts of two quantizations

Makes vLLM's environment (CPU build), exports the checkpoints by plain rounding, serves each on loopback, and asks over
the OpenAI API about an image, about audio (where the family has it) and in text. Every token of the answers is compared
with transformers. Then vLLM writes the rollouts of two quantizations (`follow.engine=vllm`), whose banks are compared
with those of OnPTQ's own. OUT gets results.json, server logs and replies. Exit code 1 if anything failed.
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
from environment import PACKAGES, server_environment
from policy import Beside, beside_our_own
from questions import Question, ask, questions, read
from reference import Compared, Reference
from server import Server, free_port, kernels, serve_command, settings, tail

import onptq
from onptq.checkpoint.source import Source, open_checkpoint
from onptq.errors import OnPTQError
from onptq.files import cache_folder
from onptq.progress import QuietReporter
from onptq.recipe import Recipe
from onptq.serving.vllm import cpu_flags
from onptq.zoo.materials import draw_calibration


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
                return f"{one.kind}: a log-probability differs by {one.difference:.3f} from transformers', more than {self.limit}"
            if one.blank_difference is not None and one.blank_difference <= self.limit:
                return f"{one.kind}: blank input would differ by {one.blank_difference:.3f} only, so it may not have been used"
        return None


@dataclass(frozen=True)
class Suite:
    python: Path
    out: Path
    patience: float
    flags: Set[str]  # of the CPU

    def folder(self, case: Case) -> Path:
        return self.out / case.label

    def export(self, case: Case) -> Source:
        """The checkpoint to serve; a dense model itself. Scales of inputs and of the cache come from a few prompts."""
        source = case.source(self.out / "models")
        if case.scheme is None:
            return source
        calibrated = case.scheme.quantizes_cache or case.scheme.scales_inputs
        options: dict[str, Any] = {"scheme": str(case.scheme), "method": "smoothquant" if calibrated else "rtn"}
        recipe = Recipe.preset("light", options | {"data.prompts": 4, "data.holdout": 0})
        prompts = draw_calibration(source.family.name, recipe.data, QuietReporter())[0] if calibrated else None
        checkpoint = self.folder(case) / "checkpoint"
        onptq.quantize(source.folder, checkpoint, calibration=prompts, recipe=recipe)
        return open_checkpoint(str(checkpoint))

    def ask_server(
        self, case: Case, source: Source, chosen: Sequence[Question]
    ) -> tuple[list[dict[str, Any]], float, float]:
        """The server's replies, the seconds of its start, and those in all. Runs in a thread beside others, without
        torch."""
        media = {"image": 1, "video": 0} | ({"audio": 1} if "audio" in source.family.modalities else {})
        port, began = free_port(), time.monotonic()
        command = serve_command(self.python, source.folder, port, case.dtype(self.flags), media)
        log = self.folder(case) / "server.log"
        with Server(command, port, log, settings(case.environment), self.patience) as server:
            replies = [ask(server.client, question) for question in chosen]
            started_in = server.started_in
        return replies, started_in, time.monotonic() - began

    def check(self, case: Case, source: Source, chosen: Sequence[Question], future: Future[Any]) -> Result:
        compared, error, started_in, seconds = [], None, 0.0, 0.0
        log = self.folder(case) / "server.log"
        try:
            replies, started_in, seconds = future.result()
            (self.folder(case) / "replies.json").write_text(json.dumps(replies), encoding="utf-8")
            reference = Reference(source.folder)
            compared = [reference.compare(one, read(reply)) for one, reply in zip(chosen, replies, strict=True)]
        except OnPTQError as failure:
            error = str(failure)
        log_text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        return Result(
            case.model,
            case.scheme_name,
            case.dtype(self.flags),
            case.limit(self.flags),
            kernels(log_text),
            compared,
            seconds,
            started_in,
            error,
        )

    def run(self, cases: Sequence[Case], servers: int) -> list[Result]:
        """Run several servers at a time, since they start slowly, while further checkpoints are exported."""
        waiting: dict[Future[Any], tuple[Case, Source, list[Question]]] = {}
        results = {}
        with ThreadPoolExecutor(servers) as pool:
            try:
                for case in cases:
                    source = self.export(case)
                    chosen = questions(source.family)
                    waiting[pool.submit(self.ask_server, case, source, chosen)] = (case, source, chosen)
                for future in as_completed(waiting):
                    case = waiting[future][0]
                    results[case] = result = self.check(*waiting[future], future)
                    print_line(f"{case.label}: {'ok' if result.fault is None else 'FAILED'}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                Server.end_all()
                raise
        return [results[case] for case in cases]


def print_line(text: str) -> None:
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
        for number, compared in enumerate(one.questions):
            first = number == 0
            figures = (f"{compared.difference:.4f}", str(one.limit), f"{compared.agreement:.0%}")
            last = (f"{one.seconds:.0f}", verdict) if first else ("", "")
            table.add_row(
                *(head if first else ("",) * 4), compared.kind, " ".join(compared.answer.split()), *figures, *last
            )
    Console(width=200, highlight=False, markup=False).print(table)


def print_policy(besides: Sequence[Beside]) -> None:
    for one in besides:
        print_line(
            f"{one.label} {one.scheme}: {'ok' if one.fault is None else 'FAILED'}; {one.responses} responses of up to "
            f"{one.longest} tokens, {one.parted} part from our own; {one.equal} of {one.states} states are the same in both "
            f"banks; {one.near_ties} near ties, the largest of {one.largest_gap:.3f} logits; seconds {dict(one.seconds)}"
        )


def write_results(path: Path, results: Sequence[Result], more: dict[str, Any]) -> None:
    rows = [asdict(one) | {"passed": one.fault is None, "fault": one.fault} for one in results]
    passed = all(row["passed"] for row in (*rows, *more["policy"]))
    text = json.dumps(more | {"passed": passed, "results": rows}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        help="zoo:NAME, random:FAMILY or folders, with commas between them; default: the zoo's and random ones",
    )
    parser.add_argument(
        "--schemes", help="dense, W8A8, W4A16, W4A8, ..., with commas between them; default: these four"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a selection with every family, every kernel and one random model"
    )
    parser.add_argument("--policy", action="store_true", help="only the two quantizations whose rollouts vLLM writes")
    parser.add_argument("--out", type=Path, default=Path("clients-out"), help="new or empty folder for results")
    parser.add_argument(
        "--environment", type=Path, help="folder of vLLM's environment; default: in OnPTQ's cache folder"
    )
    parser.add_argument("--servers", type=int, default=2, help="servers at a time")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds until a server must be ready")
    return parser.parse_args(arguments)


def runnable(cases: Sequence[Case], flags: Set[str]) -> list[Case]:
    able = [case for case in cases if case.runs_on(flags)]
    if left := [case.label for case in cases if case not in able]:
        print_line(
            f"not run: vLLM's CPU kernel for 4-bit weights needs AVX-512, which this CPU does not have: {', '.join(left)}"
        )
    if not able:
        raise OnPTQError("no checkpoint is left to serve on this CPU; expected one that is dense or has 8-bit weights")
    return able


def run(args: argparse.Namespace) -> int:
    flags = cpu_flags()
    if args.policy and (args.models or args.schemes or args.quick):
        raise OnPTQError("expected --policy alone, or which checkpoints to serve, got both")
    cases = [] if args.policy else runnable(choose_cases(args.models, args.schemes, args.quick), flags)
    if args.out.exists() and any(args.out.iterdir()):
        raise OnPTQError(f"--out {args.out} is not empty; expected a new or empty folder")
    began = time.monotonic()
    environment = server_environment((args.environment or cache_folder() / "clients" / "vllm").absolute())
    installed = environment.make()
    print_line(
        f"environment {environment.folder}: " + ("exists" if installed is None else f"made in {installed:.0f} s")
    )
    args.out.mkdir(parents=True, exist_ok=True)
    suite = Suite(environment.python, args.out.absolute(), args.patience, flags)
    results = suite.run(cases, args.servers)
    if results:
        print_table(results)
    besides = [] if args.models or args.schemes else beside_our_own(environment.python, args.out.absolute(), flags)
    print_policy(besides)
    seconds = time.monotonic() - began
    more = {"versions": environment.versions(PACKAGES), "environment_seconds": installed, "seconds": round(seconds, 1)}
    more["policy"] = [asdict(one) | {"passed": one.fault is None} for one in besides]
    write_results(args.out / "results.json", results, more)
    failed = [(case, one) for case, one in zip(cases, results, strict=True) if one.fault is not None]
    for case, one in failed:
        print_line(f"\n{case.label}: {one.fault}")
        if one.error is not None:
            log = suite.folder(case) / "server.log"
            print_line(f"{log}:\n{tail(log)}")
    faults = [one for one in besides if one.fault is not None]
    for one in faults:
        print_line(f"\n{one.label}: {one.fault}")
    passed = f"{len(results) - len(failed)} of {len(results)} checkpoints"
    if besides:
        passed += f" and {len(besides) - len(faults)} of {len(besides)} policies"
    print(f"{passed} passed in {seconds:.0f} s; {args.out / 'results.json'}")
    return 1 if failed or faults else 0


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers as an interrupt does
    try:
        code = run(parse_arguments())
    except OnPTQError as error:
        print_line(f"error: {error}")
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
