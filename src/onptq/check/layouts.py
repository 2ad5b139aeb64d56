"""The model as transformers builds it from config.json, without weights: its linears by their run-time names, and the
names on disk that load into them.

The two differ: `visual.` on disk is `model.visual.` at run time. transformers matches a quantization_config against the
one, vLLM against the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onptq.checkpoint.names import too_deep
from onptq.errors import OnPTQError
from onptq.models import family_of

WEIGHTS = {"weight", "weight_packed", "qweight"}  # whichever of them holds a module's weight on disk
# Full checkpoints whose architectures entry names no class of transformers, or that a part's class loads as well.
WHOLE = {
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}


@dataclass(frozen=True)
class Layout:
    """One class that loads the checkpoint."""

    model_class: str
    linears: Mapping[str, frozenset[str]]  # run-time name of every linear -> names of its class and base classes
    names: Collection[str]  # run-time names of all modules
    shapes: Mapping[str, tuple[int, ...]]  # of every parameter, by run-time name
    loads: Mapping[str, str]  # name of a parameter on disk -> the parameter that it becomes
    tied: Collection[str] = ()  # parameters that need no tensor of their own
    converts: bool = False  # whether some tensors are split or joined on loading, so that names do not tell all

    def module_on_disk(self) -> dict[str, str]:
        """Run-time name of a linear -> its name on disk, for those that have a tensor there."""
        by_run = {run: disk for disk, run in self.loads.items()}
        weights = ((name, by_run.get(f"{name}.weight")) for name in self.linears)
        return {name: weight.removesuffix(".weight") for name, weight in weights if weight is not None}


@dataclass(frozen=True)
class Layouts:
    """All classes that load the checkpoint, or why none can be built."""

    each: tuple[Layout, ...] = ()
    unknown: str | None = None  # why transformers has no class for it
    broken: str | None = None  # why transformers cannot build it from this config


def read_layouts(folder: Path, config: Mapping[str, Any], modules: Mapping[str, Collection[str]]) -> Layouts:
    """`modules` are the modules on disk and what is stored of each ("weight", "weight_packed", "bias", ...)."""
    import transformers

    classes = _classes(config)
    if not classes:
        kind = f"{config.get('architectures')}, model_type {config.get('model_type')!r}"
        return Layouts(unknown=f"transformers {transformers.__version__} has no class for {kind}")
    if (beyond := too_deep(config, len(modules))) is not None:
        return Layouts(broken=beyond)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
            return Layouts(tuple(_layout(name, built, modules) for name in classes))
    except Exception as error:  # a damaged config fails in as many ways as there are models
        return Layouts(broken=f"transformers {transformers.__version__}: {type(error).__name__}: {error}")


def _classes(config: Mapping[str, Any]) -> list[str]:
    import transformers

    try:
        family = [family_of(config).model_class]
    except OnPTQError:
        family = []
    whole = WHOLE.get(str(config.get("model_type")))
    listed = config.get("architectures")
    named = (*(listed if isinstance(listed, list) else ()), *((whole,) if whole else ()), *family)
    return list(dict.fromkeys(name for name in named if isinstance(name, str) and hasattr(transformers, name)))


def _layout(model_class: str, config: Any, modules: Mapping[str, Collection[str]]) -> Layout:
    import torch
    import transformers

    from onptq.models.experts import linearize

    wanted = getattr(transformers, model_class)
    part = getattr(config, "thinker_config", config)
    with torch.device("meta"):
        model = linearize(wanted(part if isinstance(part, wanted.config_class) else config))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loads, converted = _loads(model, parameters, modules)
    return Layout(
        model_class=model_class,
        linears={
            name: frozenset(base.__name__ for base in type(module).__mro__)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        },
        names=frozenset(name for name, _ in model.named_modules()),
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        loads=loads,
        tied=frozenset(getattr(model, "all_tied_weights_keys", None) or ()),
        converts=converted,
    )


def _loads(
    model: Any, parameters: Mapping[str, Any], modules: Mapping[str, Collection[str]]
) -> tuple[dict[str, str], bool]:
    """The parameter that every weight and bias on disk becomes, and whether some are split or joined on the way."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    prefix, loads, converts = model.base_model_prefix, {}, False
    for key in _keys(modules):
        run, converter = rename_source_key(key, renamings, converters, prefix, parameters)
        if run not in parameters and key in parameters:
            run, converter = rename_source_key(key, [], [], prefix, parameters)
        converts = converts or converter is not None
        if run in parameters and converter is None:
            loads[key] = run
    return loads, converts


def _keys(modules: Mapping[str, Collection[str]]) -> Iterator[str]:
    for module, parameters in modules.items():
        if not WEIGHTS.isdisjoint(parameters):
            yield f"{module}.weight"
        if "bias" in parameters:
            yield f"{module}.bias"
        if "" in parameters:
            yield module
