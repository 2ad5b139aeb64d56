"""Qwen3-VL, the dense sizes."""

from __future__ import annotations

from onptq.models.family import Family, ImagePlaceholder

QWEN3_VL = Family(
    name="qwen3-vl",
    model_types=("qwen3_vl",),
    model_class="Qwen3VLForConditionalGeneration",
    image=ImagePlaceholder("<|image_pad|>"),
    token_types=True,
    towers=(r".*visual\..*",),
)
