"""`onptq eval`: task files, local copies, runs of the tool that end well, badly or twice; what runs inside lmms-eval.

The tool itself runs in `python clients/benchmarks.py`. Here its place has a program that writes a recorded log.
"""

from __future__ import annotations

import io
import json
import sys
import wave
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from onptq.cli import app
from onptq.errors import OnPTQError
from onptq.evaluate.sample_logs import read_arm
from onptq.harness.benchmarks import BENCHMARKS, Function, find_tasks, write_tasks
from onptq.harness.environment import MARK, Environment
from onptq.harness.run import INSIDE, REQUIREMENTS, Arm, Evaluation, Settings, find_environment, pinned_view
from onptq.progress import QuietReporter

LOGS = Path(__file__).parents[1] / "evaluate/sample_logs/dense"
PACKAGED = Path("/packages/lmms_eval/tasks")

# Writes what the tool writes for one task: the recorded log, and the results that go with it.
TOOL = """
import json, os, pathlib, sys
words = dict(zip(sys.argv, sys.argv[1:]))
task = words["--tasks"]
with open({calls!r}, "a") as file:
    kept = {{name: os.environ.get(name) for name in ("PYTHONPATH", "LMMS_EVAL_PLUGINS", "HF_HUB_OFFLINE")}}
    file.write(json.dumps([sys.argv[1:], kept]) + "\\n")
if "fail" in words["--model_args"]:
    sys.exit("CUDA is out of memory")
out = pathlib.Path(words["--output_path"]) / "model"
out.mkdir(parents=True)
log = pathlib.Path({logs!r}) / (task.removeprefix("onptq_") + ".jsonl")
of_lm_eval = f"samples_{{task}}_2026-11-19T10-15-00.1.jsonl"
name = f"20261119_101500_samples_{{task}}.jsonl" if sys.argv[2] == "lmms_eval" else of_lm_eval
(out / name).write_text(log.read_text())
(out / "20261119_101500_results.json").write_text(json.dumps({{"results": {{task: {{"alias": task, "score,none": 0.5}}}}}}))
"""


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], list[Any]]:
    """The calls of the tool: words, and some variables."""
    path = tmp_path / "calls.jsonl"
    return lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """A finished environment whose python is the recorded tool."""
    made = Environment(tmp_path / "environment", REQUIREMENTS)
    made.python.parent.mkdir(parents=True)
    (made.folder / "lib/python3/site-packages").mkdir(parents=True)
    program = TOOL.format(calls=str(tmp_path / "calls.jsonl"), logs=str(LOGS))
    made.python.write_text(f"#!{sys.executable}\n{program}", encoding="utf-8")
    made.python.chmod(0o755)
    (made.folder / MARK).write_text(json.dumps({"requirements": made.wanted(), "whole": True}), encoding="utf-8")
    return made


@pytest.fixture
def evaluation(environment: Environment, tmp_path: Path) -> Callable[..., Evaluation]:
    def make(arm: Arm | None = None, **settings: Any) -> Evaluation:
        chosen = arm or Arm("model", tmp_path / "model")
        return Evaluation(tmp_path / "out", environment, chosen, Settings(**settings), QuietReporter())

    return make


class Loader(yaml.SafeLoader):
    """Reads `!function NAME` as the name."""


Loader.add_constructor("!function", lambda loader, node: Function(node.value))


def read_task(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader)
    return found


# --- task files -------------------------------------------------------------------------------------------------------


def test_every_task_pins_prompt_limit_and_greedy_decoding(tmp_path: Path) -> None:
    tasks = find_tasks(BENCHMARKS)
    write_tasks(tasks, tmp_path, PACKAGED, INSIDE / "onptq_lmms/documents.py", None)
    functions = (tmp_path / "documents.py").read_text(encoding="utf-8")
    assert len(tasks) == 10
    for task in tasks:
        fields = read_task(tmp_path / f"onptq_{task.name}.yaml")
        assert fields["include"] == str(PACKAGED / task.file)
        assert list(fields["lmms_eval_specific_kwargs"]) == ["default"]  # no prompt of a model's own
        decoding = fields["generation_kwargs"]
        assert decoding == {
            "max_new_tokens": task.max_tokens,
            "temperature": 0,
            "do_sample": False,
            "num_beams": 1,
            "until": [],
        }
        named = [value.partition(".") for value in fields.values() if isinstance(value, Function)]
        assert all(module == "documents" and f"def {name}(" in functions for module, _, name in named)


