"""Model families, and what a checkpoint of each is made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from onptq.errors import OnPTQError
from onptq.models.family import Family
from onptq.registry import FAMILIES


def family_of(config: Mapping[str, Any], names: Collection[str] = ()) -> Family:
    """The family of a checkpoint: registered under the model_type in its config.json, or else found by structure.

    `names` are those of its tensors."""
    model_type = config.get("model_type")
    supported: list[str] = []
    for name in FAMILIES:
        family: Family = FAMILIES[name]
        if model_type in family.model_types:
            if not family.sparse:
                return family
            from onptq.models.derived import with_linears

            return with_linears(family, config)
        supported += family.model_types
    why = "it names no class"
    if isinstance(model_type, str):
        from onptq.models.derived import derive_family

        try:
            return derive_family(config, names)
        except OnPTQError as error:
            why = str(error)
    raise OnPTQError(
        f"unsupported model_type {model_type!r} in config.json: {why}; expected one of {', '.join(supported)}, or a "
        "transformers class whose decoder has the structure of theirs; "
        "a package adds a family by an entry point of the group onptq.families"
    )
