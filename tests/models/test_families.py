from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import FAMILIES as NAMES
from conftest import MULTIMODAL, Tiny

from onptq.errors import OnPTQError
from onptq.models import family_of
from onptq.models.family import merged_patches, text_config, thinker_config
from onptq.models.qwen_omni import chunked_frames, pooled_frames
from onptq.registry import FAMILIES


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen2_5_vl", "qwen2.5-vl"),
        ("qwen3_vl", "qwen3-vl"),
        ("qwen2_5_omni", "qwen2.5-omni"),
        ("qwen2_5_omni_thinker", "qwen2.5-omni"),
        ("llama", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_the_model_type_of_a_config_names_its_family(model_type: str, name: str) -> None:
    assert family_of({"model_type": model_type}).name == name


@pytest.mark.parametrize("config", [{"model_type": "mamba"}, {}])
def test_an_unsupported_model_type_is_refused_with_all_that_are_supported(config: dict[str, Any]) -> None:
    with pytest.raises(OnPTQError) as refused:
        family_of(config)
    message = str(refused.value)
    assert repr(config.get("model_type")) in message
    assert "entry point of the group onptq.families" in message
    for name in FAMILIES:
        assert all(model_type in message for model_type in FAMILIES[name].model_types)


def test_modalities_are_those_with_a_placeholder() -> None:
    taken = {name: FAMILIES[name].modalities for name in FAMILIES}
    assert taken == {
        "qwen2.5-vl": {"text", "image"},
        "qwen3-vl": {"text", "image"},
        "qwen3-vl-moe": {"text", "image"},
        "qwen2.5-omni": {"text", "image", "audio"},
        "qwen3-omni": {"text", "image", "audio"},
        "llama": {"text"},
        "qwen2": {"text"},
        "qwen3": {"text"},
        "qwen3-moe": {"text"},
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_model_class_exists_in_transformers(name: str) -> None:
    import transformers

    assert hasattr(transformers, FAMILIES[name].model_class)


@pytest.mark.parametrize("name", NAMES)
def test_ignore_patterns_spare_head_and_towers_and_nothing_of_the_decoder(
    name: str, tiny: Callable[[str], Tiny]
) -> None:
    from safetensors import safe_open
    from torch import nn

    checkpoint = tiny(name)
    with safe_open(checkpoint.folder / "model.safetensors", "pt") as file:
        on_disk = [key.removesuffix(".weight") for key in file.keys() if key.endswith(".weight")]  # noqa: SIM118
    model = checkpoint.policy("W4A16").model
    at_run_time = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    patterns = [re.compile(pattern.removeprefix("re:")) for pattern in FAMILIES[name].ignore]
    others = FAMILIES[name].other_models or ("none.",)
    for path in (*on_disk, *at_run_time):
        outside = path.endswith("lm_head") or "visual." in path or "audio_tower." in path or path.startswith(others)
        assert any(pattern.match(path) for pattern in patterns) == outside, path


def test_every_tower_of_a_family_matches_something(tiny: Callable[[str], Tiny]) -> None:
    from safetensors import safe_open

    for name in MULTIMODAL:
        with safe_open(tiny(name).folder / "model.safetensors", "pt") as file:
            keys = list(file.keys())
        for pattern in FAMILIES[name].towers:
            assert any(re.match(pattern, key) for key in keys), (name, pattern)
        for prefix in FAMILIES[name].other_models:
            assert any(key.startswith(prefix) for key in keys), (name, prefix)


def test_text_config_is_read_flat_nested_and_inside_a_thinker() -> None:
    flat = {"model_type": "llama", "hidden_size": 1}
    nested = {"model_type": "qwen3_vl", "text_config": {"hidden_size": 2}}
    whole = {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"image_token_index": 7, "text_config": {"hidden_size": 3}},
    }
    assert [text_config(config)["hidden_size"] for config in (flat, nested, whole)] == [1, 2, 3]
    assert thinker_config(whole)["image_token_index"] == 7
    assert thinker_config(nested) is nested


@pytest.mark.parametrize(("frames", "tokens"), [(2, 0), (3, 1), (4, 1), (100, 25), (101, 25), (30_000, 7_500)])
def test_an_omni_audio_clip_takes_a_quarter_of_its_frames(frames: int, tokens: int) -> None:
    assert pooled_frames(frames) == tokens


@pytest.mark.parametrize("frames", [1, 8, 9, 99, 100, 101, 108, 3_000])
def test_a_clip_of_qwen3_omni_takes_the_tokens_that_its_audio_tower_makes(frames: int) -> None:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    assert chunked_frames(frames) == _get_feat_extract_output_lengths(frames)


def test_an_image_takes_its_patches_after_merging() -> None:
    assert merged_patches((1, 8, 6), 2) == 12


def test_the_registry_costs_no_heavy_import() -> None:
    code = "import sys, onptq.models; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
