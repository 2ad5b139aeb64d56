"""The model card: true to the run, readable, and without a trace of the machine it was written on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import onptq
from onptq.checkpoint.card import Calibration, base_model, write_card
from onptq.checkpoint.card_tables import measured, read_results
from onptq.checkpoint.serving import serving
from onptq.data.calibration import Prompts
from onptq.data.manifest import load_manifest, manifest_digest
from onptq.data.prompts import Media, Prompt
from onptq.evaluate.items import Grade, Item
from onptq.evaluate.statistics import Resampler
from onptq.files import to_json
from onptq.recipe import Recipe
from onptq.run import run_home
from onptq.schemes import Scheme

VL = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
CHANGES: dict[str, Any] = {
    "rounds": 1,
    "data.prompts": 3,
    "data.holdout": 2,
    "follow.max_tokens": 5,
    "calibrate.epochs": 1,
    "compute.device": "cpu",
}


def front_matter(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    return yaml.safe_load(front)  # type: ignore[no-any-return]


def card(folder: Path, scheme: str = "W4A8", config: dict[str, Any] | None = None, **more: Any) -> str:
    return write_card(folder, config or VL, Scheme.parse(scheme), more.pop("method", "onptq"), **more)


def test_license_language_and_purpose_come_from_the_sources_card(tmp_path: Path) -> None:
    stated = "license: other\nlicense_name: research\nlicense_link: https://example.org/L\nlanguage: [en, de]\nbase_model: x/y\n"
    (tmp_path / "README.md").write_text(f"---\n{stated}tags: [a]\n---\n# Theirs\n")
    front = front_matter(card(tmp_path))
    assert (front["license"], front["license_name"], front["language"]) == ("other", "research", ["en", "de"])
    assert (front["base_model"], front["base_model_relation"]) == (tmp_path.name, "quantized")
    assert (front["pipeline_tag"], front["library_name"]) == ("image-text-to-text", "transformers")
    assert front["quantized_by"] == "onptq"
    assert front["tags"] == ["onptq", "compressed-tensors", "quantized", "W4A8"]


@pytest.mark.parametrize(
    "text", [None, "# no front matter", "---\nlicense: [unclosed\n---\n", "---\njust words\n---\n"]
)
def test_nothing_is_stated_that_the_source_does_not_state(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    assert "license" not in front_matter(card(tmp_path))
    assert front_matter(card(tmp_path, config=VL | {"license": "mit"}))["license"] == "mit"


def test_the_base_model_is_a_name_and_never_a_path(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen2.5-VL-7B" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    assert base_model(snapshot) == "Qwen/Qwen2.5-VL-7B"
    assert base_model(tmp_path / "cache-1234", "zoo:qwen2.5-vl+outliers") == "zoo:qwen2.5-vl+outliers"
    assert base_model(tmp_path / "mine", str(tmp_path / "mine")) == "mine"
    assert base_model(snapshot, "Qwen/Qwen2.5-VL-7B") == "Qwen/Qwen2.5-VL-7B"
    assert str(tmp_path) not in card(snapshot)


def test_calibration_data_is_counted_by_what_it_holds() -> None:
    seen = Media(None, "a" * 64, b"a")

    def prompt(number: int, **media: Any) -> Prompt:
        return Prompt(number, str(number), [{"role": "user", "content": [{"type": "text", "text": "?"}]}], **media)

    calibrating = [
        prompt(0, images=(seen,)),
        prompt(1, images=(seen,)),
        prompt(2, images=(seen,), audios=(seen,)),
        prompt(3),
    ]
    prompts = Prompts(calibrating, [prompt(4)])
    made = Calibration.of(prompts)
    assert made is not None
    assert made.mix == {"image and text": 2, "image, audio and text": 1, "text only": 1}
    text = card(Path("model"), calibration=made)
    assert (
        "4 prompts (2 with image and text, 1 with image, audio and text, 1 with text only). 1 more were held out."
        in text
    )
    assert manifest_digest(prompts.every) in text
    assert "No calibration data" in card(Path("model"), method="rtn", calibration=made)
    assert Calibration.of(Prompts((), ())) is None


@pytest.mark.parametrize("scheme", ["W4A16", "W4A8", "W8A8", "W8A16", "W4A16-g128-asym"])
def test_every_known_way_to_serve_is_in_the_table_with_its_switch(scheme: str) -> None:
    text = card(Path("model"), scheme)
    for row in serving(Scheme.parse(scheme)):
        if row.server.startswith("vLLM"):
            line = next(line for line in text.splitlines() if line.startswith(f"| {row.server} | {row.hardware} |"))
            assert row.computes in text
            assert line.count("|") == 8
            assert row.switch is None or f"`{row.switch}`" in text
    assert "vllm serve path/to/this/folder  #" in text


def test_the_switch_for_true_int8_activations_is_a_command() -> None:
    text = card(Path("model"), "W4A8")
    assert "vllm serve path/to/this/folder --linear-backend humming  # int4 x int8" in text
    assert re.search(
        r"without computing W4A8: on Ampere.* `--linear-backend humming` does; on CPU nothing known does", text
    )
    assert "without computing" not in card(Path("model"), "W8A8")
    assert "VLLM_CPU_INT4_W4A8=0 vllm serve path/to/this/folder  # int4 x 16-bit" in card(Path("model"), "W4A16")


def test_the_settings_that_were_fastest_are_told_where_they_were_measured() -> None:
    lines = card(Path("model"), "W4A8").splitlines()
    at = lines.index("onptq tune path/to/this/folder  # once, on the GPU that will serve, in the server's environment")
    assert lines[at + 1] == (
        "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve path/to/this/folder --linear-backend humming --block-size 128 \\"
    )
    (words,) = re.findall("^    --compilation-config '(.*)'$", lines[at + 2])
    assert json.loads(words) == {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2048]}
    assert "1.84x to 1.86x" in lines[at - 3]
    assert "2.01x and 2.05x" in card(Path("model"), "W4A16")
    for other in ("W8A8", "W4A16-g128", "W4A16-g128-asym", "W4A6"):
        assert "Fastest for" not in card(Path("model"), other)


def test_what_is_only_simulated_says_so() -> None:
    text = card(Path("model"), "W4A6")
    assert "No server is known to run W4A6" in text
    assert "- Simulation only: no serving kernel is known to run W4A6" in text
    assert "vllm serve" not in text


def test_omni_is_loaded_by_the_class_that_can() -> None:
    full: dict[str, Any] = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": {}}
    assert "transformers.Qwen2_5OmniForConditionalGeneration.from" in card(Path("m"), config=full)
    silent = card(Path("m"), config=full | {"enable_audio_output": False})
    assert "transformers.Qwen2_5OmniThinkerForConditionalGeneration.from" in silent
    alone = {"model_type": "qwen2_5_omni_thinker", "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"]}
    assert "vLLM takes full Omni checkpoints only" in card(Path("m"), config=alone)
    assert front_matter(silent)["pipeline_tag"] == "any-to-any"


# --- measurements ---------------------------------------------------------------------------------------------------


def letters(text: str) -> Grade:
    return Grade(text.count("e"), max(1, len(text)))


@pytest.fixture(scope="module")
def run(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = load_manifest(small / "prompts.jsonl")
    items = [Item(f"q{n}", "first letter", prompts[n], "", lambda text: Grade(text[:1] < "m"), 2) for n in range(5)]
    items += [Item(f"w{n}", "dictation", prompts[n], "", letters, 4, "word errors") for n in range(3)]
    out = tmp_path_factory.mktemp("card") / "run"
    onptq.quantize(
        small,
        out,
        calibration=small / "prompts.jsonl",
        recipe=Recipe.preset("default", CHANGES),
        evaluation=items,
        verify=False,
    )
    return out


def test_the_card_of_a_run_has_its_measurements_with_intervals(run: Path, small: Path) -> None:
    text = (run / "README.md").read_text(encoding="utf-8")
    table = [line for line in text.split("## Measured")[1].splitlines() if line.startswith("|")]
    assert table[0] == "| | first letter % | dictation WER % (less is better) | flips % | mismatch % | KL |"
    assert [line.split(" | ")[0] for line in table[2:]] == [
        "| source",
        "| plain rounding",
        "| static control",
        "| OnPTQ",
    ]
    rows = [
        row for row in pq.read_table(run_home(run) / "answers.parquet").to_pylist() if row["task"] == "first letter"
    ]
    points = {arm: np.array([row["points"] for row in rows if row["arm"] == arm]) for arm in ("dense", "onptq")}
    assert table[-1].split(" | ")[1].startswith(f"{100 * points['onptq'].mean():.1f} [")
    flips = 100 * (points["onptq"] != points["dense"]).mean()
    assert table[-1].split(" | ")[3].startswith(f"{flips:.1f}")
    states = pq.read_table(run_home(run) / "final/holdout.parquet").to_pylist()
    mismatch = 100 * np.mean([state["kind"] == "mismatch" for state in states])
    assert (
        table[-1].split(" | ")[4].startswith(f"{mismatch:.1f}" if mismatch >= 1 or not mismatch else f"{mismatch:.4f}")
    )
    assert "3 prompts (3 with image and text). 2 more were held out." in text
    assert f"({len(states)} states)" in text
    assert "Not measured: any task but those above" in text
    assert str(run.parent) not in text
    assert str(small.parent) not in text


def test_without_items_only_what_was_held_out_is_measured(run: Path, tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final/holdout.parquet").write_bytes((run_home(run) / "final/holdout.parquet").read_bytes())
    results = read_results(tmp_path, "onptq")
    assert results is not None
    assert (list(results.arms), list(results.arms["onptq"]), results.items) == (["onptq"], ["mismatch %", "KL"], 0)
    assert "Not measured: accuracy on any task" in card(Path("model"), results=results)
    assert read_results(tmp_path / "nowhere", "onptq") is None
    assert "Nothing was measured" in measured(None)


def test_intervals_come_from_resampled_items(tmp_path: Path) -> None:
    right = {"dense": [1.0] * 30 + [0.0] * 10, "rtn": [1.0] * 20 + [0.0] * 20}
    rows = [
        {"arm": arm, "item": f"q{n}", "task": "choice", "answer": "", "points": point, "total": 1.0}
        for arm, points in right.items()
        for n, point in enumerate(points)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "answers.parquet")
    kinds = {"arms": {"dense": {"tasks": {"choice": {"measure": "accuracy"}}}}}
    (tmp_path / "comparison.json").write_text(to_json(kinds))
    results = read_results(tmp_path, "rtn")
    assert results is not None
    accuracy, flips = (results.arms["rtn"][name] for name in ("choice %", "flips %"))
    assert (accuracy.value, flips.value) == (50.0, 25.0)
    assert accuracy.low is not None
    assert accuracy.high is not None
    assert 30 < accuracy.low < 42
    assert 58 < accuracy.high < 70
    assert "flips %" not in results.arms["dense"]
    assert Resampler().confidence == 0.95
    assert "95% bootstrap intervals" in measured(results)
