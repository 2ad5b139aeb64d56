"""Every known defect, made by hand in a sound checkpoint, is found, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import Checkpoints, copied, defects, edited, exact_names, notes, rewrite, set_ignore, what
from safetensors.torch import load_file, save_file
from torch import Tensor

from onptq.check.config_checks import stored_dtype
from onptq.check.inspected import open_inspected
from onptq.checkpoint.folder import INDEX, read_folder

UP = "model.layers.0.mlp.up_proj"

Damage = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("inspect"))


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Damage:
    """`copy("qwen2.5-vl", "W8A8")`: a sound export, to be damaged."""
    return lambda family, scheme: copied(checkpoints.exported(family, scheme), tmp_path / "it")


@pytest.fixture
def sharded(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    return copied(checkpoints.exported("qwen2.5-vl", "W4A16", shard_bytes=200_000), tmp_path / "it")


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "count"), [("qwen2.5-vl", 12), ("qwen2.5-omni", 30)])
def test_exact_names_that_change_at_run_time(copy: Damage, family: str, count: int) -> None:
    folder = copy(family, "W8A8")
    names = exact_names(folder)
    set_ignore(folder, names)
    assert defects(folder) == ["ignored-under-other-names"]
    assert what(folder, "ignored-under-other-names").startswith(f"{count} dense linears")
    assert "visual.blocks.0.attn.qkv on disk is" in what(folder, "ignored-under-other-names") or family != "qwen2.5-vl"


def test_exact_names_that_stay_the_same_are_fine(copy: Damage) -> None:
    folder = copy("qwen3-vl", "W8A8")
    set_ignore(folder, exact_names(folder))
    assert defects(folder) == []


def test_run_time_names_that_are_not_those_on_disk(copy: Damage) -> None:
    folder = copy("qwen2.5-vl", "W4A16")
    set_ignore(folder, ["lm_head", "re:model\\.visual\\..*"])
    assert defects(folder) == ["dense-but-not-ignored"]


def test_quantized_linears_that_are_ignored(copy: Damage) -> None:
    folder = copy("qwen2.5-vl", "W4A16")
    set_ignore(folder, ["re:.*lm_head", "re:.*visual.*", "re:.*layers\\.1\\.mlp.*"])
    assert defects(folder) == ["quantized-but-ignored", "ignored-on-disk"]
    assert what(folder, "quantized-but-ignored").startswith("3 linears")


def test_ignore_patterns_that_match_nothing(copy: Damage) -> None:
    folder = copy("qwen2.5-vl", "W4A16")
    set_ignore(folder, ["re:.*lm_head", "re:.*visual.*", "re:vision_tower.*", "model.visuals.merger"])
    assert defects(folder) == ["ignore-matches-nothing"]
    assert what(folder, "ignore-matches-nothing").endswith(": re:vision_tower.*, model.visuals.merger")


# --- config against tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16"])
def test_quantized_tensors_without_a_word_in_the_config(copy: Damage, scheme: str) -> None:
    folder = copy("qwen3-vl", scheme)
    with edited(folder / "config.json") as config:
        del config["quantization_config"]
    assert defects(folder) == ["undeclared-quantization"]
    assert what(folder, "undeclared-quantization").startswith("14 modules")


def test_a_dense_checkpoint_that_says_it_is_quantized(checkpoints: Checkpoints, copy: Damage) -> None:
    folder = copy("qwen3-vl", "W4A16")
    (folder / "model.safetensors").write_bytes((checkpoints.dense("qwen3-vl") / "model.safetensors").read_bytes())
    assert defects(folder) == ["no-quantized-tensors"]


@pytest.mark.parametrize(
    ("key", "value", "tensor"),
    [
        ("vocab_size", 480, "lm_head.weight is [512, 64], expected [480, 64]"),
        ("intermediate_size", 96, "mlp.gate_proj.weight_scale is [128, 1], expected [96, 1]"),
        ("hidden_size", 32, "input_layernorm.weight is [64], expected [32]"),
    ],
)
def test_sizes_in_the_config_that_are_not_those_of_the_tensors(copy: Damage, key: str, value: int, tensor: str) -> None:
    folder = copy("qwen3-vl", "W4A16")
    with edited(folder / "config.json") as config:
        config["text_config"][key] = value
    assert set(defects(folder)) <= {"wrong-shapes", "wrong-weight-shape"}
    assert tensor in what(folder, "wrong-shapes")


def test_fewer_layers_on_disk_than_in_the_config(copy: Damage) -> None:
    folder = copy("qwen3-vl", "W4A16")
    with edited(folder / "config.json") as config:
        config["text_config"]["num_hidden_layers"] = 3
    assert defects(folder) == ["missing-tensors"]
    assert "layers.2" in what(folder, "missing-tensors")


def cut_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"][:, :1].clone()


def cut_packed(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight_packed"] = tensors[f"{UP}.weight_packed"][:, :-1].clone()


def lose_scale(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{UP}.weight_scale"]


def lose_zero_point(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{UP}.weight_zero_point"]


@pytest.mark.parametrize("damage", [cut_scale, cut_packed, lose_scale, lose_zero_point])
def test_parts_of_a_packed_weight_that_do_not_fit(copy: Damage, damage: Callable[[dict[str, Tensor]], None]) -> None:
    folder = copy("qwen2.5-vl", "W4A16-g32-asym")
    rewrite(folder, damage)
    assert defects(folder) == ["wrong-shapes"]
    assert UP in what(folder, "wrong-shapes")


def test_another_group_size_than_the_scales_have(copy: Damage) -> None:
    folder = copy("qwen2.5-vl", "W4A16-g32-asym")
    with edited(folder / "config.json") as config:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    assert defects(folder) == ["wrong-shapes"]
    assert "and 27 more" in what(folder, "wrong-shapes"), "scales and zero points of 14 linears"


def test_a_weight_shape_that_is_not_the_weight_s(copy: Damage) -> None:
    folder = copy("qwen2.5-vl", "W4A16")
    rewrite(folder, lambda tensors: tensors[f"{UP}.weight_shape"].copy_(torch.tensor([64, 128])))
    assert defects(folder) == ["wrong-weight-shape"]


@pytest.mark.parametrize(
    ("value", "name"), [(float("nan"), "scales-not-finite"), (float("inf"), "scales-not-finite"), (0.0, "scales-zero")]
)
def test_scales_that_cannot_be(copy: Damage, value: float, name: str) -> None:
    folder = copy("qwen2.5-vl", "W8A8")
    rewrite(folder, lambda tensors: tensors[f"{UP}.weight_scale"][3].fill_(value))
    assert defects(folder) == [name]
    assert f"{UP}.weight_scale" in what(folder, name)


def as_gptq(folder: Path, method: str) -> None:
    """The same linears with the names and shapes of GPTQ or AWQ."""

    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(".weight_shape")]:
            module = key.removesuffix(".weight_shape")
            outputs, inputs = tensors.pop(key).tolist()
            del tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
            qweight = (inputs, outputs // 8) if method == "awq" else (inputs // 8, outputs)
            tensors[f"{module}.qweight"] = torch.zeros(qweight, dtype=torch.int32)
            tensors[f"{module}.qzeros"] = torch.zeros(inputs // 32, outputs // 8, dtype=torch.int32)
            tensors[f"{module}.scales"] = torch.ones(inputs // 32, outputs, dtype=torch.float16)

    rewrite(folder, change)
    with edited(folder / "config.json") as config:
        config["quantization_config"] = {
            "quant_method": method,
            "bits": 4,
            "group_size": 32,
            "modules_to_not_convert": [],
        }


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptq_and_awq_shapes_are_checked_too(copy: Damage, method: str) -> None:
    folder = copy("qwen2.5-vl", "W4A16")
    as_gptq(folder, method)
    assert defects(folder) == []
    with edited(folder / "config.json") as config:
        config["quantization_config"]["quant_method"] = "awq" if method == "gptq" else "gptq"
    assert defects(folder) == ["wrong-shapes"]
    assert "qweight" in what(folder, "wrong-shapes")


# --- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("tokenizer.json", "missing-tokenizer"),
        ("preprocessor_config.json", "missing-processor"),
        ("chat_template.jinja", "missing-chat-template"),
        ("generation_config.json", "missing-generation-config"),
        ("spk_dict.pt", "missing-speakers"),
    ],
)
def test_a_missing_companion(copy: Damage, file: str, name: str) -> None:
    folder = copy("qwen2.5-omni", "W4A8")
    (folder / file).unlink()
    assert defects(folder) == [name]


def test_a_text_model_needs_no_processor_and_no_template(copy: Damage) -> None:
    folder = copy("qwen3", "W4A8")
    (folder / "chat_template.jinja").unlink()
    assert not (folder / "preprocessor_config.json").exists()
    assert defects(folder) == []
    assert notes(folder) == ["missing-chat-template"]


def shard_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("model-*.safetensors"))


def test_a_truncated_shard(sharded: Path) -> None:
    shard = sharded / shard_names(sharded)[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    assert defects(sharded) == ["truncated-shard"]
    assert f"{len(content) - 10:,} bytes" in what(sharded, "truncated-shard")
    assert f"describes {len(content):,}" in what(sharded, "truncated-shard")


def test_a_shard_that_is_no_safetensors_file(sharded: Path) -> None:
    (sharded / shard_names(sharded)[1]).write_bytes(b"<html>not found</html>")
    assert defects(sharded) == ["unreadable-shard", "wrong-index"]


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / shard_names(sharded)[1]).unlink()
    assert defects(sharded) == ["missing-shard"]


def test_no_weights_at_all(sharded: Path) -> None:
    for path in sharded.glob("model*"):
        path.unlink()
    assert "no-weights" in defects(sharded)


def store_twice(folder: Path) -> str:
    """Put a tensor of the first shard into the second one too; its name."""
    first, second = shard_names(folder)[:2]
    one, two = load_file(folder / first), load_file(folder / second)
    name = next(iter(one))
    save_file(two | {name: one[name]}, folder / second, metadata={"format": "pt"})
    return name


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    name = store_twice(sharded)
    assert defects(sharded) == ["tensor-twice"]
    assert name in what(sharded, "tensor-twice")


def test_of_two_tensors_of_one_name_the_index_s_is_described(sharded: Path) -> None:
    first, second = shard_names(sharded)[:2]
    one, two = load_file(sharded / first), load_file(sharded / second)
    name = next(name for name in one if one[name].ndim == 2)
    save_file(two | {name: torch.zeros(3, 3)}, sharded / second, metadata={"format": "pt"})
    assert read_folder(sharded).tensors[name].shape == tuple(one[name].shape)
    with edited(sharded / INDEX) as index:
        index["weight_map"][name] = second
    assert read_folder(sharded).tensors[name].shape == (3, 3)


def lose_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def break_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def misplace(folder: Path) -> None:
    first, second = shard_names(folder)[:2]
    with edited(folder / INDEX) as index:
        swapped = {first: second, second: first}
        index["weight_map"] = {name: swapped.get(file, file) for name, file in index["weight_map"].items()}


def leave_out(folder: Path) -> None:
    with edited(folder / INDEX) as index:
        del index["weight_map"]["model.norm.weight"]


@pytest.mark.parametrize("damage", [lose_index, break_index, misplace, leave_out])
def test_a_wrong_index(sharded: Path, damage: Callable[[Path], None]) -> None:
    damage(sharded)
    assert defects(sharded) == ["wrong-index"]


@pytest.mark.parametrize("name", ["mlp.0.weight", "mlp.0.bias", "ln_q.weight"])
def test_a_tower_without_some_of_its_tensors(copy: Damage, name: str) -> None:
    folder = copy("qwen2.5-vl", "W4A16")
    rewrite(folder, lambda tensors: tensors.pop(f"visual.merger.{name}"))
    assert defects(folder) == ["missing-tensors"]
    assert what(folder, "missing-tensors").endswith(f": model.visual.merger.{name}")


# --- config.json -------------------------------------------------------------------------------------------------------


def test_quantization_in_one_half_of_an_omni_config_only(copy: Damage) -> None:
    folder = copy("qwen2.5-omni", "W4A8")
    whole = json.loads((folder / "config.json").read_text())
    with edited(folder / "config.json") as config:
        del config["thinker_config"]["quantization_config"]
    assert defects(folder) == ["thinker-without-quantization"]
    (folder / "config.json").write_text(json.dumps({k: v for k, v in whole.items() if k != "quantization_config"}))
    assert defects(folder) == ["quantization-only-in-thinker"]
    whole["thinker_config"]["quantization_config"] = whole["quantization_config"] | {"format": "int-quantized"}
    (folder / "config.json").write_text(json.dumps(whole))
    assert defects(folder) == ["thinker-disagrees"]


def test_a_dtype_that_the_tensors_do_not_have(copy: Damage) -> None:
    folder = copy("qwen2.5-vl", "W4A16")
    with edited(folder / "config.json") as config:
        key = next(key for key in ("dtype", "torch_dtype") if key in config)
        config[key] = "float32"
    assert defects(folder) == ["wrong-dtype"]
    assert what(folder, "wrong-dtype") == "config.json says float32, the unquantized tensors are bfloat16"


def test_the_dtype_is_that_of_unquantized_modules(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Codes may be stored as floats beside their scales: more bytes than all dense tensors have."""
    folder = copied(checkpoints.exported("qwen2.5-vl", "W8A8", ffn=1024), tmp_path / "it")

    def widen(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(".weight_scale")]:
            name = key.removesuffix("_scale")
            tensors[name] = tensors[name].float()

    rewrite(folder, widen)
    inspected = open_inspected(folder)
    assert set(inspected.quantized_modules.values()) == {"dense with scales"}
    sizes = dict.fromkeys(("F32", "BF16"), 0)
    for tensor in inspected.checkpoint.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    assert sizes["F32"] > sizes["BF16"]
    assert stored_dtype(inspected) == "bfloat16"
    assert defects(folder) == []


