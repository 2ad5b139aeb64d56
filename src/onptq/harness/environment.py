"""A virtual environment of its own for a tool that OnPTQ runs as a process, made by pip."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from onptq.errors import OnPTQError

MARK = "onptq-client.json"  # the requirements of the environment, and whether it is complete


@dataclass(frozen=True)
class Environment:
    """A folder, and everything that determines what is in it."""

    folder: Path
    requirements: Path  # of pip
    hook: Path | None = None  # a module that every start of Python there imports
    unwanted: tuple[str, ...] = ()  # dependencies that are taken out again

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        return next(iter(sorted(self.folder.glob("lib/python*/site-packages"))))

    @property
    def is_whole(self) -> bool:
        """Whether the folder holds this environment, and nothing of it is missing."""
        mark = self.folder / MARK
        if not mark.is_file():
            return False
        made = json.loads(mark.read_text(encoding="utf-8"))
        return bool(made["whole"]) and set(self.wanted()) <= set(made["requirements"])

    def make(self) -> float | None:
        """Make the environment and return the seconds; None if it was there. One with other requirements is replaced."""
        if self.is_whole:
            return None
        mark = self.folder / MARK
        if self.folder.exists() and not mark.is_file() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise OnPTQError(f"{self.folder} exists and was not made by this command; expected a new or empty folder")
        began = time.monotonic()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        # written first, so that a killed command leaves a folder that the next one may replace
        mark.write_text(json.dumps(self._mark(whole=False)), encoding="utf-8")
        venv.create(self.folder, with_pip=True)
        self._pip("install", "--quiet", "--requirement", str(self.requirements))
        if self.unwanted:
            self._pip("uninstall", "--quiet", "--yes", *self.unwanted)
        if self.hook is not None:
            shutil.copyfile(self.hook, self.packages / self.hook.name)
            (self.packages / f"{self.hook.stem}.pth").write_text(f"import {self.hook.stem}\n", encoding="utf-8")
        mark.write_text(json.dumps(self._mark(whole=True)), encoding="utf-8")
        return time.monotonic() - began

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        installed = {one.metadata["Name"].lower(): one.version for one in distributions(path=[str(self.packages)])}
        return {name: installed[name] for name in names if name in installed}

    def wanted(self) -> list[str]:
        """Everything that determines the environment."""
        lines = self.requirements.read_text(encoding="utf-8").splitlines()
        named = [line for line in lines if line and not line.startswith("#")]
        return named + ([] if self.hook is None else [self.hook.read_text(encoding="utf-8")])

    def _mark(self, whole: bool) -> dict[str, object]:
        return {"requirements": self.wanted(), "whole": whole}

    def _pip(self, *arguments: str) -> None:
        command = [str(self.python), "-m", "pip", *arguments, "--disable-pip-version-check"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if subprocess.run(command, env=environment).returncode:  # noqa: S603 - its own python
            raise OnPTQError(f"pip cannot set up {self.folder}; its error is above")
