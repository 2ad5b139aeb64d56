"""`onptq inspect` says what a checkpoint is, and finds nothing wrong with a sound one."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import pytest
from checkpoint_models import Checkpoints, copied, defects, edited, notes, run
from conftest import FAMILIES, MULTIMODAL

from onptq.check.static import check_folder, inspect_folder
from onptq.checkpoint.quantization import Numbers, compressed_scheme, parse_quantization
from onptq.schemes import NAMED

SCHEMES = ("W8A8", "W4A16", "W4A16-g32-asym", "W4A8", "W4A8-g32", "W4A6", "W3A16-g32")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("inspect"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_checkpoint_is_sound(checkpoints: Checkpoints, family: str) -> None:
    inspection = inspect_folder(checkpoints.dense(family))
    assert inspection.findings == ()
    assert inspection.description.quantization is None
    assert inspection.description.unchecked is None, "names and shapes were held against the model"


@pytest.mark.parametrize(("family", "scheme"), list(zip(cycle(MULTIMODAL), SCHEMES, strict=False)))
def test_our_own_exports_are_sound(checkpoints: Checkpoints, family: str, scheme: str) -> None:
    inspection = inspect_folder(checkpoints.exported(family, scheme))
    assert inspection.findings == ()
    assert inspection.description.family == family
    assert inspection.description.unchecked is None
    assert inspection.description.scheme == scheme


@pytest.mark.parametrize("scheme", NAMED)
def test_our_own_exports_of_floats_are_sound(checkpoints: Checkpoints, scheme: str) -> None:
    folder = checkpoints.exported("qwen2.5-vl", scheme, hidden=128)
    inspection = inspect_folder(folder)
    assert inspection.findings == ()
    assert inspection.description.scheme == scheme
    assert inspection.description.serving
    assert [check.seen for check in check_folder(folder) if not check.passed] == []


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_our_own_text_models_are_sound(checkpoints: Checkpoints, family: str) -> None:
    assert inspect_folder(checkpoints.exported(family, "W4A8")).findings == ()


def test_shards_and_a_tied_head_are_no_defects(checkpoints: Checkpoints) -> None:
    folder = checkpoints.exported("qwen2.5-vl", "W4A16", shard_bytes=100_000, tie=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert inspect_folder(folder).findings == ()


def test_it_names_parts_formats_maker_companions_and_servers(checkpoints: Checkpoints) -> None:
    folder = checkpoints.exported("qwen2.5-omni", "W4A8")
    it = inspect_folder(folder).description
    assert it.architecture == "Qwen2_5OmniModel"
    assert set(it.model_classes) == {
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5OmniThinkerForConditionalGeneration",
    }
    parts = {part.name: part for part in it.parts}
    assert set(parts) == {
        *("language model", "embeddings", "lm_head", "vision tower", "audio tower", "talker", "token2wav"),
    }
    assert {name: part.quantized for name, part in parts.items() if part.quantized} == {"language model": 14}
    header = sum(part.bytes for part in it.parts)
    assert header < it.bytes == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert it.bytes - header < 100_000, "the tensors are all of a shard but its header"
    assert it.quantization is not None
    assert it.quantization.format == "pack-quantized"
    assert it.quantization.groups[0].weights == Numbers(4, "int", "channel")
    assert it.quantization.groups[0].activations == Numbers(8, "int", "token", dynamic=True)
    assert it.stored_as == {"packed": 14}
    assert any(maker.startswith("OnPTQ") for maker in it.makers)
    assert it.companions["speakers"] == "spk_dict.pt"
    assert {row.switch for row in it.serving} >= {"--linear-backend humming"}


def test_no_server_is_named_for_a_format_nobody_tried(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """W4A8 one value a byte is served otherwise than packed."""
    assert inspect_folder(checkpoints.exported("qwen3-vl", "W4A8")).description.serving
    folder = copied(checkpoints.exported("qwen3-vl", "W8A8"), tmp_path / "it")
    with edited(folder / "config.json") as config:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    inspection = inspect_folder(folder)
    assert inspection.description.scheme == "W4A8"
    assert inspection.description.serving == ()
    assert notes(folder) == ["four-bits-in-a-byte"]
    assert defects(folder) == []


def test_a_recipe_says_that_llm_compressor_made_it(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copied(checkpoints.exported("qwen3-vl", "W8A8"), tmp_path / "it")
    (folder / "README.md").unlink()
    (folder / "recipe.yaml").write_text("default_stage:\n  default_modifiers:\n    GPTQModifier: {ignore: []}\n")
    makers = inspect_folder(folder).description.makers
    assert "llm-compressor (recipe.yaml: GPTQModifier)" in makers
    assert not any("OnPTQ" in maker for maker in makers)


@pytest.mark.parametrize(
    ("section", "method", "weights", "activations"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": True},
            "gptq",
            Numbers(4, "int", "group", 128, symmetric=False),
            None,
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
            "awq",
            Numbers(4, "int", "group", 64, symmetric=False),
            None,
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "act_bits": 8},
            "auto-round",
            Numbers(4, "int", "group", 128),
            Numbers(8, "int", "token", dynamic=True),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "bitsandbytes",
            Numbers(4, "nf4"),
            None,
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
            "fp8",
            Numbers(8, "float", "block", block=(128, 128)),
            Numbers(8, "float", "token", dynamic=True),
        ),
    ],
)
def test_other_makers_sections_are_read(
    section: dict[str, object], method: str, weights: Numbers, activations: Numbers | None
) -> None:
    parsed = parse_quantization(section)
    assert parsed is not None
    assert parsed.method == method
    assert parsed.groups[0].weights == weights
    assert parsed.groups[0].activations == activations
    assert compressed_scheme(section) is None, "servers compute other things of it"


def test_a_section_that_nobody_can_read_names_no_scheme() -> None:
    assert compressed_scheme(None) is None
    assert compressed_scheme({"quant_method": "compressed-tensors", "config_groups": 3}) is None


def test_only_plain_integers_are_called_by_a_scheme() -> None:
    weights: dict[str, object] = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}

    def scheme() -> str:
        parsed = parse_quantization(section)
        assert parsed is not None
        return str(parsed.scheme)

    assert scheme() == "W8A16"
    weights["type"] = "float"
    assert scheme() == "None"
    weights |= {"type": "int", "strategy": "tensor"}
    assert scheme() == "None"
    weights["strategy"] = "channel"
    groups["group_1"] = groups["group_0"]
    assert scheme() == "None"


def test_the_command_prints_and_exits_with_what_it_found(checkpoints: Checkpoints, tmp_path: Path) -> None:
    sound = checkpoints.exported("qwen2.5-vl", "W4A8")
    result = run(sound)
    assert result.exit_code == 0, result.output
    assert "no defects found" in result.output
    assert "W4A8, compressed-tensors, pack-quantized" in result.output

    damaged = copied(sound, tmp_path / "it")
    (damaged / "preprocessor_config.json").unlink()
    result = run(damaged)
    assert result.exit_code == 1
    assert "missing-processor" in result.output
    record = json.loads(run(damaged, "--json").output)
    assert [defect["name"] for defect in record["defects"]] == ["missing-processor"]
    assert record["scheme"] == "W4A8"


@pytest.mark.parametrize("what", ["nowhere", "empty", "no-json", "no-object", "no-number"])
def test_what_is_no_checkpoint_is_a_usage_error(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "it"
    if what != "nowhere":
        folder.mkdir()
    if what == "no-json":
        (folder / "config.json").write_text("{")
    if what == "no-object":
        (folder / "config.json").write_text('{"text_config": 3}')
    if what == "no-number":
        section = '{"config_groups": {"group_0": {"weights": {"num_bits": "many"}}}}'
        (folder / "config.json").write_text(f'{{"quantization_config": {section}}}')
    result = run(folder)
    assert result.exit_code == 2
    assert "error:" in result.output
    assert "it" in result.output


def test_a_model_that_transformers_does_not_know_is_described_all_the_same(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = copied(checkpoints.exported("qwen2.5-vl", "W8A8"), tmp_path / "it")
    with edited(folder / "config.json") as config:
        config |= {"architectures": ["NobodysModel"], "model_type": "nobody"}
    inspection = inspect_folder(folder)
    assert "NobodysModel" in (inspection.description.unchecked or "")
    assert inspection.description.family is None
    assert inspection.description.stored_as == {"int8": 14}
    assert inspection.defects == ()
