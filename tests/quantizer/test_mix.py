"""Mixed schemes: a scheme for every linear, through calibration, export and reload."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.utils.match import match_name
from conftest import Tiny, in_turn
from method_models import short_responses
from naive import extended, make_policy, random_theta
from test_policy import inputs_of, speak

import onptq
from onptq.check.static import check_folder
from onptq.checkpoint.exportable import output_bytes
from onptq.checkpoint.served import ADA, BLACKWELL, CPU, HOPPER
from onptq.checkpoint.served_by_vllm import HUMMING, VLLM
from onptq.checkpoint.serving import serving
from onptq.checkpoint.write import linears_by_scheme, quantization_config
from onptq.errors import OnPTQError
from onptq.methods import METHODS, accepts
from onptq.quantizer.mix import check_mix
from onptq.quantizer.theta import Free, Learned, Settled, Theta
from onptq.recipe import Recipe
from onptq.run import final_theta
from onptq.schemes import UNQUANTIZED, Scheme

MIX = "mlp.down_proj=W8A8,layers.0.*=dense"
MIXED = "W4A8+mlp.down_proj~W8A8+layers.0.*~dense"
PATHS = [
    f"layers.{layer}.{name}"
    for layer in range(12)
    for name in (
        *(f"self_attn.{one}_proj" for one in "qkvo"),
        *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
    )
]


def test_the_last_pattern_that_matches_counts() -> None:
    scheme = Scheme.parse("W4A8").mixed(MIX)
    assert str(scheme) == MIXED
    assert Scheme.parse(MIXED) == scheme
    assert str(scheme.of("layers.1.mlp.down_proj")) == "W8A8"
    assert scheme.of("layers.0.mlp.down_proj") == UNQUANTIZED
    assert str(scheme.of("layers.10.mlp.up_proj")) == "W4A8"
    assert (str(scheme.base), len(scheme.parts), scheme.kind) == ("W4A8", 3, "W4A8")
    assert not scheme.multiplies_integers, "dense linears have no integers"
    assert Scheme.parse("W4A8").mixed("down_proj=W8A8").multiplies_integers
    both = Scheme.parse("W4A16-g128+kv8").mixed("o_proj=fp8")
    assert str(both) == "W4A16-g128+kv8+o_proj~FP8"
    assert Scheme.parse(str(both)) == both
    assert both.quantizes_cache
    assert not both.of("layers.0.self_attn.o_proj").quantizes_cache


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("q_proj=W8A8", r"k_proj would be W4A8, but they read the same input|q_proj would be W8A8 and .*k_proj W4A8"),
        ("mlp.up_proj=dense", r"gate_proj would be W4A8 and .*up_proj dense, .* same input"),
        ("mlp.dwn_proj=W8A8", r"the pattern mlp\.dwn_proj of mlp\.dwn_proj=W8A8 matches no linear.*down_proj"),
        ("layers.99.*=dense", r"layers\.99\.\* .*matches no linear"),
        ("*=dense", "leaves every linear dense"),
        ("down_proj=W8A9", "unknown scheme|activation bits"),
        ("down_proj", "expected PATTERN=SCHEME"),
        ("down_proj=W8A8+kv8", "expected PATTERN=SCHEME"),
    ],
)
def test_a_mix_that_fits_no_model_or_no_server_is_refused(mix: str, message: str) -> None:
    with pytest.raises(OnPTQError, match=message):
        check_mix(Scheme.parse("W4A8").mixed(mix), PATHS)


def test_targets_match_every_linear_under_every_name_once() -> None:
    scheme = Scheme.parse(MIXED)
    targets = linears_by_scheme(scheme, PATHS)
    names = ("model.language_model.{}", "model.{}", "{}", "language_model.model.{}", "thinker.model.{}")
    for path in PATHS:
        for name in names:
            matching = [
                one for one, patterns in targets.items() if any(match_name(name.format(path), p) for p in patterns)
            ]
            assert matching == [scheme.of(path)], path
    assert not any(match_name("lm_head", p) for patterns in targets.values() for p in patterns)
    config = quantization_config(scheme, ["re:.*lm_head"], PATHS)
    assert config is not None
    assert config["format"] == "mixed-precision"
    assert [group["format"] for group in config["config_groups"].values()] == ["pack-quantized", "int-quantized"]
    (dense,) = targets[UNQUANTIZED]
    assert config["ignore"] == ["re:.*lm_head", dense]
    assert re.fullmatch(r"re:\(\?:\.\*\\\.\)\?layers.*\$", dense)


@pytest.mark.parametrize(("name", "dtype"), in_turn(["W4A8", "FP8", "NVFP4"], [torch.float32, torch.bfloat16]), ids=str)
def test_live_frozen_settled_and_centred_are_one_policy(
    tiny: Callable[[str], Tiny], name: str, dtype: torch.dtype
) -> None:
    scheme = f"{name}+mlp.down_proj~W8A8+layers.0.self_attn.*~dense"
    inputs, policy = inputs_of(tiny("qwen2.5-vl")), make_policy(tiny("qwen2.5-vl"), scheme, dtype)
    theta = random_theta(policy)
    policy.attach(theta)
    live = speak(policy, "Q", inputs)
    policy.freeze(theta)
    assert torch.equal(speak(policy, "Q", inputs), live)
    for other, kind in ((policy.settle(theta), Settled), (policy.centre(theta), Learned)):
        kinds = {path: type(linear) for path, linear in other.linears.items()}
        assert {kind for path, kind in kinds.items() if policy.scheme.of(path) == UNQUANTIZED} == {Free}
        assert {one for path, one in kinds.items() if policy.scheme.of(path) != UNQUANTIZED} == {kind}
        policy.attach(other)
        assert torch.equal(speak(policy, "Q", inputs), live)
    uniform = make_policy(tiny("qwen2.5-vl"), name, dtype)
    uniform.freeze(random_theta(uniform))
    assert not torch.equal(speak(uniform, "Q", inputs), live)


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "search", "signround", "blockwise", "smoothquant+gptq", "mbq", "qig", "masquant"]
)
def test_methods_leave_dense_linears_alone(tiny: Callable[[str], Tiny], method: str) -> None:
    policy = make_policy(tiny("llama"), MIXED, torch.float32)
    prompts = tiny("llama").encode(policy, 1)
    few = {"steps": 2, "points": 2, "responses": short_responses(prompts)}
    options: dict[str, Any] = {name: value for name, value in few.items() if accepts(method, name)}
    theta = METHODS[method](policy, prompts, lambda blocks: None, **options)
    policy.freeze(theta)
    dense = {path: part for path, part in policy.folded() if path in theta.linears}
    for path, part in dense.items():
        integers = part.codes.dtype == torch.int8  # type: ignore[union-attr]
        assert integers == (policy.scheme.of(path) != UNQUANTIZED)
        if not integers:
            assert not isinstance(theta.linears[path], Learned)


def test_rows_of_servers_are_the_worst_of_the_parts() -> None:
    rows = {
        (row.hardware, row.switch): row for row in serving(Scheme.parse("W4A16+down_proj~FP8")) if row.server == VLLM
    }
    assert rows[HOPPER, None].verdict == rows[ADA, None].verdict == "serves"
    assert rows[HOPPER, None].computes == "int4 x 16-bit and E4M3 x E4M3"
    assert "the mix was not run" in rows[HOPPER, None].note
    assert rows[HOPPER, None].evidence == "read"
    (ran,) = [
        row for row in serving(Scheme.parse("W4A16+mlp.down_proj~W8A8")) if row.hardware == CPU and row.server == VLLM
    ]
    assert (ran.verdict, ran.evidence, ran.computes) == ("serves", "run", "int4 x 16-bit and int8 x int8")
    assert "not run" not in ran.note
    eight = {(row.hardware, row.switch): row for row in serving(Scheme.parse(MIXED)) if row.server == VLLM}
    assert eight[BLACKWELL, None].verdict == "refuses", "W8A8 does not run there"
    assert eight[HOPPER, None].verdict == "differs"
    assert eight[HOPPER, HUMMING].verdict == "doubtful"
    dense = serving(Scheme.parse("W4A16+layers.0.*~dense"))
    assert [row.verdict for row in dense] == [row.verdict for row in serving(Scheme.parse("W4A16"))]


SHORT = {
    "rounds": 1,
    "data.prompts": 3,
    "data.holdout": 1,
    "follow.max_tokens": 4,
    "init": "smoothquant",
    "calibrate.epochs": 1,
    "calibrate.batch": 2,
    "calibrate.keep": "last",
    "compute.device": "cpu",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "codes"),
    [(MIXED, "learned"), ("FP8+kv8+down_proj~W4A16-g32+layers.1.self_attn.*~dense", "settled")],
)
def test_transformers_reloads_a_mix_exactly_with_an_image(
    tiny: Callable[[str], Tiny], scheme: str, codes: str, tmp_path: Path
) -> None:
    one, out = tiny("qwen2.5-vl"), tmp_path / "out"
    recipe = Recipe.preset("default", SHORT | {"scheme": scheme, "calibrate.codes": codes})
    summary = onptq.quantize(one.folder, out, calibration=one.manifest, recipe=recipe).summary
    assert summary["verification"]["max_abs_difference"] == 0.0
    assert not [finding for finding in check_folder(out) if not finding.passed]
    written = output_bytes(one.source, Scheme.parse(scheme))
    assert summary["checkpoint"]["bytes"] == pytest.approx(written, rel=0.01), "but for the header"
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"

    inputs = extended(inputs_of(one), (5, 60, 200))
    policy = make_policy(one, scheme, torch.float32)
    policy.freeze(Theta.load(final_theta(out, 1)))
    model: Any = transformers.Qwen2_5_VLForConditionalGeneration
    loaded = model.from_pretrained(out, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        assert torch.equal(loaded(**inputs, use_cache=False).logits, speak(policy, "Q", inputs_of(one)))
