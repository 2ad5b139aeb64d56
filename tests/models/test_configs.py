"""Shapes of published checkpoints: their config.json builds the class on the meta device, without a weight.

The files in configs/ hold what a hub's config.json says about the language model, and of towers what it says of them or
nothing; `_name_or_path` is the hub id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from onptq.methods.linears import dense_weight
from onptq.models import family_of
from onptq.models.experts import linearize
from onptq.models.family import text_config, thinker_config
from onptq.models.structure import Structure, find_structure
from onptq.quantizer.theta import Theta, log_scales_in, log_scales_out
from onptq.quantizer.weights import smoothed
from onptq.schemes import Scheme

CONFIGS = Path(__file__).parent / "configs"
# Linears and foldable pairs; linears whose columns groups of 128 do not divide. Mixtures have two layers here.
EXPECTED = {
    "gemma-3-4b": (34 * 7, 34 * 4, set()),
    "gemma-4-31b": (50 * 7 + 10 * 6, 50 * 4 + 10 * 3, set()),
    "gemma-4-e2b": (15 * 7 + 20 * 5, 15 * 4 + 20 * 3, set()),
    "glm-4.5v": (7 + 4 + 129 * 3, 4 + 3 + 129, {"layers.0.mlp.down_proj"}),
    "mistral-small-3.1-24b": (40 * 7, 40 * 4, set()),
    "paddleocr-vl-1.5": (18 * 7, 18 * 4, set()),
    "qwen2-audio-7b": (32 * 7, 32 * 4, set()),
    "qwen3-omni-30b-a3b": (2 * (4 + 128 * 3), 2 * (3 + 128), set()),
    "qwen3-vl-30b-a3b": (2 * (4 + 128 * 3), 2 * (3 + 128), set()),
    "qwen3.5-0.8b": (18 * 6 + 6 * 7, 24 * 4, set()),
}


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """The config with two layers where there are experts, of which one is dense if the model has such."""
    text = text_config(config)
    if any(name in text for name in ("num_experts_per_tok", "n_routed_experts")):
        text["num_hidden_layers"] = 2  # type: ignore[index]
    return config


def structure_of(config: dict[str, Any]) -> Structure:
    inner = dict(thinker_config(config))
    family = family_of(config)  # runs all layers on shapes alone
    with torch.device("meta"):
        settings = transformers.CONFIG_MAPPING[inner["model_type"]].from_dict(inner)
        return find_structure(linearize(getattr(transformers, family.model_class)(settings)))


def test_every_file_is_checked() -> None:
    assert {file.stem for file in CONFIGS.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_shapes_of_a_published_config_fit(name: str) -> None:
    linears, pairs, ungrouped = EXPECTED[name]
    structure = structure_of(shortened(json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))))
    blocks = structure.blocks
    assert sum(len(block.linears) for block in blocks) == linears
    assert sum(len(block.producers) for block in blocks) == pairs
    theta = Theta.rtn(blocks, Scheme.parse("W4A8"), "meta")
    for block in (*blocks[:2], *blocks[-1:]):
        for linear in block.linears:
            weight = dense_weight(block, linear)
            folded = smoothed(weight, log_scales_in(theta, block, linear), log_scales_out(theta, block, linear))
            assert folded.shape == weight.shape
    columns = {block.path(one): block.child(one).in_features for block in blocks for one in block.linears}
    assert {path for path, count in columns.items() if count % 128} == ungrouped  # type: ignore[operator]
