"""Qwen3-VL, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from onptq.models.family import Family, ImagePlaceholder

QWEN3_VL = Family(
    name="qwen3-vl",
    model_types=("qwen3_vl",),
    model_class="Qwen3VLForConditionalGeneration",
    image=ImagePlaceholder("<|image_pad|>"),
    token_types=True,
    towers=(r".*visual\..*",),
)
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    name="qwen3-vl-moe",
    model_types=("qwen3_vl_moe",),
    model_class="Qwen3VLMoeForConditionalGeneration",
    sparse=True,
)
