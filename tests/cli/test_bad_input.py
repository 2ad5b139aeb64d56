"""Bad input at the command line: exit code 2, an error that says what, where and what is valid, and nothing lost."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from onptq.bank import States
from onptq.cli import app
from onptq.files import read_json
from onptq.run import Run, run_home
from onptq.zoo.random import write_random

TINY = {
    "rounds": 1,
    "init": "rtn",
    "data.prompts": 4,
    "data.holdout": 2,
    "follow.max_tokens": 8,
    "calibrate.epochs": 1,
    "calibrate.batch": 4,
    "calibrate.gamma": 0.2,
    "select.budget": 256,
    "compute.device": "cpu",
}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    return write_random("llama", folder, prompts=6, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512)


@pytest.fixture
def model(small: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(small, tmp_path / "model")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def arguments(
    model: object, out: Path, changes: Mapping[str, Any] | None = None, *more: object, prompts: object = None
) -> list[str]:
    options = [part for name, value in (TINY | dict(changes or {})).items() for part in ("--set", f"{name}={value}")]
    manifest = f"{model}/prompts.jsonl" if prompts is None else prompts
    line = ["quantize", model, "--out", out, "--calibration", manifest, "--no-verify", "--quiet", *options, *more]
    return [str(part) for part in line]


def call(*args: Any, **options: Any) -> Any:
    return CliRunner().invoke(app, arguments(*args, **options))


def snapshot(*folders: Path) -> dict[str, tuple[int, bytes]]:
    paths = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def assert_refused(done: Any, *expected: str) -> None:
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert (done.exit_code, done.stdout) == (2, "")
    assert error_of(done.stderr).startswith("error: ")
    assert "Traceback" not in done.stderr
    for text in expected:
        assert text in error_of(done.stderr)


def error_of(stderr: str) -> str:
    """What was printed after warnings."""
    lines = stderr.splitlines()
    return "\n".join(itertools.dropwhile(lambda line: line.startswith("warning: "), lines))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def write_manifest(folder: Path, *lines: object) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "more", "expected"),
    [
        ({"scheme": "int4"}, (), ("unknown scheme 'int4'", "W4A16, W8A8, W4A8, W4A6", "2 to 8 bits")),
        ({"scheme": "W9A8"}, (), ("weight bits must be 2 to 8", "got 9")),
        ({"scheme": "W4A8-asym"}, (), ("asymmetric weights are for weight-only schemes",)),
        ({"scheme": "W16A8"}, (), ("W16A8", "nothing to write", "expected W2 to W8")),
        ({"branch.horizn": 3}, (), ("unknown field 'branch.horizn'", "did you mean branch.horizon?")),
        ({"branch.horizon": 0}, (), ("branch.horizon = 0", "greater than or equal to 1")),
        ({"branch.horizon": "many"}, (), ("branch.horizon = 'many'", "valid integer")),
        ({"select.rule": "best"}, (), ("select.rule = 'best': unknown selection rule", "mismatch_near_miss")),
        (
            {},
            ("--preset", "papr"),
            ("unknown preset 'papr'", "did you mean paper?", "light, default, best, risk, paper"),
        ),
        ({}, ("--set", "rounds"), ("'rounds'", "expected field=value")),
        ({}, ("--method", "gtpq"), ("method = 'gtpq'", "did you mean gptq?", "expected one of onptq, static, uniform")),
        ({"init": "onptq"}, (), ("init = 'onptq': unknown base method", "expected one of rtn, search")),
    ],
)
def test_settings(
    changes: dict[str, Any], more: tuple[str, ...], expected: tuple[str, ...], small: Path, out: Path
) -> None:
    before = snapshot(small)
    assert_refused(call(small, out, changes, *more), *expected)
    assert not out.exists()
    assert snapshot(small) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(small: Path, out: Path) -> None:
    assert_refused(call(small, out, {"compute.device": "cuda"}), "'cuda'", "no usable GPU", "cpu, auto")
    assert not out.exists()


def test_a_group_size_that_does_not_divide_the_weights_names_the_linear(small: Path, out: Path) -> None:
    done = call(small, out, {"scheme": "W4A16-g48"})
    assert_refused(done, "layers.0.self_attn.q_proj", "64 input columns", "groups of 48")


# --- models ---------------------------------------------------------------------------------------------------------


def test_an_unsupported_family_is_named_with_those_that_work(model: Path, out: Path) -> None:
    edit(model / "config.json", lambda config: config.update(model_type="mistral"))
    assert_refused(call(model, out), "'mistral'", "qwen2_5_vl", "llama", "entry point of the group onptq.families")
    assert not out.exists()


INCOMPLETE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no config": (
        lambda model: (model / "config.json").unlink(),
        ("config.json is missing", "expected a checkpoint folder"),
    ),
    "broken config": (lambda model: (model / "config.json").write_text("{"), ("config.json is not valid JSON",)),
    "config of another shape": (
        lambda model: (model / "config.json").write_text("[1]"),
        ("config.json must hold a JSON object, got list",),
    ),
    "no weights": (
        lambda model: (model / "model.safetensors").unlink(),
        ("has neither model.safetensors nor", "expected a checkpoint in safetensors"),
    ),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), ("tokenizer.json",)),
    "no image processor": (
        lambda model: (model / "preprocessor_config.json").unlink(),
        ("preprocessor_config.json",),
    ),
    "broken generation config": (
        lambda model: (model / "generation_config.json").write_text("{"),
        ("generation_config.json",),
    ),
    "truncated weights": (
        lambda model: os.truncate(model / "model.safetensors", 100_000),
        ("model.safetensors",),
    ),
    "truncated header": (lambda model: os.truncate(model / "model.safetensors", 4), ("model.safetensors",)),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_an_incomplete_model_folder(name: str, model: Path, out: Path) -> None:
    spoil, expected = INCOMPLETE[name]
    spoil(model)
    before = snapshot(model)
    assert_refused(call(model, out, prompts=model / "prompts.jsonl"), *expected, str(model))
    assert snapshot(model) == before
    assert not (out / "config.json").exists()


def test_a_shard_that_the_index_names_and_the_folder_lacks(model: Path, out: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, model / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").unlink()
    (model / "model-00002-of-00002.safetensors").unlink()
    assert_refused(call(model, out), "model-00002-of-00002.safetensors", str(model))


def test_a_missing_tensor_is_named(model: Path, out: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    gone = next(name for name in sorted(tensors) if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file(
        {name: value for name, value in tensors.items() if name != gone}, model / "model.safetensors", {"format": "pt"}
    )
    assert_refused(call(model, out), "lack 1 tensors", "layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(value: float, model: Path, out: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    spoiled = next(name for name in sorted(tensors) if name.endswith("layers.1.self_attn.k_proj.weight"))
    tensors[spoiled][3, 5] = value
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert_refused(call(model, out), "layers.1.self_attn.k_proj.weight", "NaN or infinity", "expected finite")
    assert not (out / "config.json").exists()


@pytest.mark.slow
def test_after_a_model_is_repaired_the_same_command_works(small: Path, model: Path, out: Path) -> None:
    """The failed attempt computed nothing, so its folder must not stand in the way."""
    tensors = load_file(model / "model.safetensors")
    tensors[next(iter(sorted(tensors)))].view(-1)[0] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert_refused(call(model, out), "NaN")
    shutil.copy(small / "model.safetensors", model / "model.safetensors")
    done = call(model, out)
    assert done.exit_code == 0, done.stderr


def test_a_quantized_checkpoint_is_not_quantized_again(small: Path, out: Path, tmp_path: Path) -> None:
    assert call(small, tmp_path / "once", {"method": "rtn", "rounds": 0}).exit_code == 0
    before = snapshot(tmp_path / "once")
    done = call(tmp_path / "once", out, prompts=small / "prompts.jsonl")
    assert_refused(done, "already quantized (compressed-tensors)", "expected a dense checkpoint")
    assert not out.exists()
    assert snapshot(tmp_path / "once") == before


@pytest.mark.slow
def test_a_hub_id_without_a_network(out: Path, small: Path) -> None:
    """In a process of its own: the switch is read when the hub client is imported."""
    line = arguments("nobody/no-such-model", out, prompts=small / "prompts.jsonl")
    done = subprocess.run(
        [sys.executable, "-c", "from onptq.cli import main; main()", *line],
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot fetch 'nobody/no-such-model' from the hub")
    assert "Traceback" not in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("name", ["nowhere", "/no/such/folder", "./a/b", "a/b/c"])
def test_a_model_that_is_neither_a_folder_nor_a_hub_id(name: str, out: Path, small: Path) -> None:
    done = call(name, out, prompts=small / "prompts.jsonl")
    assert_refused(done, repr(name), "neither a folder here nor a hub id", "expected a checkpoint folder or owner/name")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere", "'nowhere' is neither a folder here nor a hub id; expected"),
        ("nowhere/", "'nowhere/' is neither a folder here nor a hub id; expected"),
        ("qwen2.5-vl", "nor a hub id (did you mean zoo:qwen2.5-vl?); expected"),
        ("zoo:qwen2.5vl", "did you mean zoo:qwen2.5-vl?"),
    ],
)
def test_the_model_is_looked_up_before_prompts_are_demanded(name: str, expected: str, out: Path) -> None:
    assert_refused(CliRunner().invoke(app, ["quantize", name, "--out", str(out)]), expected)
    assert not out.exists()


def test_a_quantized_folder_is_refused_before_prompts_are_demanded(model: Path, out: Path) -> None:
    edit(model / "config.json", lambda config: config.update(quantization_config={"quant_method": "gptq"}))
    assert_refused(CliRunner().invoke(app, ["quantize", str(model), "--out", str(out)]), "already quantized (gptq)")


# --- links in a model folder ----------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder of the user's that is no part of the model."""
    folder = tmp_path / "home"
    (folder / "deep").mkdir(parents=True)
    for path in (folder / "id_rsa", folder / "deep" / "token"):
        path.write_text("a secret of the user")
    return folder


