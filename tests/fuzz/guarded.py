"""Cases in a forked process with little memory and time: what happens to it happens to nobody else."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from onptq.errors import OnPTQError

SECONDS = 20  # of processor time that one case may take
BYTES = 2**31  # that a case may add to the process
READ, REFUSED, FAILED = "read", "refused", "failed"

Read = Callable[[bytes, Path], object]


def outcome(read: Read, data: bytes) -> str:
    """Whether the bytes were read or refused; any other error is raised."""
    with tempfile.TemporaryDirectory(prefix="onptq-fuzz-") as folder:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            read(data, Path(folder))
            return READ
        except OnPTQError:
            return REFUSED
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def guarded(work: Callable[[Path], None]) -> tuple[str | None, bytes]:
    """What went wrong in a forked process that was given a file for its case in hand; None where nothing did."""
    folder = Path(tempfile.mkdtemp(prefix="onptq-fuzz-"))
    case, said = folder / "case", folder / "said"
    child = os.fork()
    if child == 0:
        _limit()
        status = 1
        try:
            work(case)
            status = 0
        except BaseException:
            said.write_text("".join(traceback.format_exc())[-6000:], errors="replace")
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    trouble = None
    if status != 0:
        text = said.read_text(errors="replace") if said.is_file() else ""
        trouble = (
            text or f"signal {signal.Signals(-status).name}: {SECONDS} s or {BYTES / 2**30:g} GiB exceeded, or a crash"
        )
    data = case.read_bytes() if case.is_file() else b""
    for path in (case, said):
        path.unlink(missing_ok=True)
    folder.rmdir()
    return trouble, data


def _limit() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, in whatever library it is
    statm = Path("/proc/self/statm")
    if statm.is_file():
        held = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, resource.RLIM_INFINITY))
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