def test_local_copies_are_a_file_a_folder_of_files_or_a_saved_dataset(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "tasks"
    (data / "ocrbench").mkdir(parents=True)
    (data / "textvqa_val").mkdir()
    (data / "mmmu_val.parquet").touch()
    (data / "ocrbench" / "b.parquet").touch()
    (data / "ocrbench" / "a.parquet").touch()
    (data / "textvqa_val" / "dataset_dict.json").touch()
    write_tasks(find_tasks(["mmmu", "ocrbench", "textvqa"]), out, PACKAGED, INSIDE / "onptq_lmms/documents.py", data)
    mmmu, ocrbench, textvqa = (
        read_task(out / f"onptq_{name}.yaml") for name in ("mmmu_val", "ocrbench", "textvqa_val")
    )
    assert mmmu["dataset_kwargs"] == {"data_files": {"validation": [str(data / "mmmu_val.parquet")]}}
    assert ocrbench["dataset_kwargs"]["data_files"]["test"] == [str(data / f"ocrbench/{name}.parquet") for name in "ab"]
    assert (textvqa["dataset_path"], textvqa["dataset_kwargs"]) == (str(data / "textvqa_val"), {"load_from_disk": True})
    with pytest.raises(OnPTQError, match=r"has no data of scienceqa_img: expected scienceqa_img.parquet"):
        write_tasks(find_tasks(["scienceqa"]), out, PACKAGED, INSIDE / "onptq_lmms/documents.py", data)
    (data / "scienceqa_img").mkdir()
    with pytest.raises(OnPTQError, match=r"has no .parquet and no dataset_dict.json"):
        write_tasks(find_tasks(["scienceqa"]), out, PACKAGED, INSIDE / "onptq_lmms/documents.py", data)


def test_tasks_are_found_by_benchmark_or_part_and_none_twice() -> None:
    parts = ["librispeech_test_clean", "librispeech_test_other"]
    assert [task.name for task in find_tasks(["librispeech"])] == parts
    assert [task.name for task in find_tasks([parts[1], "librispeech"])] == parts[::-1]
    with pytest.raises(
        OnPTQError, match=r"unknown benchmark 'mmu' \(did you mean mmmu\?\); expected some of mmmu, ocrbench"
    ):
        find_tasks(["mmu"])


# --- runs -------------------------------------------------------------------------------------------------------------


def test_each_task_is_a_process_with_its_log_and_a_second_run_does_none_again(
    evaluation: Callable[..., Evaluation], calls: Callable[[], list[Any]], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("mmmu_val", "ocrbench"):
        (data / f"{name}.parquet").touch()
    one = evaluation(limit=16, batch=2, device="cpu", model_arguments={"max_pixels": "9"})
    results = one.benchmarks(find_tasks(["mmmu"]), data)
    assert results["mmmu_val"]["results"] == {"mmmu_val": {"score": 0.5}}
    both = one.benchmarks(find_tasks(["mmmu", "ocrbench"]), data)
    assert list(both) == ["mmmu_val", "ocrbench"]
    (words, variables), (second, _) = calls()
    given = dict(pairwise(words))
    assert (given["-m"], given["--model"], given["--tasks"]) == ("lmms_eval", "onptq_folder", "onptq_mmmu_val")
    assert second[second.index("--tasks") + 1] == "onptq_ocrbench"
    assert given["--model_args"] == f"pretrained={tmp_path / 'model'},repetition_penalty=1.0,max_pixels=9"
    assert (given["--batch_size"], given["--limit"], given["--device"]) == ("2", "16", "cpu")
    assert variables == {"PYTHONPATH": str(INSIDE), "LMMS_EVAL_PLUGINS": "onptq_lmms", "HF_HUB_OFFLINE": "1"}
    assert set(read_arm(tmp_path / "out")) == {"mmmu_val", "ocrbench"}
    written = json.loads((tmp_path / "out/results.json").read_text())
    assert written["settings"]["repetition_penalty"] == 1.0
    assert written["pinned"]["ocrbench"]["generation_kwargs"]["max_new_tokens"] == 128
    assert str(tmp_path) not in json.dumps(written["pinned"])


def test_results_of_another_model_or_other_settings_are_kept(
    evaluation: Callable[..., Evaluation], tmp_path: Path
) -> None:
    evaluation().benchmarks(find_tasks(["ocrbench"]), None)
    for other in (evaluation(repetition_penalty=1.05), evaluation(Arm("other", tmp_path / "other"))):
        with pytest.raises(OnPTQError, match="has results of another model or of other settings"):
            other.benchmarks(find_tasks(["ocrbench"]), None)


def test_a_tool_that_fails_is_an_error_with_the_end_of_its_log(
    evaluation: Callable[..., Evaluation], calls: Callable[[], list[Any]]
) -> None:
    failing = evaluation(model_arguments={"fail": "1"})
    for count in (1, 2):  # nothing was kept, so it is run again
        with pytest.raises(OnPTQError, match=r"lmms_eval ended with code 1 on ocrbench; .*\nCUDA is out of memory"):
            failing.benchmarks(find_tasks(["ocrbench"]), None)
        assert len(calls()) == count


def test_a_path_with_a_comma_is_refused_before_the_tool_misreads_it(
    evaluation: Callable[..., Evaluation], calls: Callable[[], list[Any]], tmp_path: Path
) -> None:
    with pytest.raises(OnPTQError, match="has a comma or an equals sign"):
        evaluation(Arm("m", tmp_path / "a,b")).benchmarks(find_tasks(["ocrbench"]), None)
    assert calls() == []


def test_a_server_is_asked_by_the_model_for_servers(
    evaluation: Callable[..., Evaluation], calls: Callable[[], list[Any]]
) -> None:
    evaluation(Arm("w4a8", endpoint="http://127.0.0.1:1/v1")).benchmarks(find_tasks(["ocrbench"]), None)
    [(words, _)] = calls()
    assert words[words.index("--model") + 1] == "onptq_endpoint"
    assert words[words.index("--model_args") + 1] == "url=http://127.0.0.1:1/v1,model=w4a8,repetition_penalty=1.0"


def test_text_models_are_given_to_lm_eval_with_pinned_decoding(
    evaluation: Callable[..., Evaluation], calls: Callable[[], list[Any]], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "files").mkdir()
    results = evaluation(device="cpu").text_tasks(["colours"], tmp_path / "files")
    assert results["colours"]["results"] == {"colours": {"score": 0.5}}
    [(words, _)] = calls()
    assert words[:5] == ["-m", "lm_eval", "run", "--model", "hf"]
    assert words[words.index("--include_path") + 1] == str(tmp_path / "files")
    assert words[words.index("--model_args") + 1] == f"pretrained={tmp_path / 'out/model'},dtype=float32"
    assert not (tmp_path / "out/model").exists()
    assert set(read_arm(tmp_path / "out")) == {"colours"}


def test_a_pinned_view_links_the_checkpoint_and_replaces_how_it_decodes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    own = {"eos_token_id": [1, 2], "repetition_penalty": 1.05, "temperature": 0.1, "do_sample": True, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(own))
    view = pinned_view(folder, tmp_path / "view", 1.0)
    assert (view / "model.safetensors").read_bytes() == b"weights"
    pinned = json.loads((view / "generation_config.json").read_text())
    assert pinned == {"eos_token_id": [1, 2], "do_sample": False, "repetition_penalty": 1.0}
    assert json.loads((folder / "generation_config.json").read_text()) == own


# --- the environment and the command ----------------------------------------------------------------------------------


def test_an_environment_of_other_requirements_is_not_used(environment: Environment, tmp_path: Path) -> None:
    assert find_environment(environment.folder) == environment
    hook = tmp_path / "hook.py"
    hook.write_text("import sys\n")
    assert not Environment(environment.folder, REQUIREMENTS, hook).is_whole
    (environment.folder / MARK).write_text(json.dumps({"requirements": ["lmms-eval==0.1"], "whole": True}))
    with pytest.raises(OnPTQError, match="onptq eval --make-environment"):
        find_environment(environment.folder)


def command(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["eval", *map(str, words)])
    return result.exit_code, result.output


def test_the_command_evaluates_a_checkpoint_and_says_how_to_compare(environment: Environment, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "ocrbench.parquet").touch()
    shared = ("--environment", environment.folder, "--out", tmp_path / "out")
    code, printed = command("zoo:qwen2.5-vl", "--tasks", "ocrbench", "--data", data, *shared, "--device", "cpu")
    assert code == 0, printed
    assert "onptq compare --samples" in printed
    assert "0.5" in printed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["zoo:qwen2.5-vl"], "expected MODEL and --tasks, or --make-environment alone"),
        (["zoo:qwen2.5-vl", "--tasks", "mmu"], "unknown benchmark 'mmu'"),
        (["m", "--tasks", "mmmu", "--endpoint", "localhost"], "expected an address such as"),
    ],
)
def test_the_command_refuses(words: list[str], why: str, environment: Environment) -> None:
    code, printed = command(*words, "--environment", environment.folder)
    assert code == 2
    assert why in printed