def carried(out: Path) -> list[str]:
    """The files of the checkpoint with the user's secret in them."""
    return [str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


RTN = {"method": "rtn", "rounds": 0}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["docs", "assets/docs"])
def test_a_link_to_a_folder_carries_nothing_into_the_checkpoint(
    place: str, model: Path, out: Path, secret: Path
) -> None:
    link = model / place
    link.parent.mkdir(exist_ok=True)
    (link.parent / "NOTICE").write_text("an ordinary file beside it")
    link.symlink_to(secret, target_is_directory=True)
    done = call(model, out, RTN)
    assert done.exit_code == 0, done.stderr
    assert carried(out) == []
    assert not (out / place).exists()
    assert (out / link.parent.relative_to(model) / "NOTICE").read_text() == "an ordinary file beside it"


@pytest.mark.parametrize("place", ["LICENSE", "assets/LICENSE", "tokenizer.json"])
def test_a_link_to_a_file_outside_is_refused_by_name(place: str, model: Path, out: Path, secret: Path) -> None:
    link = model / place
    link.parent.mkdir(exist_ok=True)
    target = secret / "id_rsa"
    if link.exists():
        target = Path(shutil.move(link, secret / link.name))
    link.symlink_to(target)
    assert_refused(call(model, out, RTN), str(link), f"is a link to {target}", "outside the model folder")
    assert not out.exists()


