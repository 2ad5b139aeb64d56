"""The temporary folder of a benchmark, which holds whole checkpoints: removed also after signals."""

from __future__ import annotations

import fcntl
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "onptq-bench-"
LOCK = "lock"  # held while the folder is in use
TERMINATED = 128 + signal.SIGTERM


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, removed at the end or on SIGTERM. Folders that killed processes left are removed first."""
    _sweep(Path(tempfile.gettempdir()))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX) as name, (Path(name) / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
    finally:
        signal.signal(signal.SIGTERM, before)


def _sweep(parent: Path) -> None:
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), lock.open("r+") as stream:  # in use, or of another user
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
