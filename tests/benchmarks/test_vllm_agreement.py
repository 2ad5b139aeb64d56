"""The comparison of a server's log-probabilities with the simulation's; the server itself is not needed for most of it."""

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
from onptq.quantizer import numerics as integer
from onptq.zoo.published import find_published, write_published

pytest.importorskip("onptq_vllm", reason="needs the package onptq-vllm: pip install ./packages/onptq-vllm")

from onptq_vllm.bench.timing import draw_prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agreement") / "model"
    return write_published(tiny_shape(find_published("qwen2.5-vl-7b")), folder, layers=2)


def test_unquantized_the_simulation_is_the_model(model: Path) -> None:
    texts = draw_prompts(2, 12, 512)
    said, likeliest = agreement.simulate(model, "W16A16", texts)
    dense = load_model(find_source(model), torch.float32, torch.device("cpu"))
    with torch.no_grad():
        expected = dense(input_ids=torch.tensor(texts)).logits.log_softmax(-1)[:, :-1]
    torch.testing.assert_close(
        said, expected.gather(-1, torch.tensor(texts)[:, 1:, None])[..., 0], rtol=1e-4, atol=1e-4
    )
    assert torch.equal(likeliest, expected.argmax(-1))


def test_a_server_that_leaves_activations_alone_is_nearer_to_another_scheme(model: Path) -> None:
    texts = draw_prompts(3, 24, 512)
    found = {name: agreement.simulate(model, name, texts) for name in ("W4A6", "W4A16", "W16A16")}
    rows = agreement.compare(found, found["W4A6"])
    same = {"not_finite": 0, "mean_difference": 0.0, "largest_difference": 0.0, "same_likeliest": 1.0}
    assert rows["W4A6"] == same
    assert 0 < rows["W4A16"]["mean_difference"] < rows["W16A16"]["mean_difference"]
    assert rows["W16A16"]["same_likeliest"] < 1


def test_large_channels_leave_the_model_and_make_rounded_activations_tell(model: Path, tmp_path: Path) -> None:
    texts = draw_prompts(3, 24, 512)
    large = agreement.enlarge(model, 2, 64, tmp_path / "large")
    said = {
        (where, name): agreement.simulate(folder, name, texts)
        for where, folder in (("as drawn", model), ("large", large))
        for name in ("W16A16", "W8A16", "W8A8")
    }
    torch.testing.assert_close(said["large", "W16A16"][0], said["as drawn", "W16A16"][0], rtol=1e-4, atol=1e-4)
    changed = {
        where: (said[where, "W8A8"][0] - said[where, "W8A16"][0]).abs().mean() for where in ("as drawn", "large")
    }
    assert changed["large"] > 4 * changed["as drawn"]


def test_steps_as_humming_takes_them_change_little_and_are_gone_afterwards(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.SWITCH, "auto")
    texts, large = draw_prompts(3, 24, 512), agreement.enlarge(model, 2, 64, tmp_path / "large")
    ours, alone = (agreement.simulate(large, name, texts) for name in ("W8A8", "W8A16"))
    x = torch.tensor([[1.0, -254.0], [0.0, 0.0]])
    with agreement.humming_steps():
        assert integer.token_steps(x, 8).tolist() == [[2.0], [1.0]]
        theirs = agreement.simulate(large, "W8A8", texts)
    assert 0.5 < agreement.effect(theirs, ours, alone) < 1
    again = agreement.simulate(large, "W8A8", texts)
    assert torch.equal(again[0], ours[0])
    assert os.environ[kernels.SWITCH] == "auto"


def test_the_effect_of_rounded_activations_is_found_or_not() -> None:
    generator = torch.Generator().manual_seed(0)
    without, change, noise = torch.randn(3, 50, 20, generator=generator)
    ours, ids = (without + change, torch.zeros(50, 20)), torch.zeros(50, 20)
    rounds = without + change + 0.3 * noise
    rounds[0] = float("nan")
    assert agreement.effect((rounds, ids), ours, (without, ids)) > 0.9
    assert abs(agreement.effect((without + 0.3 * noise, ids), ours, (without, ids))) < 0.1


def test_what_is_not_a_number_is_counted_and_does_not_hide_the_rest() -> None:
    expected = torch.zeros(2, 3), torch.tensor([[1, 2, 3], [4, 5, 6]])
    said = torch.tensor([[0.0, 0.5, 0.0], [float("nan")] * 3])
    rows = agreement.compare({"vLLM": (said, torch.tensor([[1, 2, 0], [0, 0, 0]]))}, expected)
    assert rows["vLLM"]["not_finite"] == 3
    assert rows["vLLM"]["largest_difference"] == 0.5
    assert rows["vLLM"]["same_likeliest"] == pytest.approx(2 / 3)


def test_a_server_that_says_no_number_at_all_is_an_error() -> None:
    none = torch.full((2, 3), float("nan")), torch.zeros(2, 3)
    with pytest.raises(OnPTQError, match="vLLM gave no number for any of 6 states"):
        agreement.compare({"vLLM": none}, (torch.zeros(2, 3), torch.zeros(2, 3)))


def test_without_vllm_it_says_what_the_interpreter_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert agreement.main(["--tiny", "--layers", "1", "--scheme", "W8A8", "--python", sys.executable]) == 1
    assert "vLLM did not answer" in (said := capsys.readouterr().err)
    assert "No module named 'vllm'" in said
