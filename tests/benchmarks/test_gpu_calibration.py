"""`benchmarks/gpu_calibration.py --tiny`: phases, floors, profiles, sweeps, models of published shapes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onptq.checkpoint.source import find_source
from onptq.errors import OnPTQError
from onptq.plan.parts import find_parts
from onptq.plan.work import work_of
from onptq.recipe import Recipe
from onptq.schemes import Scheme

pytest.importorskip("onptq_vllm", reason="needs the package onptq-vllm: pip install ./packages/onptq-vllm")

from onptq_vllm.bench.published import PUBLISHED, find_published, write_published

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("gpu_calibration", "measured_run", "floors", "media_prompts", "profiled")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts, imported as when they are started."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import floors
    import gpu_calibration
    import measured_run
    import media_prompts

    yield SimpleNamespace(main=gpu_calibration, run=measured_run, floors=floors, prompts=media_prompts)
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.slow
def test_a_small_run_reports_every_phase_with_time_memory_and_floors(
    scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    assert scripts.main.main(["--tiny", "--quiet", "--folder", str(tmp_path / "work"), "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    phases = report["run"]["phases"]
    cycle = ("Encode", "Initialize", "Follow", "Compare", "Branch", "Calibrate")
    assert [name for name in phases if name not in ("Hash", "Between")] == ["Load", *cycle, "Export"]
    assert sum(row["seconds"] for row in phases.values()) == pytest.approx(report["run"]["seconds"], rel=0.05, abs=0.05)
    for name in cycle:
        assert 0 < phases[name]["arithmetic_floor"] < 1, name
        assert phases[name]["tokens_per_second"] > 0
        assert phases[name]["peak_bytes"] > 2**20
    counts = report["run"]["counts"]
    assert counts["response_tokens"] == report["recipe"]["follow"]["max_tokens"]  # no response ended early
    assert 0 < counts["candidates"] <= 3 * 6
    assert report["rates"]["flops"] > 0
    assert {"torch", "transformers"} <= report["versions"].keys()
    assert not list((tmp_path / "work").glob("run-*"))  # nothing of the run is left
    printed = capsys.readouterr().out
    assert "Calibrate" in printed
    assert "of Follow's time" in printed


@pytest.mark.slow
def test_a_profile_has_the_operations_of_a_step(
    scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    arguments = ["--tiny", "--quiet", "--profile", "Calibrate", "--profile-after", "2", "--out", str(out)]
    assert scripts.main.main(arguments) == 0
    profile = json.loads(out.read_text())["run"]["profile"]
    assert (profile["phase"], profile["steps"]) == ("Calibrate", 2)
    assert min(profile[name] for name in ("busy_ms", "wall_ms", "plain_ms", "plain_host_ms")) > 0
    products = [one for one in profile["kernels"] if one["name"] in ("aten::mm", "aten::addmm")]
    assert sum(one["launches"] for one in products) >= 4 * 7  # linears of a block forward, again, and their gradients
    times = [one["us"] for one in profile["kernels"]]
    assert times == sorted(times, reverse=True)
    assert profile["launches"] > sum(one["launches"] for one in products)
    printed = capsys.readouterr().out
    assert "a step of Calibrate: " in printed
    assert "without the profiler" in printed


@pytest.mark.slow
def test_a_sweep_changes_one_thing_at_a_time(scripts: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    scripts.main.main(["--tiny", "--quiet", "--model", "qwen3-vl-30b-a3b", "--sweep", "layers", "--out", str(out)])
    sweep = json.loads(out.read_text())["sweep"]
    points = sweep["curves"]["layers"]
    assert [point["setting"]["layers"] for point in points] == [1, 2]
    assert all(point["setting"] | {"layers": 1} == sweep["base"] for point in points)
    flops = [point["phases"]["Follow"]["flops"] for point in points]
    assert flops[0] < flops[1] < 2 * flops[0]  # all but the head doubles


def test_floors_count_each_gemm_once(scripts: SimpleNamespace, tmp_path: Path) -> None:
    shape = scripts.main.tiny_shape(find_published("qwen2.5-vl-7b"))
    source = find_source(write_published(shape, tmp_path / "model"))
    shapes = find_parts(source, Scheme.parse("W4A8")).shapes
    recipe = Recipe.preset("paper", {"data.prompts": 2, "data.holdout": 0, "follow.max_tokens": 3, "rounds": 1})
    counts = scripts.floors.Counts(prompt_tokens=10, media_tokens=4, response_tokens=3, candidates=5)
    floors = scripts.floors.Floors(shapes, replace(work_of(recipe, source), holdout=0), counts, 2, 0).phases()
    head = 512 * 64
    attention = 4 * shapes.query * shapes.layers
    prefill = 2 * 10 * (2 * shapes.linears + attention * 5)
    decode = 2 * 3 * (2 * shapes.linears + attention * 11.5 + 2 * head)
    assert floors["Follow"].flops == pytest.approx(prefill + decode)
    branched = (
        2 * 5 * (3 + 4) * (2 * shapes.linears + attention * 13 + 2 * head)
    )  # Q grows 3 of 4 tokens, D reads all 4
    assert floors["Branch"].flops == pytest.approx(branched)
    cache = 2 * 3 * 11.5 * 2 * shapes.layers * shapes.kv * 2
    assert floors["Follow"].bytes == pytest.approx((1 + 3) * shapes.linears * 2 + 3 * head * 2 + cache)


@pytest.mark.slow
def test_images_and_audio_have_about_the_wanted_number_of_tokens(scripts: SimpleNamespace, tmp_path: Path) -> None:
    from onptq.models.processing import PromptProcessor

    for name in ("qwen3-vl-8b", "qwen2.5-omni-7b"):
        shape = scripts.main.tiny_shape(find_published(name))
        shape = replace(shape, pixels=find_published(name).pixels)
        source = find_source(write_published(shape, tmp_path / name))
        processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
        prompts = scripts.prompts.draw_prompts(shape.family, 4, 400)
        assert any(prompt.audios for prompt in prompts) == ("omni" in name)
        for prompt in prompts:
            assert 300 < int((processor(prompt).modality > 0).sum()) < 500, name


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-vl-7b", 8.292), ("qwen3-vl-8b", 8.767), ("qwen2.5-omni-7b", 8.932), ("qwen3-vl-30b-a3b", 31.071)],
)
def test_published_shapes_have_the_published_number_of_parameters(name: str, billions: float, tmp_path: Path) -> None:
    """The Omni number is the thinker's, with its towers."""
    from onptq.zoo.configs import model_config
    from onptq.zoo.random import tensor_shapes, write_json
    from onptq.zoo.tokens import OMNI, QWEN, write_tokenizer

    shape = PUBLISHED[name]
    ids = write_tokenizer(tmp_path, OMNI if "omni" in name else QWEN, 1024)
    write_json(tmp_path / "config.json", model_config(shape.family, shape.dims, ids, shape.towers))
    shapes = tensor_shapes(tmp_path, shape.family)
    loaded = {key: size for key, size in shapes.items() if not key.startswith(("talker", "token2wav"))}
    assert sum(torch.Size(size).numel() for size in loaded.values()) / 1e9 == pytest.approx(billions, abs=0.001)


