"""Benchmarks as processes of lmms-eval or lm-evaluation-harness: one after another, each with its log and its results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError
from onptq.files import atomically, read_json, to_json
from onptq.harness.benchmarks import FUNCTIONS, PREFIX, REPETITION_PENALTY, Task, write_tasks
from onptq.harness.environment import Environment
from onptq.harness.logs import task_of
from onptq.progress import Reporter

HERE = Path(__file__).parent
REQUIREMENTS, INSIDE = HERE / "requirements.txt", HERE / "inside"
PLUGIN = "onptq_lmms"
PACKAGES = ("lmms_eval", "lm_eval", "torch", "transformers", "compressed-tensors", "datasets")
RESULTS = "results.json"
COUNT = "sample_len"  # which lm-eval puts among the metrics
TAIL = 15  # lines of a log that an error shows
GENERATION = "generation_config.json"
UNPINNED = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "do_sample", "num_beams")


@dataclass(frozen=True)
class Arm:
    """Who answers: the checkpoint in a folder, or what a server calls `name`."""

    name: str
    folder: Path | None = None
    endpoint: str | None = None  # up to /v1

    def arguments(self) -> dict[str, str]:
        """The arguments of the model inside lmms-eval."""
        if self.endpoint is not None:
            return {"url": self.endpoint, "model": self.name}
        return {"pretrained": str(self.folder)}


@dataclass(frozen=True)
class Settings:
    """What all arms of a comparison must share, and how one is run."""

    repetition_penalty: float = REPETITION_PENALTY
    limit: int | None = None  # items of each task
    batch: int = 1
    device: str | None = None
    model_arguments: Mapping[str, str] = field(default_factory=dict)

    def shared(self) -> dict[str, Any]:
        """What decides the answers."""
        return {name: value for name, value in asdict(self).items() if name not in ("batch", "device")}


def find_environment(folder: Path) -> Environment:
    """The environment in the folder; an error that says how to make it, where there is none."""
    environment = Environment(folder, REQUIREMENTS)
    if not environment.is_whole:
        raise OnPTQError(f"{folder} holds no environment of this version: onptq eval --make-environment {folder}")
    return environment


@dataclass(frozen=True)
class Evaluation:
    """The folder of one arm: OUT/TASK.jsonl with the answers to each task, and results.json."""

    out: Path
    environment: Environment
    arm: Arm
    settings: Settings
    reporter: Reporter

    def benchmarks(self, tasks: Sequence[Task], data: Path | None) -> dict[str, Any]:
        """Run lmms-eval on those tasks that are not there yet, and return the results of all."""
        files = self.out / "tasks"
        packaged = self.environment.packages / "lmms_eval" / "tasks"
        self._begin({task.name: task.settings(Path("lmms_eval/tasks"), None) for task in tasks})
        functions = INSIDE / PLUGIN / FUNCTIONS
        write_tasks(tasks, files, packaged, functions, data)
        model = "onptq_folder" if self.arm.endpoint is None else "onptq_endpoint"
        arguments = self.arm.arguments() | {"repetition_penalty": str(self.settings.repetition_penalty)}
        variables = {
            "PYTHONPATH": str(INSIDE),
            "LMMS_EVAL_PLUGINS": PLUGIN,
            "OPENAI_API_KEY": "none",  # WenetSpeech's module makes a client that it does not use
            **(_offline(self.out / "cache") if data is not None else {}),
        }
        for task in tasks:
            words = ["lmms_eval", "--model", model, "--include_path", str(files), "--tasks", f"{PREFIX}{task.name}"]
            # one thread scores, so that what MMMU guesses depends on its seed alone
            words += ["--process_docs_parallel", "1", "--verbosity", "ERROR"]
            self._run(task.name, words, arguments, variables)
        return self._end(task.name for task in tasks)

    def text_tasks(self, names: Sequence[str], task_files: Path | None) -> dict[str, Any]:
        """Run lm-evaluation-harness on those tasks that are not there yet, and return the results of all."""
        assert self.arm.folder is not None
        self._begin(dict.fromkeys(names))
        view = pinned_view(self.arm.folder, self.out / "model", self.settings.repetition_penalty)
        chosen = self.settings.device
        on_cpu = {"dtype": "float32"} if chosen == "cpu" else {}
        included = ["--include_path", str(task_files.absolute())] if task_files is not None else []
        for name in names:
            words = ["lm_eval", "run", "--model", "hf", "--tasks", name, *included]
            self._run(name, words, {"pretrained": str(view), **on_cpu}, {})
        shutil.rmtree(view)
        return self._end(names)

    def _begin(self, tasks: Mapping[str, Any]) -> None:
        """Record what decides the answers; refuse a folder with answers of something else."""
        mine = {"arm": self.arm.name, "endpoint": self.arm.endpoint, "folder": self.arm.folder} | self.settings.shared()
        mine = json.loads(to_json(mine))
        known = self._results()
        if known and known["settings"] != mine:
            raise OnPTQError(
                f"{self.out} has results of another model or of other settings ({to_json(known['settings'])}); expected "
                "another --out"
            )
        self.out.mkdir(parents=True, exist_ok=True)
        versions = self.environment.versions(PACKAGES)
        pinned = (known or {}).get("pinned", {}) | json.loads(to_json(tasks))
        self._write({"settings": mine, "versions": versions, "pinned": pinned, "tasks": (known or {}).get("tasks", {})})

    def _run(self, name: str, words: Sequence[str], arguments: Mapping[str, str], variables: Mapping[str, str]) -> None:
        if name in self._results()["tasks"]:
            return
        arguments = {**arguments, **self.settings.model_arguments}
        if bad := [value for value in arguments.values() if "," in value or "=" in value]:
            raise OnPTQError(
                f"{bad[0]!r} has a comma or an equals sign, which the tool takes for its own; use another path"
            )
        raw, log = self.out / "raw", self.out / f"{name}.log"
        shutil.rmtree(raw, ignore_errors=True)
        command = [str(self.environment.python), "-m", *words, "--output_path", str(raw), "--log_samples"]
        command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
        command += ["--batch_size", str(self.settings.batch)]
        command += ["--limit", str(self.settings.limit)] if self.settings.limit is not None else []
        command += ["--device", self.settings.device] if self.settings.device is not None else []
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        began = time.monotonic()
        with self.reporter.phase(name), log.open("wb") as file:
            code = subprocess.run(  # noqa: S603 - no shell, and the environment's own python
                command, stdout=file, stderr=subprocess.STDOUT, env=inherited | dict(variables)
            ).returncode
        results = sorted(raw.rglob("*results*.json"))
        if code or not results:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
            raise OnPTQError(f"{words[0]} ended with code {code} on {name}; {log} ends:\n" + "\n".join(lines))
        figures = {
            task.removeprefix(PREFIX): numbers_of(values) for task, values in read_json(results[-1])["results"].items()
        }
        samples = []
        for path in sorted(raw.rglob("*samples_*.jsonl")):
            task = task_of(path)
            os.replace(path, self.out / f"{task}.jsonl")
            samples.append(f"{task}.jsonl")
        shutil.rmtree(raw)
        record = {"results": figures, "samples": samples, "seconds": round(time.monotonic() - began, 1)}
        written = self._results()
        self._write(written | {"tasks": {**written["tasks"], name: record}})

    def _end(self, names: Iterable[str]) -> dict[str, Any]:
        shutil.rmtree(self.out / "cache", ignore_errors=True)
        tasks = self._results()["tasks"]
        return {name: tasks[name] for name in names}

    def _results(self) -> dict[str, Any]:
        path = self.out / RESULTS
        return dict(read_json(path)) if path.is_file() else {}

    def _write(self, content: Mapping[str, Any]) -> None:
        with atomically(self.out / RESULTS) as path:
            path.write_text(to_json(content, indent=2) + "\n", encoding="utf-8")


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The results that are numbers, without the tool's suffix of filters, e.g. `acc` for `acc,none`."""
    named = {name.removesuffix(",none"): value for name, value in values.items()}
    numbers = {name: value for name, value in named.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if name != COUNT and "stderr" not in name}


def pinned_view(folder: Path, view: Path, repetition_penalty: float) -> Path:
    """A folder of links to the checkpoint's files, but for a generation config that decodes greedily."""
    shutil.rmtree(view, ignore_errors=True)
    view.mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_file() and file.name != GENERATION:
            (view / file.name).symlink_to(file.absolute())
    own = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    own = {name: value for name, value in own.items() if name not in UNPINNED}
    pinned = own | {"do_sample": False, "repetition_penalty": repetition_penalty}
    (view / GENERATION).write_text(to_json(pinned, indent=2) + "\n", encoding="utf-8")
    return view


def _offline(cache: Path) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache)}
