"""The GEMMs of a decoder layer, as servers join its linears."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.models.family import text_config


def joined(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each GEMM."""
    return {
        "qkv_proj": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
        "gate_up_proj": (2 * ffn, hidden),
        "down_proj": (hidden, ffn),
    }


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The same from a checkpoint's config.json."""
    text = text_config(config)
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    head_dim = text.get("head_dim") or hidden // heads
    return joined(hidden, text["intermediate_size"], heads, text["num_key_value_heads"], head_dim)
