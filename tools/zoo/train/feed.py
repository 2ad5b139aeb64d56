"""Batches from worker processes, in the order of their steps: the same data however many workers there are."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from onptq.errors import OnPTQError
from onptq.zoo.tokens import TokenSet
from tools.zoo.lessons import SEEN
from tools.zoo.train.collate import Arrays, Layout, make_audio, make_images

AHEAD = 12  # batches that wait ready in this process


@dataclass(frozen=True)
class Order:
    """The batches that a worker makes: `size` lessons with images and `targets`, or with audio clips and without
    those."""

    words: str  # tokenizer.json without special tokens
    tokens: TokenSet
    seed: int
    size: int
    targets: int | None
    shares: Mapping[str, float] = field(default_factory=lambda: SEEN)  # of the kinds of lessons with images

    def batches(self, first: int, stride: int) -> Iterator[Arrays]:
        from tokenizers import Tokenizer

        layout = Layout.of(Tokenizer.from_str(self.words), self.tokens)
        step = first
        while True:
            if self.targets is None:
                yield make_audio(layout, self.seed, step, self.size)
            else:
                yield make_images(layout, self.seed, step, self.size, self.targets, self.shares)
            step += stride


class Feed:
    """An iterator over the batches of all steps; `poll` gives the next only if it is ready. Works without workers
    too."""

    def __init__(self, order: Order, workers: int) -> None:
        self._queue: queue.Queue[Arrays | None] = queue.Queue(AHEAD)
        self._stopped = threading.Event()
        self._own = order.batches(0, 1) if workers == 0 else None
        context = get_context("spawn")  # a process with CUDA must not be forked
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []
        for index in range(workers):
            here, there = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(there, order, index, workers), daemon=True)
            worker.start()
            there.close()
            self._workers.append(worker)
            self._pipes.append(here)
        if workers:
            threading.Thread(target=self._collect, daemon=True).start()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()

    def __next__(self) -> Arrays:
        if self._own is not None:
            return next(self._own)
        arrays = self._queue.get()
        if arrays is None:
            raise OnPTQError("a worker process that makes lessons has ended; its error is above")
        return arrays

    def __iter__(self) -> Iterator[Arrays]:
        return self

    def poll(self) -> Arrays | None:
        """The next batch if it is ready."""
        if self._own is None and self._queue.empty():
            return None
        return next(self)

    def _collect(self) -> None:
        from safetensors.numpy import load

        step = 0
        while not self._stopped.is_set():
            try:
                arrays = load(self._pipes[step % len(self._pipes)].recv_bytes())
            except (EOFError, OSError):
                self._queue.put(None)
                return
            self._queue.put(arrays)
            step += 1


def _work(pipe: Connection, order: Order, first: int, stride: int) -> None:
    from safetensors.numpy import save

    try:
        for arrays in order.batches(first, stride):
            pipe.send_bytes(save(arrays))
    except (BrokenPipeError, KeyboardInterrupt):  # the trainer has ended
        pass
