"""Checks of config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from onptq.check.findings import Finding
from onptq.check.inspected import Inspected
from onptq.checkpoint.folder import split_name
from onptq.models.family import text_config

STORED_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPE_KEYS = ("dtype", "torch_dtype")


def check_builds(inspected: Inspected) -> Iterator[Finding]:
    if inspected.layouts.broken is not None:
        yield Finding(
            "config-does-not-build",
            f"config.json makes no model: {inspected.layouts.broken}",
            "transformers cannot load the checkpoint; checks of names and shapes were left out. "
            "Compare config.json with that of the source.",
        )


def check_rope(inspected: Inspected) -> Iterator[Finding]:
    """Findings on position settings, which a config.json rewritten by another version of transformers loses."""
    text = text_config(inspected.checkpoint.config)
    new, old = _mapping(text.get("rope_parameters")), _mapping(text.get("rope_scaling"))
    rotates = inspected.multimodal and inspected.family is not None and not inspected.family.derived
    if rotates and not ("mrope_section" in new or "mrope_section" in old):
        yield Finding(
            "lost-mrope-section",
            "config.json has neither rope_scaling.mrope_section nor rope_parameters.mrope_section",
            "It splits the positions of images: transformers 4 fails, transformers 5 takes a default that fits heads "
            "of 128 only. Copy the key from the config.json of the source.",
        )
    elif "mrope_section" in new and "rope_theta" not in text:
        yield Finding(
            "new-rope-keys",
            "config.json was written by transformers 5: rope_parameters in place of rope_theta and rope_scaling",
            "transformers 4 and servers built on it find no rope_scaling and fail; transformers 5 and vLLM 0.32 read it.",
            note=True,
        )


def check_thinker(inspected: Inspected) -> Iterator[Finding]:
    config, places = inspected.checkpoint.config, inspected.checkpoint.quantizations
    if not isinstance(config.get("thinker_config"), dict) or not ({"", "thinker_config"} & set(places)):
        return
    if "thinker_config" not in places:
        yield Finding(
            "thinker-without-quantization",
            "quantization_config stands at the top of config.json only, not in thinker_config",
            "transformers' thinker class sees only its own part, takes the integers for weights and answers nonsense.",
            fixable=True,
        )
    elif "" not in places:
        yield Finding(
            "quantization-only-in-thinker",
            "quantization_config stands in thinker_config only, not at the top of config.json",
            "vLLM and transformers' full Omni class read the top, and take the checkpoint for a dense one.",
            fixable=True,
        )
    elif places[""] != places["thinker_config"]:
        yield Finding(
            "thinker-disagrees",
            "config.json has one quantization_config at the top and another one in thinker_config",
            "Which one counts depends on the class that loads it; the files do not show which is right.",
        )


def check_dtype(inspected: Inspected) -> Iterator[Finding]:
    if not inspected.quantized_modules:
        return
    declared, stored = declared_dtype(inspected.checkpoint.config), stored_dtype(inspected)
    if declared is not None and stored is not None and declared != stored:
        yield Finding(
            "wrong-dtype",
            f"config.json says {declared}, the unquantized tensors are {stored}",
            f"dtype='auto' computes in {declared}: "
            + ("twice the memory, and no low-bit kernel takes it." if declared == "float32" else "another rounding."),
            fixable=True,
        )


def check_placeholders(inspected: Inspected) -> Iterator[Finding]:
    """Findings on placeholder tokens, which must be the same in config.json and in the tokenizer."""
    family, ids, thinker = inspected.family, _added_tokens(inspected), inspected.thinker
    if family is None:
        return
    for kind, placeholder in (("image", family.image), ("audio", family.audio)):
        expected = ids.get(placeholder.token) if placeholder is not None else None
        for key in (f"{kind}_token_id", f"{kind}_token_index"):
            if placeholder is not None and expected is not None and thinker.get(key, expected) != expected:
                yield Finding(
                    "wrong-placeholder",
                    f"config.json's {key} is {thinker[key]}, the tokenizer's {placeholder.token} is {expected}",
                    f"The model has no place for {kind} features: requests fail, or the {kind} input is ignored.",
                )


def declared_dtype(config: dict[str, Any]) -> str | None:
    return next((str(config[key]).removeprefix("torch.") for key in DTYPE_KEYS if config.get(key)), None)


def stored_dtype(inspected: Inspected) -> str | None:
    """The dtype of most bytes of the unquantized floating-point weights."""
    sizes: Counter[str] = Counter()
    for name, tensor in inspected.checkpoint.tensors.items():
        module, parameter = split_name(name)
        if tensor.dtype in STORED_FLOATS and parameter in {"weight", ""} and module not in inspected.quantized_modules:
            sizes[STORED_FLOATS[tensor.dtype]] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else None


def _added_tokens(inspected: Inspected) -> dict[str, int]:
    added = inspected.checkpoint.json("tokenizer.json").get("added_tokens")
    entries = added if isinstance(added, list) else []
    return {
        entry["content"]: entry["id"]
        for entry in entries
        if isinstance(entry, dict) and {"id", "content"} <= entry.keys()
    }


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