@pytest.mark.slow
def test_a_corrected_copy_carries_no_files_from_elsewhere_either(small: Path, tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "quantized"
    assert call(small, folder, RTN).exit_code == 0
    edit(folder / "config.json", lambda config: config["quantization_config"]["ignore"].append("no.such.module"))
    (folder / "docs").symlink_to(secret, target_is_directory=True)
    done = CliRunner().invoke(app, ["inspect", str(folder), "--fix", str(tmp_path / "fixed")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "fixed" / "config.json").exists()
    assert carried(tmp_path / "fixed") == []
    (folder / "LICENSE").symlink_to(secret / "id_rsa")
    done = CliRunner().invoke(app, ["inspect", str(folder), "--fix", str(tmp_path / "again")])
    assert_refused(done, str(folder / "LICENSE"), "outside the model folder")
    assert not (tmp_path / "again").exists()


def test_a_link_within_the_model_folder_becomes_a_file(model: Path, out: Path) -> None:
    (model / "texts").mkdir()
    (model / "texts" / "license.txt").write_text("Apache-2.0")
    (model / "LICENSE").symlink_to(Path("texts") / "license.txt")
    done = call(model, out, RTN)
    assert done.exit_code == 0, done.stderr
    assert (out / "LICENSE").read_text() == "Apache-2.0"
    assert not (out / "LICENSE").is_symlink()


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ("mine.jsonl has no prompts", "expected at least one line")),
        (["", "  "], ("mine.jsonl has no prompts",)),
        ([{"text": "a"}, "", '{"text": '], ("mine.jsonl line 3", "not valid JSON", "expected one JSON object")),
        ([{"text": "a"}, "", {"txt": "b"}], ("mine.jsonl line 3", "unknown column 'txt'", "did you mean text?")),
        ([{"id": "x"}], ("mine.jsonl line 1 (id 'x')", "exactly one of `messages`, `conversations`, `text`")),
        ([{"text": "a", "image": "gone.png"}], ("mine.jsonl line 1", "image 'gone.png' not found")),
        ([{"text": "a", "image": "broken.png"}], ("mine.jsonl line 1", "image 'broken.png' cannot be decoded")),
        ([{"text": "a", "image": "half.png"}], ("mine.jsonl line 1", "image 'half.png' cannot be decoded")),
        ([{"text": "a", "audio": "a.wav"}], ("mine.jsonl line 1", "has audio", "takes only image, text")),
        ([{"id": 1, "text": "a"}, {"id": 1, "text": "b"}], ("line 2", "already taken by line 1")),
    ],
    ids=[
        "empty", "blank", "broken line", "unknown field", "no text", "missing image", "unreadable image",
        "truncated image", "audio", "two alike",
    ],
)  # fmt: skip
def test_manifests(lines: list[object], expected: tuple[str, ...], small: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"not an image")
    Image.effect_noise((64, 64), 50).save(tmp_path / "half.png")
    os.truncate(tmp_path / "half.png", 1500)
    manifest = write_manifest(tmp_path, *lines)
    assert_refused(call(small, out, prompts=manifest), *expected)
    assert not out.exists()


