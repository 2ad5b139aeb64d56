"""A server on loopback that is a process of ours, and is ended whatever happens."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import OK
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from onptq.errors import OnPTQError
from onptq.serving.client import Client

GUARD = Path(__file__).with_name("guard.py")
HOST = "127.0.0.1"
KEY = "VLLM_API_KEY"  # where vLLM itself looks for the key that it wants of requests
POLL, ALIVE = 0.5, 5.0  # seconds between two health checks, and the limit for one
REPLY = 3600.0  # seconds for a reply: thousands of tokens of one answer, beside those of many others
MARGIN = 15.0  # seconds for the guard to end, beyond those of its server
TAIL = 12  # lines of a log
NOISE = re.compile(r"leaked |nanobind|resource_tracker|warnings\.warn|Warning: ")


class ServerError(OnPTQError):
    """The server did not start or went away."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


class Server:
    """`with Server(command, port, log, environment) as server`: healthy inside, ended outside.

    `environment` is added to that of this process, without its PYTHONPATH."""

    running: ClassVar[set[Server]] = set()

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        environment: Mapping[str, str],
        patience: float = 600.0,  # seconds until it must be ready
        grace: float = 15.0,  # seconds between termination and kill
    ) -> None:
        self.command, self.log, self.patience, self.grace = command, log, patience, grace
        self.environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | dict(environment)
        self.started_in = 0.0  # seconds until healthy
        self.client = Client(f"http://{HOST}:{port}", key=self.environment.get(KEY) or None, timeout=REPLY)
        self._root = Client(f"http://{HOST}:{port}", timeout=ALIVE, version="")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        began = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = process = subprocess.Popen(  # noqa: S603 - a command that is built here
                [sys.executable, str(GUARD), str(self.grace), *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,  # an interrupt of the terminal is for this process, which ends its servers
            )
        self.running.add(self)
        try:
            while not self._healthy():
                if process.poll() is not None:
                    raise ServerError(f"the server ended while starting, exit code {process.returncode}")
                if time.monotonic() - began > self.patience:
                    raise ServerError(f"the server was not ready after {self.patience:g} s")
                time.sleep(POLL)
        except BaseException:
            self.end()
            raise
        self.started_in = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def exit_code(self) -> int | None:
        """That of a server which ended by itself; None while it runs."""
        return None if self._process is None else self._process.poll()

    def end(self) -> None:
        """Close the guard's input and wait until it has ended the server."""
        process, self._process = self._process, None
        self.running.discard(self)
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(self.grace + MARGIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @classmethod
    def end_all(cls) -> None:
        """End all running servers, without their threads."""
        for server in list(cls.running):
            server.end()

    def _healthy(self) -> bool:
        try:
            return self._root.once("GET", "/health")[0] == OK
        except OnPTQError:
            return False


def tail(log: Path) -> str:
    """The last errors of a log, which may be far above its end, and its last lines."""
    if not log.is_file():
        return "(no log)"
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line[:240] for line in text.splitlines() if line.strip() and not NOISE.search(line)]
    errors = [line for line in lines[:-TAIL] if re.search(r"\b\w*(Error|Exception): ", line)]
    return "\n".join([*dict.fromkeys(errors[-4:]), *lines[-TAIL:]])
