"""`benchmarks/gpu_peers.py --tiny`: both tools get the same model and prompts, and the same phases count."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onptq.data.manifest import load_manifest, manifest_digest
from onptq.errors import OnPTQError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("gpu_peers", "gpu_calibration", "measured_run", "floors", "media_prompts", "profiled", "peers_report")
PEER_SCRIPTS = ("run", "peer_inputs", "calibration", "quantize_autoround", "time_autoround")
AUTOROUND_PYTHON = os.environ.get("AUTOROUND_PYTHON", sys.executable)
HAS_AUTOROUND = "AUTOROUND_PYTHON" in os.environ or importlib.util.find_spec("auto_round") is not None


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts, imported as when they are started."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import calibration
    import gpu_peers
    import media_prompts
    import time_autoround

    yield SimpleNamespace(main=gpu_peers, prompts=media_prompts, calibration=calibration, autoround=time_autoround)
    for name in (*SCRIPTS, *PEER_SCRIPTS):
        monkeypatch.delitem(sys.modules, name, raising=False)


def plan(scripts: SimpleNamespace, folder: Path, *arguments: str) -> Any:
    return scripts.main.make_plan(scripts.main.parse(["--tiny", *arguments]), folder)


@pytest.mark.slow
def test_a_tool_that_fails_is_reported_and_the_same_command_runs_only_it_again(
    scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, out, folder = tmp_path / "python", tmp_path / "result.json", tmp_path / "work"
    python.write_text("#!/bin/sh\necho no AutoRound here\nexit 3\n")
    python.chmod(0o755)
    command = ["--tiny", "--settings", "light", "--folder", str(folder), "--out", str(out)]
    command += ["--device", "cpu", "--autoround-python", str(python)]
    assert scripts.main.main(command) == 1
    report = json.loads(out.read_text())
    ours = report["arms"]["light"]["onptq"]
    assert report["arms"]["light"]["autoround"]["error"] == "no AutoRound here"
    assert report["ratios"] == {"light": {}}
    assert ours["seconds"] > sum(ours["phases"][name] for name in ("Encode", "Initialize", "Follow", "Calibrate"))
    assert sum(ours[name] for name in ("load", "seconds", "save")) < ours["process_seconds"]
    assert ours["peak_bytes"] > 2**20
    assert ours["settings"]["scheme"] == report["scheme"] == "W4A16"
    assert {"torch", "transformers"} <= report["versions"].keys()
    assert not list(folder.glob("run-*"))  # nothing of the run is left
    (material,) = folder.glob("material-*")
    count = ours["settings"]["data"]["prompts"]
    drawn = scripts.prompts.draw_prompts("qwen2.5-vl", count, report["media_tokens"])
    assert manifest_digest(load_manifest(material / "prompts.jsonl")) == manifest_digest(drawn)
    assert "failed" in capsys.readouterr().out

    assert scripts.main.main([*command, "--quiet"]) == 1
    again = json.loads(out.read_text())["arms"]["light"]
    assert again["onptq"] == ours
    assert again["autoround"]["process_seconds"] != report["arms"]["light"]["autoround"]["process_seconds"]


@pytest.mark.skipif(not HAS_AUTOROUND, reason="AutoRound is not installed; AUTOROUND_PYTHON names a Python that has it")
def test_autoround_quantizes_every_linear_of_the_decoder_on_the_same_prompts(
    scripts: SimpleNamespace, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    command = ["--tiny", "--quiet", "--settings", "light", "--device", "cpu", "--out", str(out)]
    assert scripts.main.main([*command, "--autoround-python", AUTOROUND_PYTHON]) == 0
    report = json.loads(out.read_text())
    ours, theirs = (report["arms"]["light"][tool] for tool in ("onptq", "autoround"))
    assert theirs["quantized"] == 7 * report["layers"]
    assert theirs["settings"] == {"iters": 50, "lr": 5e-3, "batch": 8, "samples": ours["settings"]["data"]["prompts"]}
    assert theirs["seconds"] == theirs["phases"]["Encode"] + theirs["phases"]["Tune"]
    assert report["ratios"]["light"]["seconds"] == ours["seconds"] / theirs["seconds"]


def test_batches_hold_every_sample_padded_to_one_length(scripts: SimpleNamespace, tmp_path: Path) -> None:
    made = plan(scripts, tmp_path, "--layers", "1")
    scripts.main.prepare(made, scripts.main.parse(["--tiny", "--device", "cpu"]))
    samples = scripts.calibration.read_samples(made.material, made.model)
    assert len({sample["input_ids"].shape[1] for sample in samples}) > 1
    (batch,) = scripts.autoround.make_batches(samples, 0)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["mm_token_type_ids"].shape
    for row, sample in enumerate(samples):
        length = sample["input_ids"].shape[1]
        assert torch.equal(batch["input_ids"][row, :length], sample["input_ids"][0])
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (batch["input_ids"].shape[1] - length)
    assert torch.equal(batch["pixel_values"], torch.cat([sample["pixel_values"] for sample in samples]))
    with pytest.raises(ValueError, match="7 samples; expected a multiple of 8"):
        scripts.autoround.make_batches(samples[:7], 0)


def test_loading_saving_and_imports_are_not_counted(scripts: SimpleNamespace) -> None:
    phases = {"Start": 9.0, "Hash": 1.0, "Load": 2.0, "Encode": 4.0, "Calibrate": 8.0, "Between": 16.0, "Export": 32.0}
    ours = scripts.main.counted({"phases": phases, "peak_bytes": 30})
    assert (ours["seconds"], ours["load"], ours["save"]) == (28.0, 3.0, 32.0)
    theirs = scripts.main.counted(
        {"phases": {"Load": 5.0, "Encode": 4.0, "Tune": 10.0, "Export": 2.0}, "peak_bytes": 10}
    )
    assert scripts.main.ratios({"onptq": ours, "autoround": theirs}) == {"seconds": 2.0, "whole": 3.0, "peak": 3.0}


def test_autoround_is_started_with_the_scheme_and_recipe_of_the_setting(
    scripts: SimpleNamespace, tmp_path: Path
) -> None:
    arguments = scripts.main.parse(["--tiny", "--device", "cpu", "--scheme", "W4A16-g32", "--no-save"])
    made = scripts.main.make_plan(arguments, tmp_path)
    command = scripts.main.autoround_command(made, arguments, "light", tmp_path / "record.json")
    joined = " ".join(command)
    assert "--recipe light --bits 4 --activation-bits 16 --group-size 32 --device cpu" in joined
    assert f"--model {made.model} --material {made.material}" in joined
    assert command[-1] == "--no-save"


def test_a_scheme_that_autoround_cannot_write_is_refused(scripts: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match=r"--scheme W4A8: AutoRound cannot write it; expected of .*W4A16"):
        plan(scripts, tmp_path, "--scheme", "W4A8")
