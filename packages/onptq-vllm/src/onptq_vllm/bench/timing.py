"""What an engine is asked and how it is timed. Standard library only: an interpreter without OnPTQ runs this file too."""

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

MARK = "RESULT "  # begins the one line of an engine's output that is for us
READY = "READY"  # a line that says the engine could be measured; it then waits for a line
TURN = threading.Event()  # set when the engine may measure
FIRST_ID = 300  # smaller ids may be special ones
STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


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
    """The most bytes held since it was last reset; None where the system does not say."""

    def reset(self) -> None: ...

    def peak(self) -> int | None: ...


class ProcessMemory:
    """Of a process on a CPU: what it held, code and libraries included."""

    def reset(self) -> None:
        with suppress(OSError):  # Linux forgets the high-water mark when asked so
            FORGET.write_text("5")

    def peak(self) -> int | None:
        with suppress(OSError):
            lines = STATUS.read_text().splitlines()
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
        return None


Generate = Callable[[Sequence[list[int]], int], None]  # writes so many tokens after each prompt, and waits for them


def measure(generate: Generate, job: Job, memory: Memory) -> Iterator[dict[str, Any]]:
    """Prefill is a response of one token, one right after another, the first `repeats` of them not counted: a GPU that is busy
    is slower than one that was waiting. A longer response does the same and then decodes: the
    difference of two calls, one right after the other, is what decoding took. Medians."""
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
            "decode_seconds": statistics.median(decodes),  # of one step, which writes a token of every row
            "prefill_all": prefills,
            "prefill_between_seconds": statistics.median(between),  # with decoding before and behind it
            "prefill_between_all": between,
            "decode_all": decodes,
            "prefill_peak_bytes": prefill_peak,
            "peak_bytes": memory.peak(),
        }


def draw_prompts(batch: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random ids, the same for everybody: kernels' speed depends on data, and a cache must not know them."""
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
        threading.Thread(target=_listen, daemon=True).start()
    tell(run(job))


def _listen() -> None:
    """Take a byte on standard input as the turn to measure, and its end as the end of the parent."""
    while os.read(sys.stdin.fileno(), 1):
        TURN.set()
    os._exit(1)


def tell(found: dict[str, Any]) -> None:
    print(MARK + json.dumps(found), flush=True)


def is_ready(output: str) -> bool:
    return READY in output.splitlines()


def heard(output: str) -> dict[str, Any] | None:
    """What an engine told, if it came so far."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1][len(MARK) :]) if lines else None
