"""A vLLM server on loopback for one checkpoint, which is ended whatever happens."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from onptq.errors import OnPTQError

GUARD = Path(__file__).with_name("guard.py")
NAME = "onptq"  # of the checkpoint in requests
POLL, REPLY = 0.5, 300.0  # seconds between two health checks, and the limit for a reply
MARGIN = 15.0  # seconds for the guard to end, beyond those of its server
TAIL = 12  # lines of a log
NOISE = re.compile(r"leaked |nanobind|resource_tracker|warnings\.warn|Warning: ")
KERNEL = re.compile(r"(?:Using|Selected) (\w+?)(?:LinearKernel)? for (?:CompressedTensors\w+|mixed-precision linear)")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two servers are bound to the same core
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling for log-probabilities takes longer than all requests
}


class ServerError(OnPTQError):
    """The server did not start, went away or refused a request."""


def serve_command(python: Path, checkpoint: Path, port: int, dtype: str, media: Mapping[str, int]) -> list[str]:
    """The command behind `vllm serve`, which in vllm-cpu 0.32.0 looks for a package named vllm and fails."""
    options = {
        "model": checkpoint,
        "served-model-name": NAME,
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype,
        "max-model-len": 512,
        "max-num-seqs": 2,
        "generation-config": "vllm",  # not the checkpoint's, which may sample
        "limit-mm-per-prompt": json.dumps(media),
    }
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--no-enable-prefix-caching"]
    return [*command, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """`with Server(command, port, log) as server`: healthy inside, ended outside."""

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
        self.command, self.port, self.log, self.patience, self.grace = command, port, log, patience, grace
        self.environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT | dict(environment)
        self.started_in = 0.0  # seconds until healthy
        self._process: subprocess.Popen[bytes] | None = None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> Server:
        began = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = process = subprocess.Popen(
                [sys.executable, str(GUARD), str(self.grace), *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,  # an interrupt of the terminal is for the suite, which ends its servers
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

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON reply to a JSON request."""
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=REPLY) as reply:
                answer: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            text = " ".join(error.read().decode(errors="replace").split())
            raise ServerError(f"the server answers {path} with {error.code}: {text[:400]}") from error
        except (OSError, ValueError) as error:
            raise ServerError(f"the server does not answer {path}: {error}") from error
        return answer

    def _healthy(self) -> bool:
        try:
            with self._opener.open(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


def kernels(log: str) -> list[str]:
    """The kernels of quantized linears that are named in the log."""
    return list(dict.fromkeys(match.group(1) for match in KERNEL.finditer(log)))


def tail(log: Path) -> str:
    """The last errors of a log, which may be far above its end, and its last lines."""
    if not log.is_file():
        return "(no log)"
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line[:240] for line in text.splitlines() if line.strip() and not NOISE.search(line)]
    errors = [line for line in lines[:-TAIL] if re.search(r"\b\w*(Error|Exception): ", line)]
    return "\n".join([*dict.fromkeys(errors[-4:]), *lines[-TAIL:]])
