"""Run a command for as long as standard input stays open; then end it and everything it started.

    python guard.py SECONDS COMMAND [ARGUMENT ...]

SECONDS is how long the command may take to end by itself when it is asked to.

Whoever started this holds the other end of the pipe, which the system closes however that process ends: killed or not, it
leaves no server behind.
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
    """End what is left of the command's session: servers start workers, which may outlive them."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def main() -> None:
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=end_with_input, args=(child, float(sys.argv[1])), daemon=True).start()
    code = child.wait()
    sweep(child)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
