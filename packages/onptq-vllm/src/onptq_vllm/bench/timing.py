"""The job of an engine, and its timing. Standard library only: an interpreter without OnPTQ runs this file too."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

MARK = "RESULT "  # begins the line of an engine's output that holds its result
READY = "READY"  # the line by which an engine says that it can be measured; it then waits for a line
TURN = threading.Event()  # set when the engine may measure
FIRST_ID = 300  # smaller ids may be special tokens
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Job:
    """One checkpoint in one engine."""

    folder: str
    mode: str  # eager or compiled
    dtype: str  # float16, bfloat16, float32
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int  # decoded beyond the first
    repeats: int
    vocabulary: int
    linear_backend: str | None  # on a GPU; None is the engine's own choice
    graph_sizes: tuple[int, ...]  # tokens of the forwards that are captured when compiled
    cache_gib: float
    options: Mapping[str, Any] = field(default_factory=dict)  # further ones of the engine
    waits: bool = False  # until it is its turn to be measured; others may be starting

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**fields | {name: tuple(fields[name]) for name in ("batches", "graph_sizes")})


class Memory(Protocol):
    """The peak of held bytes since the last reset; None where the system does not report it."""

    def reset(self) -> None: ...

    def peak(self) -> int | None: ...


class ProcessMemory:
    """The resident memory of a process on a CPU, code and libraries included."""

    def reset(self) -> None:
        with suppress(OSError):  # 5 resets the high-water mark on Linux
            RESET.write_text("5")

    def peak(self) -> int | None:
        with suppress(OSError):
            lines = STATUS.read_text().splitlines()
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
        return None


Generate = Callable[[Sequence[list[int]], int], None]  # generates so many tokens for each prompt, and waits for them


def measure(generate: Generate, job: Job, memory: Memory) -> Iterator[dict[str, Any]]:
    """Median seconds of prefill and decode, and peak memory, for every batch size.

    Prefill is a response of one token, repeated without pause. The first `repeats` are not counted: a busy GPU is
    slower than an idle one. Decode is the difference of a longer response and a prefill right before it.
    """
    if job.waits:
        print(READY, flush=True)
        TURN.wait()
    for batch in job.batches:
        prompts = draw_prompts(batch, job.prompt_tokens, job.vocabulary)
        for tokens in (1, 1 + job.new_tokens):  # compiles, captures, allocates
            generate(prompts, tokens)
            generate(prompts, tokens)
        memory.reset()
        generate(prompts, 1)
        prefill_peak = memory.peak()
        prefills = [_seconds(generate, prompts, 1) for _ in range(2 * job.repeats)][job.repeats :]
        between, decodes = [], []
        for _ in range(job.repeats):
            between.append(_seconds(generate, prompts, 1))
            decodes.append((_seconds(generate, prompts, 1 + job.new_tokens) - between[-1]) / job.new_tokens)
        yield {
            "batch": batch,
            "prefill_seconds": statistics.median(prefills),
            "decode_seconds": statistics.median(decodes),  # of one step: one token for every prompt
            "prefill_all": prefills,
            "prefill_between_seconds": statistics.median(between),  # with decoding before and after it
            "prefill_between_all": between,
            "decode_all": decodes,
            "prefill_peak_bytes": prefill_peak,
            "peak_bytes": memory.peak(),
        }


def draw_prompts(batch: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random token ids, the same in every engine: the speed of kernels depends on data, and prefixes must not be
    cached."""
    source = random.Random(f"{batch}/{tokens}/{vocabulary}")
    return [[source.randrange(FIRST_ID, vocabulary) for _ in range(tokens)] for _ in range(batch)]


def _seconds(generate: Generate, prompts: Sequence[list[int]], tokens: int) -> float:
    began = time.perf_counter()
    generate(prompts, tokens)
    return time.perf_counter() - began


def serve(run: Callable[[Job], dict[str, Any]]) -> None:
    """Run the job of the command line and print its result. The process ends with the one that started it."""
    job = Job.parse(sys.argv[1])
    if job.waits:
        threading.Thread(target=_wait_for_turn, daemon=True).start()
    print(MARK + json.dumps(run(job)), flush=True)


def _wait_for_turn() -> None:
    """Set TURN at a byte on standard input; exit when standard input ends, since the parent has ended."""
    while os.read(sys.stdin.fileno(), 1):
        TURN.set()
    os._exit(1)


def is_ready(output: str) -> bool:
    return READY in output.splitlines()


def parse_result(output: str) -> dict[str, Any] | None:
    """The result in an engine's output; None if it has none."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1][len(MARK) :]) if lines else None
