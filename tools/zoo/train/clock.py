"""The schedule of a training: how much of it has passed."""

from __future__ import annotations

import time

WRITE_SECONDS = 8.0  # left at the end for writing the checkpoint


class Clock:
    """Which part of the schedule is done: by steps, by time or by what is left once enough was learned, whichever is further."""

    def __init__(self, steps: int | None, end: float | None, settle: int) -> None:
        """By time.monotonic() the checkpoint is to be written by `end`; `settle` steps pass once enough was learned."""
        self._steps, self._settle = steps, settle
        self._settled: tuple[int, float] | None = None  # since which step, and how far the schedule was then
        self._end = None if end is None else end - WRITE_SECONDS
        self._start: float | None = None

    def start(self) -> None:
        self._start = time.monotonic()

    def settle(self, step: int) -> None:
        """Enough was learned: the rest of the schedule passes quickly."""
        if self._settled is None:
            self._settled = step, self.progress(step)

    def progress(self, step: int) -> float:
        done = 0.0 if self._steps is None else step / self._steps
        if self._end is not None and self._start is not None:
            done = max(done, (time.monotonic() - self._start) / max(self._end - self._start, 1e-3))
        if self._settled is not None:
            since, before = self._settled
            done = max(done, before + (1 - before) * (step - since) / self._settle)
        return done
