"""The comparison of a server's log-probabilities with the simulation's, without the server."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import vllm_agreement as agreement
from gpu_calibration import tiny_shape

from onptq import kernels
from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import find_source
from onptq.errors import OnPTQError
from onptq.quantizer import numerics

pytest.importorskip("onptq_vllm", reason="needs the package onptq-vllm: pip install ./packages/onptq-vllm")

from onptq_vllm.bench.published import find_published, write_published
from onptq_vllm.bench.timing import draw_prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agreement") / "model"
    return write_published(tiny_shape(find_published("qwen2.5-vl-7b")), folder, layers=2)


def test_unquantized_the_simulation_is_the_model(model: Path) -> None:
    texts = draw_prompts(2, 12, 512)
    logprobs, likeliest = agreement.simulate(model, "W16A16", texts)
    dense = load_model(find_source(model), torch.float32, torch.device("cpu"))
    with torch.no_grad():
        expected = dense(input_ids=torch.tensor(texts)).logits.log_softmax(-1)[:, :-1]
    torch.testing.assert_close(
        logprobs, expected.gather(-1, torch.tensor(texts)[:, 1:, None])[..., 0], rtol=1e-4, atol=1e-4
    )
    assert torch.equal(likeliest, expected.argmax(-1))


def test_a_server_that_leaves_activations_alone_is_nearer_to_another_scheme(model: Path) -> None:
    texts = draw_prompts(3, 24, 512)
    scored = {name: agreement.simulate(model, name, texts) for name in ("W4A6", "W4A16", "W16A16")}
    rows = agreement.compare(scored, scored["W4A6"])
    same = {"not_finite": 0, "mean_difference": 0.0, "largest_difference": 0.0, "same_likeliest": 1.0}
    assert rows["W4A6"] == same
    assert 0 < rows["W4A16"]["mean_difference"] < rows["W16A16"]["mean_difference"]
    assert rows["W16A16"]["same_likeliest"] < 1


def test_large_channels_leave_the_function_and_enlarge_the_effect_of_rounded_activations(
    model: Path, tmp_path: Path
) -> None:
    texts = draw_prompts(3, 24, 512)
    large = agreement.enlarge(model, 2, 64, tmp_path / "large")
    scored = {
        (where, name): agreement.simulate(folder, name, texts)
        for where, folder in (("as drawn", model), ("large", large))
        for name in ("W16A16", "W8A16", "W8A8")
    }
    torch.testing.assert_close(scored["large", "W16A16"][0], scored["as drawn", "W16A16"][0], rtol=1e-4, atol=1e-4)
    changed = {
        where: (scored[where, "W8A8"][0] - scored[where, "W8A16"][0]).abs().mean() for where in ("as drawn", "large")
    }
    assert changed["large"] > 4 * changed["as drawn"]


def test_hummings_scales_change_little_and_only_inside_their_context(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.SWITCH, "auto")
    texts, large = draw_prompts(3, 24, 512), agreement.enlarge(model, 2, 64, tmp_path / "large")
    ours, alone = (agreement.simulate(large, name, texts) for name in ("W8A8", "W8A16"))
    x = torch.tensor([[1.0, -254.0], [0.0, 0.0]])
    with agreement.humming_scales():
        assert numerics.token_scales(x, 8).tolist() == [[2.0], [1.0]]
        theirs = agreement.simulate(large, "W8A8", texts)
    assert 0.5 < agreement.effect(theirs, ours, alone) < 1
    again = agreement.simulate(large, "W8A8", texts)
    assert torch.equal(again[0], ours[0])
    assert os.environ[kernels.SWITCH] == "auto"


def test_the_effect_is_near_one_with_rounded_activations_and_near_zero_without() -> None:
    generator = torch.Generator().manual_seed(0)
    without, change, noise = torch.randn(3, 50, 20, generator=generator)
    ours, ids = (without + change, torch.zeros(50, 20)), torch.zeros(50, 20)
    rounds = without + change + 0.3 * noise
    rounds[0] = float("nan")
    assert agreement.effect((rounds, ids), ours, (without, ids)) > 0.9
    assert abs(agreement.effect((without + 0.3 * noise, ids), ours, (without, ids))) < 0.1


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    expected = torch.zeros(2, 3), torch.tensor([[1, 2, 3], [4, 5, 6]])
    logprobs = torch.tensor([[0.0, 0.5, 0.0], [float("nan")] * 3])
    rows = agreement.compare({"vLLM": (logprobs, torch.tensor([[1, 2, 0], [0, 0, 0]]))}, expected)
    assert rows["vLLM"]["not_finite"] == 3
    assert rows["vLLM"]["largest_difference"] == 0.5
    assert rows["vLLM"]["same_likeliest"] == pytest.approx(2 / 3)


def test_a_server_without_any_finite_value_is_an_error() -> None:
    none = torch.full((2, 3), float("nan")), torch.zeros(2, 3)
    with pytest.raises(OnPTQError, match="vLLM gave no number for any of 6 states"):
        agreement.compare({"vLLM": none}, (torch.zeros(2, 3), torch.zeros(2, 3)))


@pytest.mark.slow
def test_without_vllm_the_error_has_the_interpreters_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert agreement.main(["--tiny", "--layers", "1", "--scheme", "W8A8", "--python", sys.executable]) == 1
    error = capsys.readouterr().err
    assert "vLLM did not answer" in error
    assert "No module named 'vllm'" in error
