"""`onptq plan` as its user sees it: the verdict first, then the numbers; exit code 1 where a run cannot start."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onptq.checkpoint.served_by_vllm import VLLM
from onptq.checkpoint.serving import TRANSFORMERS
from onptq.cli import app

W3A8_SENTENCE = f"{VLLM} may not serve it (nobody has tried it): no kernel is known to run it: simulation only"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_verdict_comes_first_and_the_rest_fits_into_100_columns(small: Path, tmp_path: Path) -> None:
    result = run(small, "--scheme", "W4A8", "--prompt-tokens", 40, "--out", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 0, result.output
    first, *others = result.output.splitlines()
    assert re.fullmatch(r"fits: needs \S+ \wiB of \S+ \wiB free memory on .+; takes .+", first)
    assert max(map(len, others)) <= 100
    for text in ("decoder linears", "vision tower", "as it is", "Calibrate", "run files beside it", "of 40 tokens"):
        assert text in result.output
    assert "--linear-backend humming" in result.output
    assert f"{TRANSFORMERS} simulates it" in result.output
    assert not (tmp_path / "out").exists()


def test_quiet_is_the_verdict_alone(small: Path) -> None:
    result = run(small, "--quiet", "--gpu", "a100-40g", "--prompt-tokens", 40)
    assert result.exit_code == 0
    (line,) = result.output.splitlines()
    assert " of 39.4 GiB free GPU memory on a100-40g; takes " in line
    assert run(small, "--quiet", "--json").exit_code == 2


def test_several_gpus_are_data_parallel(small: Path) -> None:
    options = ("--gpus", 4, "--gpu-memory", 80, "--prompt-tokens", 40)
    result = run(small, *options)
    assert result.exit_code == 0, result.output
    assert " on each of 4 a100-80g (data parallel); takes " in result.output.splitlines()[0]
    assert "On 4 x a100-80g in bfloat16" in result.output
    record = json.loads(run(small, *options, "--json").stdout)
    assert (record["strategy"], record["machine"]["gpus"]) == ("data parallel", 4)
    alone = run(small, "--gpus", 2, "--device", "cpu")
    assert alone.exit_code == 1
    assert "--gpus 2: this machine has 0 for this recipe" in words(alone.output)


def test_the_verdict_comes_first_where_it_is_no(small: Path) -> None:
    result = run(small, "--scheme", "W4A16-g48")
    assert result.exit_code == 1
    assert result.output.startswith("cannot run: ")
    assert "groups of 48 do not divide" in result.output.splitlines()[0]
    assert VLLM not in result.output, "who serves what cannot be made?"


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_broken_folder_is_one_line_of_reasons_and_exit_code_1(small: Path, tmp_path: Path, missing: str) -> None:
    folder = shutil.copytree(small, tmp_path / "broken")
    for path in folder.glob(missing.replace(".json", "*") if missing.startswith("tokenizer") else missing):
        path.unlink()
    result = run(folder, "--quiet")
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    assert result.output.startswith("cannot run: ")


def test_a_model_that_is_nowhere_is_an_error() -> None:
    result = run("someone/some-model")
    assert result.exit_code == 2
    assert "uses no network" in result.stderr


def test_everything_is_in_the_json(small: Path) -> None:
    result = run(small, "--scheme", "W8A8", "--init", "search", "--set", "rounds=1", "--device", "cpu", "--json")
    record = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (record["scheme"], record["init"], record["can_run"]) == ("W8A8", "search", True)
    assert (record["refusals"], record["verdict"][:5]) == ([], "fits:")
    calibrate = next(phase for phase in record["phases"] if phase["name"] == "Calibrate")
    assert calibrate["host_bytes"] == sum(calibrate["host"].values())
    assert {"weights", "dense targets", "weights in the graph", "logits", "process"} <= set(calibrate["host"])
    assert calibrate["seconds"] > 0
    assert record["machine"]["dtype"] == "float32"
    assert {"server", "hardware", "verdict", "kernel", "switch"} <= set(record["serving"][0])


def test_a_manifest_is_counted(small: Path, tmp_path: Path) -> None:
    manifest, held_out = small / "prompts.jsonl", tmp_path / "held-out.jsonl"
    held_out.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("One?", "Two?", "One?")))
    result = run(small, "--gpu", "l4", "--calibration", manifest, "--holdout", held_out)
    assert result.exit_code == 2, "l4 may be l4-24g or l40s-48g"
    result = run(small, "--gpu", "l4-24g", "--calibration", manifest, "--holdout", held_out)
    assert result.exit_code == 0, result.output
    assert "6 prompts calibrate and 2 are held out, of 9" in result.output
    assert "warning: 1 prompts are left out: the same text and media are there already" in words(result.output)
    same = run(small, "--gpu", "l4-24g", "--calibration", manifest, "--holdout", manifest)
    assert same.exit_code == 1
    assert "all 6 held-out prompts are calibration prompts too" in words(same.output)
    assert "l4-24g by its data sheet" in result.output


def test_a_model_of_the_zoo_is_planned_with_its_own_calibration_set() -> None:
    result = run("zoo:qwen2.5-vl", "--gpu", "h200", "--json")
    record = json.loads(result.stdout)
    assert (record["work"]["prompts"], record["work"]["holdout"]) == (48, 64), "the preset zoo"
    assert 16 < record["work"]["prompt_tokens"] <= record["work"]["longest_prompt"] < 100
    assert "48 prompts calibrate and 64 are held out, of 112 (" in record["assumptions"][0]
    longer = json.loads(run("zoo:qwen2.5-vl", "--gpu", "h200", "--prompt-tokens", 300, "--json").stdout)
    assert longer["work"]["prompt_tokens"] == 300
    assert longer["work"]["longest_prompt"] is None


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [("W3A8", W3A8_SENTENCE), ("W4A6", f"{VLLM} refuses it (seen on such hardware): no compressed-tensors scheme")],
)
def test_who_serves_a_rare_scheme_is_said_in_a_sentence(small: Path, scheme: str, sentence: str) -> None:
    result = run(small, "--scheme", scheme, "--gpu", "h200")
    assert sentence in words(result.output)
