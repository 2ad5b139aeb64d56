"""Qwen2.5-VL."""

from __future__ import annotations

from onptq.models.family import Family, ImagePlaceholder

QWEN2_5_VL = Family(
    name="qwen2.5-vl",
    model_types=("qwen2_5_vl",),
    model_class="Qwen2_5_VLForConditionalGeneration",
    image=ImagePlaceholder("<|image_pad|>"),
    token_types=True,
    towers=(r".*visual\..*",),
)
