"""The paper's measurements: prefill of Qwen2.5-VL-7B over 2,048 tokens on one B200, FP16 and W4A8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.models.family import text_config

GIGABYTE = 1e9

PAPER: dict[str, Any] = {
    "model": "Qwen2.5-VL-7B",
    "device": "NVIDIA B200",
    "prompt_tokens": 2048,
    "rows": [
        {"name": "FP16", "batch": 1, "prefill_seconds": 36.73e-3, "peak_bytes": 16.22 * GIGABYTE},
        {"name": "W4A8", "batch": 1, "prefill_seconds": 20.48e-3, "peak_bytes": 10.15 * GIGABYTE},
        {"name": "FP16", "batch": 8, "prefill_seconds": 271.39e-3, "peak_bytes": 21.13 * GIGABYTE},
        {"name": "W4A8", "batch": 8, "prefill_seconds": 192.76e-3, "peak_bytes": 15.06 * GIGABYTE},
    ],
}
SHAPE = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}


def is_papers_model(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes the shape that the paper measured."""
    text = text_config(config)
    return config.get("model_type") == "qwen2_5_vl" and all(text.get(name) == size for name, size in SHAPE.items())
