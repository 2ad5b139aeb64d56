"""The paper's eight benchmarks as tasks of lmms-eval, with everything pinned that could differ between two arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from onptq.errors import OnPTQError, did_you_mean

REPETITION_PENALTY = 1.0
PREFIX = "onptq_"
LETTER = "Answer with the option's letter from the given choices directly."
PHRASE = "Answer the question using a single word or phrase."
FUNCTIONS = "documents.py"  # beside the task files, which name its functions


class Function(str):
    """The name of a function, which a task file marks."""


class Dumper(yaml.SafeDumper):
    """Writes task files."""


Dumper.add_representer(Function, lambda dumper, name: dumper.represent_scalar("!function", str(name)))


@dataclass(frozen=True)
class Task:
    """One task of lmms-eval: which of its files, the prompt of every arm, and how long an answer may be."""

    name: str  # lmms-eval's
    file: str  # below lmms_eval/tasks
    metric: str
    split: str
    max_tokens: int
    prompt: Mapping[str, Any]  # lmms_eval_specific_kwargs, whatever the model is called
    functions: Mapping[str, str] = field(default_factory=dict)  # further fields; a Function is marked as one

    def settings(self, packaged: Path, data: Path | None) -> dict[str, Any]:
        """The task file: lmms-eval's own, with what is pinned. `packaged` is the folder of its tasks."""
        fields: dict[str, Any] = {
            "include": str(packaged / self.file),
            "task": f"{PREFIX}{self.name}",
            "lmms_eval_specific_kwargs": {"default": dict(self.prompt)},
            "model_specific_generation_kwargs": None,
            "generation_kwargs": {
                "max_new_tokens": self.max_tokens,
                "temperature": 0,
                "do_sample": False,
                "num_beams": 1,
                "until": [],
            },
            "dataset_kwargs": None,  # which may want an account of the hub
        }
        fields |= self.functions
        return fields | ({} if data is None else local(data, self.split))


AUDIO = {"process_docs": Function(f"{Path(FUNCTIONS).stem}.undecoded")}
VQA = f"\n{PHRASE}"
BENCHMARKS: Mapping[str, Sequence[Task]] = {
    "mmmu": (
        Task(
            "mmmu_val",
            "mmmu/mmmu_val.yaml",
            "mmmu_acc",
            "validation",
            128,
            {"prompt_type": "format", "multiple_choice_prompt": LETTER, "open_ended_prompt": PHRASE},
        ),
    ),
    "ocrbench": (
        Task(
            "ocrbench",
            "ocrbench/ocrbench.yaml",
            "ocrbench_accuracy",
            "test",
            128,
            {"pre_prompt": "", "post_prompt": ""},
        ),
    ),
    "vizwiz": (
        Task(
            "vizwiz_vqa_val",
            "vizwiz_vqa/vizwiz_vqa_val.yaml",
            "exact_match",
            "val",
            64,
            {
                "pre_prompt": "",
                "post_prompt": f"\nWhen the provided information is insufficient, respond with 'Unanswerable'.{VQA}",
            },
        ),
    ),
    "scienceqa": (
        Task(
            "scienceqa_img",
            "scienceqa/scienceqa_img.yaml",
            "exact_match",
            "test",
            16,
            {"format": "default", "pre_prompt": "", "post_prompt": f"\n{LETTER}"},
        ),
    ),
    "textvqa": (
        Task(
            "textvqa_val",
            "textvqa/textvqa_val.yaml",
            "exact_match",
            "validation",
            64,
            {"pre_prompt": "", "post_prompt": VQA, "ocr": False},
        ),
    ),
    "librispeech": tuple(
        Task(
            f"librispeech_{part}",
            f"librispeech/librispeech_{part}.yaml",
            "wer",
            f"librispeech_{part}",
            256,
            {"pre_prompt": "", "post_prompt": ""},
            {**AUDIO, "process_results": Function("documents.librispeech")},
        )
        for part in ("test_clean", "test_other")
    ),
    "wenetspeech": tuple(
        Task(
            f"wenet_speech_{part}",
            f"wenet_speech/wenet_speech_{part}.yaml",
            "mer",
            part,
            256,
            {"pre_prompt": "", "post_prompt": "", "audio_column": "audio", "source_text_column": "text"},
            {**AUDIO, "doc_to_visual": Function("documents.audio")},
        )
        for part in ("test_net", "test_meeting")
    ),
    "omnibench": (
        Task(
            "omni_bench",
            "omni_bench/omni_bench.yaml",
            "accuracy",
            "train",
            128,
            {"pre_prompt": "", "post_prompt": LETTER},
            {"process_docs": Function("documents.evaluation_part")},
        ),
    ),
}


def find_tasks(names: Iterable[str]) -> list[Task]:
    """The tasks of benchmarks, or of lmms-eval's names for parts of them; none twice."""
    single = {task.name: (task,) for tasks in BENCHMARKS.values() for task in tasks}
    known = {**BENCHMARKS, **single}
    tasks: dict[str, Task] = {}
    for name in names:
        if name not in known:
            raise OnPTQError(
                f"unknown benchmark {name!r}{did_you_mean(name, known)}; expected some of {', '.join(BENCHMARKS)}, or of "
                f"their parts: {', '.join(one for one in single if one not in BENCHMARKS)}"
            )
        tasks |= {task.name: task for task in known[name]}
    return list(tasks.values())


def local(data: Path, split: str) -> dict[str, Any]:
    """The fields of a task file for a local copy: a parquet file, a folder of them, or a saved `datasets` folder."""
    if (data / "dataset_dict.json").is_file():
        return {"dataset_path": str(data), "dataset_name": None, "dataset_kwargs": {"load_from_disk": True}}
    files = [data] if data.is_file() else sorted(data.rglob("*.parquet"))
    if not files:
        raise OnPTQError(f"{data} has no .parquet and no dataset_dict.json; expected one of them")
    kwargs = {"data_files": {split: [str(file) for file in files]}}
    return {"dataset_path": "parquet", "dataset_name": None, "dataset_kwargs": kwargs}


def local_copy(folder: Path, task: Task) -> Path:
    """Where the data of a task lie in a folder of local copies."""
    places = (folder / f"{task.name}.parquet", folder / task.name)
    place = next((one for one in places if one.exists()), None)
    if place is None:
        raise OnPTQError(
            f"{folder} has no data of {task.name}: expected {task.name}.parquet, or a folder {task.name} with .parquet "
            "files or a saved dataset"
        )
    return place.absolute()


def write_tasks(tasks: Iterable[Task], folder: Path, packaged: Path, functions: Path, data: Path | None) -> None:
    """Write the task files, and the functions they name, into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FUNCTIONS).write_bytes(functions.read_bytes())
    for task in tasks:
        fields = task.settings(packaged, None if data is None else local_copy(data, task))
        text = yaml.dump(fields, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10**6)
        (folder / f"{PREFIX}{task.name}.yaml").write_text(text, encoding="utf-8")
