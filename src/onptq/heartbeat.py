"""Signs of life of the processes of a job: one that hangs would keep the others waiting for days."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

INTERVAL, LIMIT = 5.0, 45.0  # seconds between signs of life, and without one until the job is ended
LEFT = b"left"


class Heartbeat:
    """A thread that gives signs of life and ends this process when another one gives none. The first process watches all
    others, and they watch the first."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """The thread of one process, made before all of them meet for the first time. `store` is what they meet by."""
        self._store, self._own = store.clone(), _key(rank)
        self._watched = range(1, size) if rank == 0 else range(1)
        self._store.set(self._own, "0")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="onptq-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave the others, who expect nothing of this process any more."""
        self._stopped.set()
        self._thread.join(INTERVAL)

    def _beat(self) -> None:
        count, seen = 0, {rank: (b"", time.monotonic()) for rank in self._watched}
        try:
            while not self._stopped.wait(INTERVAL):
                count += 1
                self._store.set(self._own, str(count))
                for rank, (before, since) in seen.items():
                    sign = self._store.get(_key(rank))
                    if sign != before:
                        seen[rank] = sign, time.monotonic()
                    elif sign != LEFT and time.monotonic() - since > LIMIT:
                        _end(rank)
            self._store.set(self._own, LEFT.decode())
        except (
            RuntimeError
        ):  # the store has gone, with torchrun or the first process: whoever waits for that one notices
            return


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _end(rank: int) -> None:
    """End this process, whatever it waits for."""
    sys.stderr.write(
        f"\nerror: process {rank} of this job has given no sign of life for {LIMIT:.0f} seconds: it is stopped, or its machine "
        "is out of memory or lost. The job ends here; the same command, with any number of processes, continues the run\n"
    )
    sys.stderr.flush()
    os._exit(2)