def test_without_an_environment_the_command_says_how_to_make_it(tmp_path: Path) -> None:
    code, printed = command("zoo:qwen2.5-vl", "--tasks", "mmmu", "--environment", tmp_path)
    assert code == 2
    assert f"onptq eval --make-environment {tmp_path}" in " ".join(printed.split())


# --- inside lmms-eval -------------------------------------------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the plugin that needs nothing of lmms-eval."""
    monkeypatch.syspath_prepend(str(INSIDE))
    yield import_module("onptq_lmms.requests")
    for name in [name for name in sys.modules if name.startswith("onptq_lmms")]:
        del sys.modules[name]


def request(settings: Any) -> SimpleNamespace:
    return SimpleNamespace(args=("What?", settings, lambda doc: doc, 0, "t", "test"))


def clip(channels: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((channels, 2, 16000, 0, "NONE", ""))
        out.writeframes(np.repeat(np.array([0, 16384, -16384], "<i2"), channels).tobytes())
    return file.getvalue()


def test_media_of_every_kind_become_images_in_rgb_and_mono_samples(requests: Any) -> None:
    expected = np.array([0, 0.5, -0.5], np.float32)
    assert requests.read(Image.new("L", (2, 2))).mode == "RGB"
    for given in (
        {"bytes": clip(1), "path": "a.wav"},
        {"bytes": clip(2), "path": None},
        {"array": expected, "sampling_rate": 16000},
        {"array": np.stack([expected, expected]), "sampling_rate": 16000},
    ):
        assert requests.read(given) == pytest.approx(expected)
    with pytest.raises(ValueError, match="a task gave str as media"):
        requests.read("a.wav")


def test_a_question_has_the_tasks_limit_and_ends_at_its_stop_text(requests: Any) -> None:
    greedy = {"max_new_tokens": 5, "temperature": 0, "do_sample": False, "num_beams": 1, "until": ["\n\n"]}
    [one] = requests.questions([request(greedy)], {"t": {"test": [[Image.new("RGB", (1, 1))]]}})
    assert (one.text, one.max_tokens, len(one.images), one.audios) == ("What?", 5, 1, [])
    assert one.cut("A\n\nB") == "A"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_new_tokens": 5, "do_sample": True}, "samples or searches"),
        ({"max_new_tokens": 5, "temperature": 0.7}, "samples or searches"),
        ({"max_new_tokens": 5, "num_beams": 4}, "samples or searches"),
        ({"max_new_tokens": 5, "repetition_penalty": 1.2}, "no arm is given: repetition_penalty"),
        ({"temperature": 0}, "has no max_new_tokens"),
    ],
)
def test_settings_that_arms_do_not_share_are_refused(requests: Any, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        list(requests.questions([request(settings)], {"t": {"test": [[]]}}))
