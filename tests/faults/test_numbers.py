"""Numbers that are none are named, and degenerate models, images and answers are quantized like any other."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny
from PIL import Image
from safetensors.torch import load_file, save_file

import onptq
from onptq.bank import States, Trajectory
from onptq.cycle.calibrate import calibrate
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.risk import score, select
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.models.encoding import EncodedPrompt
from onptq.models.family import text_config
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import CalibrateConfig, Recipe, RiskConfig, SelectConfig

TINY: dict[str, Any] = {
    "rounds": 1,
    "init_steps": 4,
    "data.prompts": 4,
    "data.holdout": 2,
    "follow.max_tokens": 8,
    "calibrate.epochs": 1,
    "calibrate.batch": 4,
    "calibrate.gamma": 0.2,
    "select.budget": 256,
    "compute.device": "cpu",
}
Case = tuple[Policy, list[EncodedPrompt], list[Trajectory], States, Theta]


@pytest.fixture(scope="module")
def case(tiny: Callable[[str], Tiny]) -> Case:
    policy = tiny("qwen3-vl").policy("W4A8")
    prompts = tiny("qwen3-vl").encode(policy, 4)
    theta = Theta.rtn(policy.structure.blocks, policy.scheme)
    policy.freeze(theta)
    prefixes = Prefixes(policy, prompts, max_tokens=4)
    trajectories = follow(prefixes)
    states = select(score(compare(prefixes, trajectories), RiskConfig()), SelectConfig(budget=8))
    return policy, prompts, trajectories, states, theta


def update(case: Case, theta: Theta) -> None:
    cfg = CalibrateConfig(codes="free", epochs=1, batch=4, micro_batch=2)
    calibrate(*case[:4], theta, cfg)


def test_a_loss_that_is_no_number_names_step_block_and_prompt(case: Case) -> None:
    broken = case[4].clone()
    broken.smoothing["layers.1.up_down"].fill_(math.nan)
    with pytest.raises(OnPTQError, match=r"^step 1: .*activations of layers\.1 at prompt \d"):
        update(case, broken)


def test_gradients_that_are_no_numbers_name_step_and_parameter(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    import onptq.cycle.calibrate as module

    accumulate = module._accumulate

    def spoiled(*arguments: Any) -> Any:
        values = accumulate(*arguments)
        theta = arguments[6].theta
        theta.ratio["layers.1.self_attn.o_proj"].grad.view(-1)[0] = math.inf
        return values

    monkeypatch.setattr(module, "_accumulate", spoiled)
    with pytest.raises(OnPTQError, match=r"^step 1: gradients .*\(layers\.1\.self_attn\.o_proj\)"):
        update(case, case[4])


def quantize(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    recipe = Recipe.preset("risk", TINY | changes)
    return onptq.quantize(model, out, calibration=model / "prompts.jsonl", recipe=recipe).summary


def assert_usable(summary: dict[str, Any], out: Path) -> None:
    """Every figure is a number, and so is every value of the checkpoint, which gives the folded model's logits."""
    assert summary["verification"]["max_abs_difference"] == 0.0
    assert all(math.isfinite(value) for value in summary["holdout"]["final"].values())
    for name, tensor in load_file(out / "model.safetensors").items():
        assert not tensor.is_floating_point() or bool(tensor.isfinite().all()), name


def spoil(model: Path, change: Callable[[str, torch.Tensor], None]) -> None:
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layers." in name and "layernorm" not in name and name.endswith("weight"):
            change(name, tensor)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


CHANNELS: dict[str, Callable[[str, torch.Tensor], Any]] = {
    "rows of zeros": lambda name, weight: weight[:3].zero_(),
    "columns of zeros": lambda name, weight: weight[:, :3].zero_(),
    "constant rows": lambda name, weight: weight[:3].fill_(0.25),
    "a linear of zeros": lambda name, weight: weight.zero_() if "up_proj" in name else None,
    "the smallest numbers there are": lambda name, weight: weight[:3].fill_(torch.finfo(weight.dtype).tiny),
}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A8", "W3A16-g32-asym"])
@pytest.mark.parametrize("name", CHANNELS)
def test_degenerate_channels_are_quantized(name: str, scheme: str, small: Path, tmp_path: Path) -> None:
    model = shutil.copytree(small, tmp_path / "model")
    spoil(model, CHANNELS[name])
    assert_usable(quantize(model, tmp_path / "out", scheme=scheme), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("colour", [0, 255])
def test_images_of_one_colour_are_images(colour: int, small: Path, tmp_path: Path) -> None:
    model = shutil.copytree(small, tmp_path / "model")
    for path in model.rglob("*.png"):
        Image.new("RGB", (56, 56), (colour,) * 3).save(path)
    assert_usable(quantize(model, tmp_path / "out"), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["responses of one token", "an immediate end"])
def test_the_shortest_answers_are_answers(what: str, small: Path, tmp_path: Path) -> None:
    model, changes = shutil.copytree(small, tmp_path / "model"), {}
    if what == "an immediate end":
        settings = model / "generation_config.json"
        ends = list(range(text_config(json.loads((model / "config.json").read_text()))["vocab_size"]))
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": ends}))
    else:
        changes = {"follow.max_tokens": 1}
    summary = quantize(model, tmp_path / "out", **changes)
    assert summary["holdout"]["final"]["states"] == 2
    assert_usable(summary, tmp_path / "out")
