"""Options that several commands share: help texts, the recipe, the reporter, the default folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onptq.checkpoint.catalogs import is_cataloged
from onptq.errors import OnPTQError
from onptq.ranks import is_first
from onptq.schemes import NAMED

if TYPE_CHECKING:
    from onptq.progress import Reporter
    from onptq.recipe import Recipe

ZOO = "zoo:"
SCHEME_HELP = f"W4A16, W8A8, W4A8, W4A6, any WbAb; -gN, and -asym with A16; {', '.join(NAMED)}."
METHOD_HELP = (
    "onptq; its controls static (gamma 0), uniform (no risk) and offpolicy (the dense model's rollouts); or a base method: "
    "`onptq list methods`."
)
PRESET_HELP = "light, default, best, risk, paper or zoo (few prompts and one round: two minutes on two cores)."
PRESET_DEFAULT = "zoo for models of the zoo, else default"
ON_BAD_PROMPT_HELP = "Stop at prompts that cannot be used, or leave them out and say which."
EMBEDDED_HELP = "; named models bring their own: zoo:mix of all tasks, or zoo:captions."
DEVICE_HELP = "auto, cpu, cuda or cuda:N."
ENDPOINT_HELP = "With follow.engine=vllm: a server that writes the rollouts, e.g. http://localhost:8000/v1."
VLLM_PYTHON_HELP = "With follow.engine=vllm: the Python whose vLLM is started to write the rollouts."
VLLM_PYTHON_DEFAULT = "ONPTQ_VLLM_PYTHON, else this one"
VLLM_ARGS_HELP = "Further options of the server that is started, e.g. '--tensor-parallel-size 2'."
INIT_HELP = "The base method that calibration starts from: `onptq list methods`."


def resolve_recipe(preset: str | None, file: Path | None, options: Mapping[str, Any], changes: list[str]) -> Recipe:
    """The preset or recipe file, changed by the options that were given, then by --set."""
    from onptq.overrides import parse_override
    from onptq.recipe import Recipe

    overrides = {name: value for name, value in options.items() if value is not None}
    overrides.update(map(parse_override, changes))
    if file is None:
        return Recipe.preset("default" if preset is None else preset, overrides)
    if preset is not None:
        raise OnPTQError("expected one of --preset and --recipe, got both")
    return Recipe.from_yaml(file, overrides)


def resolve_vllm(
    recipe: Recipe, endpoint: str | None, python: Path | None, arguments: str | None = None
) -> dict[str, Any]:
    """The arguments of `onptq.quantize` for the server that writes the rollouts."""
    given = {"--policy-endpoint": endpoint, "--vllm-python": python, "--vllm-args": arguments}
    used = [name for name, value in given.items() if value is not None]
    if used and recipe.follow.engine == "own":
        raise OnPTQError(f"{used[0]} is for --set follow.engine=vllm; this recipe has follow.engine=own")
    if endpoint is not None and python is not None:
        raise OnPTQError("expected one of --policy-endpoint and --vllm-python, got both")
    try:
        split = shlex.split(arguments or "")
    except ValueError as error:
        raise OnPTQError(f"--vllm-args {arguments!r} cannot be split into options: {error}") from None
    return {"policy_endpoint": endpoint, "vllm_python": python, "vllm_args": split}


def make_reporter(quiet: bool, json: bool) -> Reporter:
    from onptq.progress import JsonReporter, QuietReporter, RichReporter, SilentReporter

    if quiet and json:
        raise OnPTQError("expected one of --quiet and --json, got both")
    if not is_first():
        return SilentReporter()
    return QuietReporter() if quiet else JsonReporter() if json else RichReporter()


def use_one_thread() -> None:
    """Compute on one thread: GEMMs of models this small gain little from a second, and wait long where a core is busy."""
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)


def short_name(model: str) -> str:
    """The last part of a model's name, for folders named after it."""
    return model.split(":", 1)[1] if is_cataloged(model) else Path(model).resolve().name
