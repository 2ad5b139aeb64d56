"""The supported model families. A new one is one small file beside this one, and its name in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.errors import OnPTQError
from onptq.models.family import Family
from onptq.models.qwen2_5_omni import QWEN2_5_OMNI
from onptq.models.qwen2_5_vl import QWEN2_5_VL
from onptq.models.qwen3_vl import QWEN3_VL
from onptq.models.text import LLAMA, QWEN2, QWEN3

FAMILIES: dict[str, Family] = {
    family.name: family for family in (QWEN2_5_VL, QWEN3_VL, QWEN2_5_OMNI, LLAMA, QWEN2, QWEN3)
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, from the model_type in its config.json."""
    model_type = config.get("model_type")
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    supported = ", ".join(kind for family in FAMILIES.values() for kind in family.model_types)
    raise OnPTQError(
        f"unsupported model_type {model_type!r} in config.json: expected one of {supported}; "
        "docs/adding-a-family.md says how to add another"
    )
