"""Run a command while standard input is open, then end it and all its processes.

    python guard.py SECONDS COMMAND [ARGUMENT ...]

The command is terminated first; SECONDS later it is killed.

The parent holds the other end of the pipe. The system closes it even when the parent is killed, so no server is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def end_with_input(child: subprocess.Popen[bytes], grace: float) -> None:
    while os.read(0, 1024):
        pass
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace)
    sweep(child)


def sweep(child: subprocess.Popen[bytes]) -> None:
    """Kill the rest of the command's session: workers of a server may outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def main() -> None:
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    threading.Thread(target=end_with_input, args=(child, float(sys.argv[1])), daemon=True).start()
    code = child.wait()
    sweep(child)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