def test_a_published_model_appears_whole_or_not_at_all(scripts: SimpleNamespace, tmp_path: Path) -> None:
    shape = scripts.main.tiny_shape(find_published("qwen2.5-vl-7b"))
    folder = tmp_path / "model"

    def stop(tensors: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_published(shape, folder, advance=stop)
    assert not folder.exists()
    assert write_published(shape, folder) == folder
    with pytest.raises(OnPTQError, match="exists: expected a new folder"):
        write_published(shape, folder)
    with pytest.raises(OnPTQError, match="qwen3-vl-8b"):
        find_published("qwen9")


def test_a_sweep_is_drawn_and_a_setting_that_was_run_again_counts_last(tmp_path: Path) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import sweep_picture
    finally:
        sys.path.remove(str(BENCHMARKS))

    def point(prompts: int, layers: int, seconds: float) -> dict[str, object]:
        phases = {phase: {"seconds": seconds} for phase in (*sweep_picture.PHASES, "Export")}
        return {"setting": {"prompts": prompts, "layers": layers}, "phases": phases}

    reports = [
        {"sweep": {"curves": {"prompts": [point(2, 4, 9.0), point(1, 4, 1.0)]}}},
        {"sweep": {"curves": {"layers": [point(2, 4, 2.0), point(2, 8, 4.0)]}}},
    ]
    curves = sweep_picture.curves(reports)
    assert [(value, row["Follow"]) for value, row in curves["prompts"].items()] == [(1, 1.0), (2, 2.0)]
    assert [(value, row["Follow"]) for value, row in curves["layers"].items()] == [(4, 2.0), (8, 4.0)]
    assert "Export" not in curves["layers"][4]
    for number, report in enumerate(reports):
        (tmp_path / f"{number}.json").write_text(json.dumps(report))
    sweep_picture.main([*(str(tmp_path / f"{n}.json") for n in range(2)), "--out", str(tmp_path / "sweep.svg")])
    assert "decoder layers" in (tmp_path / "sweep.svg").read_text()
