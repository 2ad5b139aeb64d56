"""The schedule of a training."""

from __future__ import annotations

import time

WRITE_SECONDS = 8.0  # left at the end for writing the checkpoint


class Clock:
    """The finished part of the schedule: by steps, by time, or by steps since all losses were low, whichever is
    largest."""

    def __init__(self, steps: int | None, end: float | None, settle: int) -> None:
        """`end` is the time.monotonic() by which the checkpoint is written; `settle` the steps after all losses are
        low."""
        self._steps, self._settle = steps, settle
        self._settled: tuple[int, float] | None = None  # the step, and the progress then
        self._end = None if end is None else end - WRITE_SECONDS
        self._start: float | None = None

    def start(self) -> None:
        self._start = time.monotonic()

    def settle(self, step: int) -> None:
        """Pass the rest of the schedule within `settle` steps, since all losses are low."""
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