@pytest.mark.parametrize("name", ["gone.jsonl", "prompts.txt"])
def test_a_manifest_that_cannot_be_one(name: str, small: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("hello")
    assert_refused(call(small, out, prompts=tmp_path / name), name)
    assert not out.exists()


def test_a_held_out_manifest_is_checked_alike(small: Path, out: Path, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"text": "a", "image": "gone.png"})
    assert_refused(call(small, out, None, "--holdout", manifest), "mine.jsonl line 1", "gone.png")
    assert not out.exists()


@pytest.mark.parametrize("method", ["static", "onptq"])
def test_a_method_that_learns_needs_prompts(method: str, small: Path, out: Path) -> None:
    done = CliRunner().invoke(app, ["quantize", str(small), "--out", str(out), "--method", method])
    assert_refused(done, f"method {method} needs --calibration")
    assert "hub" not in done.stderr
    assert not out.exists()


def test_nothing_is_fetched_before_the_prompts_are_given(out: Path) -> None:
    done = CliRunner().invoke(app, ["quantize", "owner/name", "--out", str(out)])
    assert_refused(done, "method onptq needs --calibration", "'owner/name' is no folder here")


def test_images_for_a_text_model(text_model: Path, small: Path, out: Path) -> None:
    assert_refused(call(text_model, out, prompts=small / "prompts.jsonl"), "line 1", "has image", "takes only text")
    assert not out.exists()


def test_a_prompt_longer_than_the_context_is_named(model: Path, out: Path, tmp_path: Path) -> None:
    def shorten(config: dict[str, Any]) -> None:
        config.get("text_config", config)["max_position_embeddings"] = 64

    edit(model / "config.json", shorten)
    long = {"id": "a novel", "text": " ".join(["word"] * 80)}
    manifest = write_manifest(tmp_path, {"id": "short", "text": "Hi"}, long)
    done = call(model, out, {"data.prompts": 2, "data.holdout": 0}, prompts=manifest)
    assert_refused(
        done, "'a novel'", "tokens long", "context of 64", "max_position_embeddings", "expected a shorter prompt"
    )
    assert not (out / "config.json").exists()


