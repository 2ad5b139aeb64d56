"""Model families, and what a checkpoint of each is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onptq.errors import OnPTQError
from onptq.models.family import Family
from onptq.registry import FAMILIES


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, from the model_type in its config.json."""
    model_type = config.get("model_type")
    supported: list[str] = []
    for name in FAMILIES:
        family: Family = FAMILIES[name]
        if model_type in family.model_types:
            return family
        supported += family.model_types
    raise OnPTQError(
        f"unsupported model_type {model_type!r} in config.json: expected one of {', '.join(supported)}; "
        "a package adds a family by an entry point of the group onptq.families"
    )
