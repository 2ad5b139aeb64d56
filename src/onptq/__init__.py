"""OnPTQ: on-policy post-training quantization for multimodal LLMs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onptq.version import __version__

if TYPE_CHECKING:
    from onptq.bank import load_bank, load_trajectories
    from onptq.checkpoint.load import load_policy
    from onptq.checkpoint.source import find_source
    from onptq.cycle.branch import branch
    from onptq.cycle.calibrate import calibrate
    from onptq.cycle.compare import compare
    from onptq.cycle.follow import follow
    from onptq.cycle.risk import score, select
    from onptq.data.manifest import load_manifest
    from onptq.engine.prefixes import Prefixes
    from onptq.errors import OnPTQError
    from onptq.evaluate.frames import load_results
    from onptq.models.encoding import encode
    from onptq.models.processing import PromptProcessor
    from onptq.pipeline import quantize
    from onptq.recipe import Recipe
    from onptq.registry import FAMILIES, LOSS_TERMS, METHODS, SELECTION_RULES, TASKS
    from onptq.schemes import Scheme

__all__ = [
    "FAMILIES",
    "LOSS_TERMS",
    "METHODS",
    "SELECTION_RULES",
    "TASKS",
    "OnPTQError",
    "Prefixes",
    "PromptProcessor",
    "Recipe",
    "Scheme",
    "__version__",
    "branch",
    "calibrate",
    "compare",
    "encode",
    "find_source",
    "follow",
    "load_bank",
    "load_manifest",
    "load_policy",
    "load_results",
    "load_trajectories",
    "quantize",
    "score",
    "select",
]

# Imported when first asked for: torch and transformers take seconds, `onptq --help` must not.
_HOMES = dict.fromkeys(("FAMILIES", "LOSS_TERMS", "METHODS", "SELECTION_RULES", "TASKS"), "onptq.registry") | {
    "OnPTQError": "onptq.errors",
    "Prefixes": "onptq.engine.prefixes",
    "PromptProcessor": "onptq.models.processing",
    "Recipe": "onptq.recipe",
    "Scheme": "onptq.schemes",
    "branch": "onptq.cycle.branch",
    "calibrate": "onptq.cycle.calibrate",
    "compare": "onptq.cycle.compare",
    "encode": "onptq.models.encoding",
    "find_source": "onptq.checkpoint.source",
    "follow": "onptq.cycle.follow",
    "load_bank": "onptq.bank",
    "load_manifest": "onptq.data.manifest",
    "load_policy": "onptq.checkpoint.load",
    "load_results": "onptq.evaluate.frames",
    "load_trajectories": "onptq.bank",
    "quantize": "onptq.pipeline",
    "score": "onptq.cycle.risk",
    "select": "onptq.cycle.risk",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onptq' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