def test_bad_prompts_can_be_skipped(model: Path, out: Path, tmp_path: Path) -> None:
    def shorten(config: dict[str, Any]) -> None:
        config.get("text_config", config)["max_position_embeddings"] = 64

    edit(model / "config.json", shorten)
    long = {"id": "a novel", "text": " ".join(["word"] * 80)}
    good = [{"text": f"Number {number}"} for number in range(4)]
    control = {"text": "Say <|im_end|><|im_start|>system"}
    manifest = write_manifest(tmp_path, good[0], long, "{", control, *good[1:])
    sizes = {"data.prompts": 3, "data.holdout": 1}
    assert_refused(call(model, out, sizes, "--on-bad-prompt", "ignore", prompts=manifest), "expected one of fail, skip")
    done = call(model, out, sizes, "--on-bad-prompt", "skip", prompts=manifest)
    assert done.exit_code == 0, done.stderr
    shown = " ".join(done.stderr.split())
    assert "3 bad prompts are skipped" in shown
    assert "line 2 (id 'a novel')" in shown
    assert "line 3: not valid JSON" in shown
    assert "line 4: prompt '3' (mine.jsonl line 4): its text contains <|im_end|>, a special token" in shown
    assert sorted(pq.read_table(run_home(out) / "prompts.parquet").column("id").to_pylist()) == ["0", "4", "5", "6"]
    assert [" ".join(why.split()) in shown for why in read_json(run_home(out) / "skipped.json")] == [True] * 3


@pytest.mark.slow
def test_a_special_token_in_a_prompt_is_named_and_kept_on_demand(small: Path, out: Path, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, {"id": "odd", "text": "Say <|im_end|>"}, *({"text": f"{n}"} for n in range(4)))
    sizes = {"data.prompts": 4, "data.holdout": 1, "data.holdout_share": 0.25}
    assert_refused(call(small, out, sizes, prompts=manifest), "prompt 'odd' (mine.jsonl line 1)", "<|im_end|>")
    done = call(small, out, sizes | {"data.special_tokens": "keep"}, prompts=manifest)
    assert done.exit_code == 0, done.stderr


@pytest.mark.slow
def test_held_out_prompts_that_calibrate_are_left_out_with_a_warning(small: Path, out: Path) -> None:
    done = call(small, out, {"data.prompts": 3}, "--holdout", small / "prompts.jsonl")
    assert done.exit_code == 0, done.stderr
    assert "3 held-out prompts are left out: they are calibration prompts too" in " ".join(done.stderr.split())
    rows = pq.read_table(run_home(out) / "prompts.parquet").to_pylist()
    assert [row["role"] for row in rows] == ["calibration"] * 3 + ["holdout"] * 3
    assert len({row["id"] for row in rows}) == 6
    done = call(small, out.with_name("all"), {"data.prompts": 6}, "--holdout", small / "prompts.jsonl")
    assert_refused(done, "all 6 held-out prompts are calibration prompts too; expected others")


def test_the_command_says_how_many_prompts_it_uses(small: Path, out: Path) -> None:
    line = [part for part in arguments(small, out, {"data.prompts": 3}, "--json") if part != "--quiet"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.stderr
    assert "3 prompts calibrate and 2 are held out, of " in done.output


def test_after_a_prompt_is_shortened_the_same_command_works(model: Path, out: Path, tmp_path: Path) -> None:
    """Nothing was computed from the prompts that did not fit, so their run must not stand in the way."""

    def shorten(config: dict[str, Any]) -> None:
        config.get("text_config", config)["max_position_embeddings"] = 64

    edit(model / "config.json", shorten)
    manifest = write_manifest(tmp_path, {"id": "a novel", "text": " ".join(["word"] * 80)}, {"text": "Hi"})
    sizes = {"data.prompts": 2, "data.holdout": 0}
    assert_refused(call(model, out, sizes, prompts=manifest), "'a novel'")
    write_manifest(tmp_path, {"id": "a novel", "text": "Once"}, {"text": "Hi"})
    done = call(model, out, sizes, prompts=manifest)
    assert done.exit_code == 0, done.stderr


# --- critical sets that are too small: no error ---------------------------------------------------------------------


def test_a_budget_larger_than_the_candidates_takes_all_of_them(small: Path, out: Path) -> None:
    assert call(small, out, {"select.budget": 100_000}).exit_code == 0
    states = States.read(run_home(out) / "rounds/0/bank.parquet")
    assert 0 < states.candidates.sum() < len(states)
    assert (states.critical == states.candidates).all()
    assert states.weight.sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("over", "what"), [("critical", "anchor alone"), ("visited", "anchor and the response KL")])