def rope(config: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = config.get("text_config") or config
    return text


def test_a_config_without_the_split_of_positions(copy: Damage) -> None:
    folder = copy("qwen3-vl", "W4A16")
    with edited(folder / "config.json") as config:
        for key in ("rope_scaling", "rope_parameters"):
            (rope(config).get(key) or {}).pop("mrope_section", None)
    assert "lost-mrope-section" in defects(folder)


def test_a_config_written_anew_by_transformers_5(copy: Damage) -> None:
    import transformers

    folder = copy("qwen2.5-vl", "W4A16")
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(folder)
    assert "rope_theta" not in rope(json.loads((folder / "config.json").read_text()))
    assert defects(folder) == []
    assert notes(folder) == ["new-rope-keys"]


def test_a_config_that_makes_no_model(copy: Damage) -> None:
    folder = copy("qwen3-vl", "W4A16")
    with edited(folder / "config.json") as config:
        config["text_config"]["hidden_act"] = "none such"
    assert defects(folder) == ["config-does-not-build"]
    assert "none such" in what(folder, "config-does-not-build")


def test_an_image_token_that_the_tokenizer_calls_otherwise(copy: Damage) -> None:
    folder = copy("qwen2.5-vl", "W4A16")
    with edited(folder / "config.json") as config:
        config["image_token_id"] += 1
    assert defects(folder) == ["wrong-placeholder"]


# --- head and embeddings -------------------------------------------------------------------------------------------------


def quantize_head(tensors: dict[str, Tensor], name: str) -> None:
    weight = tensors[f"{name}.weight"]
    tensors[f"{name}.weight_scale"] = (weight.float().abs().amax(-1, keepdim=True) / 127 + 1e-6).to(weight.dtype)
    tensors[f"{name}.weight"] = torch.zeros(weight.shape, dtype=torch.int8)


def test_a_quantized_head_that_was_meant_is_worth_a_note(copy: Damage) -> None:
    folder = copy("qwen2.5-vl", "W8A8")
    rewrite(folder, lambda tensors: quantize_head(tensors, "lm_head"))
    set_ignore(folder, ["re:.*visual.*"])
    assert defects(folder) == []
    assert notes(folder) == ["quantized-head"]


def test_a_quantized_head_that_was_not_meant_is_a_defect(copy: Damage) -> None:
    folder = copy("qwen2.5-vl", "W8A8")
    rewrite(folder, lambda tensors: quantize_head(tensors, "lm_head"))
    assert defects(folder) == ["quantized-but-ignored", "ignored-on-disk"]


def test_quantized_embeddings(copy: Damage) -> None:
    folder = copy("qwen2.5-vl", "W8A8")
    rewrite(folder, lambda tensors: quantize_head(tensors, "model.embed_tokens"))
    assert defects(folder) == ["quantized-embeddings"]


def test_a_tied_head_that_is_stored_as_well(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copied(checkpoints.exported("qwen2.5-vl", "W8A8", tie=True), tmp_path / "it")
    assert notes(folder) == []
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert defects(folder) == []
    assert notes(folder) == ["tied-twice"]
    rewrite(folder, lambda tensors: quantize_head(tensors, "lm_head"))
    assert "quantized-head" in defects(folder)


def test_an_untied_head_that_is_not_stored(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """What is left when a config written anew has lost tie_word_embeddings."""
    folder = copied(checkpoints.exported("qwen2.5-vl", "W8A8", tie=True), tmp_path / "it")
    with edited(folder / "config.json") as config:
        config["tie_word_embeddings"] = False
    assert defects(folder) == ["missing-tensors"]
    assert what(folder, "missing-tensors").endswith("lm_head.weight")