def test_no_candidates_at_all_warns_and_follows_what_is_left(small: Path, out: Path, over: str, what: str) -> None:
    """Eight bits change none of the first two tokens, and no erosion counts below the tolerance."""
    changes = {"scheme": "W8A16", "follow.max_tokens": 2, "risk.near_miss_tol": 1e6, "calibrate.keep": "last"}
    done = call(small, out, changes | {"init": "search", "calibrate.codes": "free", "calibrate.response_over": over})
    assert done.exit_code == 0
    assert "warning: round 1: no candidate states" in done.stderr
    assert f"the update follows the {what}" in done.stderr
    states = States.read(run_home(out) / "rounds/0/bank.parquet")
    assert not states.candidates.any()
    assert not states.critical.any()
    assert not states.weight.any()
    moved, start = (load_file(run_home(out) / f"{name}.safetensors") for name in ("rounds/0/theta", "init"))
    assert any(not torch.equal(moved[name], start[name]) for name in start)


@pytest.mark.slow
def test_a_model_that_quantization_does_not_change_at_all(model: Path, out: Path) -> None:
    """All linears are zero: nothing erodes, and no row has a largest weight to take its step from."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if "visual" not in name and name.endswith("_proj.weight"):
            tensor.zero_()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    done = call(model, out, {"init": "search+signround", "init_steps": 4, "calibrate.keep": "last"})
    assert done.exit_code == 0, done.stderr or repr(done.exception)
    assert "no candidate states" in done.stderr
    states = States.read(run_home(out) / "rounds/0/bank.parquet")
    assert (states.erosion.max(), states.risk.max()) == (0, 0)
    assert states.js.max() < 1e-6
    for name in ("init.safetensors", "rounds/0/theta.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(run_home(out) / name).values())


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_something_else_is_left_alone(small: Path, out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    before = snapshot(out)
    assert_refused(call(small, out), str(out), "not empty and not a run", "choose another --out")
    assert snapshot(out) == before


def test_a_file_in_the_place_of_the_folder_is_left_alone(small: Path, out: Path) -> None:
    out.write_text("years of work")
    assert_refused(call(small, out), f"{out} is a file; expected a folder", "choose another --out")
    assert out.read_text() == "years of work"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--out", "thesis"), "thesis is a file"),
        (("--out", "full"), "not empty and not a run"),
        (("--out", "taken"), "in use by another process"),
        (("--calibration", "gone.jsonl"), "cannot read the manifest gone.jsonl"),
        (("--holdout", "gone.jsonl"), "cannot read the manifest gone.jsonl"),
        pytest.param(
            ("--device", "cuda"),
            "no usable GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
    ],
)
def test_what_is_noticed_at_once_is_refused_before_anything_is_drawn_or_hashed(
    more: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis").write_text("years of work")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with Run.open(tmp_path / "taken", {"recipe": {}}):
        before = snapshot(tmp_path)
        done = CliRunner().invoke(app, ["quantize", "zoo:qwen2.5-vl", *more])
        assert_refused(done, expected)
        assert "Draw" not in done.stderr
        assert "Hash" not in done.stderr
        assert snapshot(tmp_path) == before


def test_the_folder_of_another_run_is_left_alone_and_the_difference_shown(small: Path, out: Path) -> None:
    assert call(small, out, {"method": "rtn", "rounds": 0}).exit_code == 0
    before = snapshot(out)
    done = call(small, out, {"method": "rtn", "rounds": 0, "scheme": "W8A8"})
    assert_refused(done, "holds another run", "recipe.scheme: 'W4A8' -> 'W8A8'", "Nothing was changed")
    assert snapshot(out) == before


def test_the_model_folder_itself_is_no_place_for_the_run(model: Path) -> None:
    before = snapshot(model)
    assert_refused(call(model, model), str(model), "choose another --out")
    assert snapshot(model) == before


def test_a_folder_inside_the_model_is_refused_before_anything_is_computed(model: Path) -> None:
    before = snapshot(model)
    assert_refused(call(model, model / "quantized"), str(model / "quantized"), "outside")
    assert snapshot(model) == before
    assert not (model / "quantized").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_may_not_be_written(small: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert_refused(call(small, tmp_path / "out"), "Permission denied")
    finally:
        tmp_path.chmod(0o700)


# --- a full disk ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "out"
    assert call(small, out).exit_code == 0
    return out


def results(out: Path) -> dict[str, bytes]:
    """Every file of the checkpoint and of its run, except those that hold times."""
    places = [path for folder in (out, run_home(out)) for path in folder.rglob("*") if path.is_file()]
    varying = (
        "log.jsonl",
        "summary.json",
        "SHA256SUMS",
        "page.html",
        "receipt.json",
        "differences.md",
        "differences.json",
    )
    return {str(path.relative_to(out.parent)): path.read_bytes() for path in places if path.name not in varying}


@pytest.fixture
def disk(tmpfs: Callable[[str], Path]) -> Path:
    """A file system with room for one small run."""
    return tmpfs("2m")


def fill(disk: Path, leave: int) -> Path:
    ballast, pages = disk / "ballast", shutil.disk_usage(disk).free // 4096
    ballast.write_bytes(bytes(4096 * (pages - leave)))
    return ballast


@pytest.mark.slow
@pytest.mark.parametrize("pages", [0, 4, 12, 22, 120])  # fails later with every page of room
def test_a_full_disk_is_explained_and_the_same_command_continues_once_there_is_room(
    pages: int, disk: Path, small: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = disk / "out"
    ballast = fill(disk, leave=pages)
    monkeypatch.setattr("onptq.check.job.check_room", lambda *_: None)  # as if others filled the disk meanwhile
    done = call(small, out)
    assert_refused(done, "cannot write ", str(out), "free there")
    assert "No space left" in done.stderr or "not enough room" in done.stderr
    finished = {
        name: content
        for name, content in results(out).items()
        if not Path(name).name.startswith(".") and not name.startswith("out-run/init/")  # blocks of an unfinished init
    }
    expected = results(reference)
    assert {name: content for name, content in finished.items() if expected[name] != content} == {}
    assert not (out / "config.json").exists()
    assert not (run_home(out) / "summary.json").exists()
    ballast.unlink()
    done = call(small, out)
    assert done.exit_code == 0, done.stderr
    assert results(out) == expected


def test_a_disk_without_room_for_the_checkpoint_is_noticed_before_any_work(disk: Path, small: Path) -> None:
    ballast = fill(disk, leave=40)
    assert_refused(call(small, disk / "out"), "cannot write the checkpoint to", "not enough room", "are free there")
    assert list(disk.iterdir()) == [ballast]


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_explained_and_the_run_goes_on_where_it_may(
    small: Path, out: Path, reference: Path
) -> None:
    limit = 12_000  # theta is larger, what comes before it is not
    source = (
        "import resource, signal, sys\n"
        "from onptq.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "main()\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", source, *arguments(small, out)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert error_of(done.stderr).startswith("error: cannot write ")
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run_home(out) / "summary.json").exists()
    done = call(small, out)
    assert done.exit_code == 0, done.stderr
    assert results(out) == results(reference)


# --- hostile model folders ------------------------------------------------------------------------------------------


def replace_with_pipe(name: str) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return change


def in_json(name: str, **changes: Any) -> Callable[[Path], object]:
    return lambda model: edit(model / name, lambda content: content.update(changes))


def in_text_config(**changes: Any) -> Callable[[Path], object]:
    return lambda model: edit(model / "config.json", lambda c: c.get("text_config", c).update(changes))


def template(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "chat_template.json").write_text(json.dumps({"chat_template": text}))


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = {"shortest_edge": 10**12, "longest_edge": 10**13}
INDEX = "model.safetensors.index.json"
HOSTILE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "config is a pipe": (replace_with_pipe("config.json"), ("config.json is not a regular file",)),
    "tokenizer settings are a pipe": (
        replace_with_pipe("tokenizer_config.json"),
        ("tokenizer_config.json is not a regular file",),
    ),
    "a tower of a billion layers": (
        lambda model: edit(model / "config.json", lambda c: c["vision_config"].update(depth=10**9)),
        ("config.json", "1,000,000,000 layers"),
    ),
    "heads below zero": (in_text_config(num_attention_heads=-2), ("config.json says num_attention_heads is -2",)),
    "shared heads that are no number": (
        in_text_config(num_key_value_heads={"a": 1}),
        ("num_key_value_heads is {'a': 1}",),
    ),
    "a longest text that is text": (
        in_json("tokenizer_config.json", model_max_length="x"),
        ("tokenizer_config.json", "model_max_length is 'x'", "expected a number"),
    ),
    "heads that are text": (in_text_config(num_attention_heads="2"), ("num_attention_heads is '2'",)),
    "a factor that is text": (
        in_text_config(rope_scaling={"factor": "x", "original_max_position_embeddings": 5}),
        ("config.json", "'factor': 'x'", "expected numbers"),
    ),
    "a shard's name too long for any disk": (
        lambda model: (model / INDEX).write_text(json.dumps({"weight_map": {"a": "a" * 5000}})),
        (INDEX, "must name files beside it"),
    ),
    "template without its key": (
        lambda model: (model / "chat_template.json").write_text("{}"),
        ("chat_template.json", "`chat_template`"),
    ),
    "broken template": (
        lambda model: (model / "chat_template.json").write_text("{"),
        ("chat_template.json is not readable JSON",),
    ),
    "template that is a list": (
        lambda model: (model / "chat_template.json").write_text("[1]"),
        ("chat_template.json", "`chat_template`"),
    ),
    "template without an end": (template(LOOPS), ("prompt 'p001'", "it takes more than 0.2 s")),
    "template that steers the terminal": (
        template("{{ raise_exception('\x1b]0;title\x07\x1b[2J') }}"),
        ("the chat template refuses its messages: \\x1b]0;title\\x07\\x1b[2J",),
    ),
    "images enlarged without bound": (
        in_json("preprocessor_config.json", min_pixels=10**12, max_pixels=10**13, size=HUGE),
        ("preprocessor_config.json", "enlarges images to 1000000000000 pixels"),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_folder_is_refused_by_name(
    name: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onptq.models.templates.SECONDS", 0.2)
    spoil, expected = HOSTILE[name]
    spoil(model)
    assert_refused(call(model, out), *expected)
    assert not (out / "config.json").exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("verify", "a tower of a billion layers"),
        ("verify", "template without an end"),
        ("plan", "heads below zero"),
        ("plan", "broken template"),
        ("inspect", "config is a pipe"),
        ("verify", "images enlarged without bound"),
    ],
)
def test_other_commands_end_with_the_defect_too(
    command: str, name: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onptq.models.templates.SECONDS", 0.2)
    HOSTILE[name][0](model)
    done = CliRunner().invoke(app, [command, str(model), *(["--scheme", "W4A8"] if command == "plan" else [])])
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code in (1, 2)


ODD: dict[str, Callable[[Path], object]] = {
    "method": in_json("config.json", quantization_config={"quant_method": [1]}),
    "architectures": in_json("config.json", architectures=5),
    "token without text": in_json("tokenizer.json", added_tokens=[{"id": 1}]),
}


@pytest.mark.parametrize("name", ODD)
def test_inspect_describes_a_folder_with_odd_types(name: str, model: Path) -> None:
    ODD[name](model)
    done = CliRunner().invoke(app, ["inspect", str(model)])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)


def test_metadata_that_no_reader_opens_are_a_defect(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + length]) | {"__metadata__": {"a": 1}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    done = CliRunner().invoke(app, ["inspect", str(model)])
    assert done.exit_code == 1
    assert "metadata that are not text" in done.output
