"""What several commands do with their options: the recipe, the reporter, the number of threads, names of folders."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onptq.checkpoint.catalogs import is_cataloged
from onptq.errors import OnPTQError
from onptq.ranks import is_first

if TYPE_CHECKING:
    from onptq.progress import Reporter
    from onptq.recipe import Recipe

ZOO = "zoo:"


def resolve_recipe(
    preset: str | None,
    file: Path | None,
    options: Mapping[str, Any],
    changes: Sequence[str] | None,
    *,
    model: str = "",
    mix: str | None = None,
) -> Recipe:
    """The preset or recipe file, changed by the options that were given, then by --set, then by --mix.

    Models of the zoo have a preset of their own."""
    from onptq.overrides import parse_override
    from onptq.recipe import Recipe

    overrides = {name: value for name, value in options.items() if value is not None}
    overrides.update(map(parse_override, changes or ()))
    if file is None:
        usual = "zoo" if model.startswith(ZOO) else "default"
        recipe = Recipe.preset(usual if preset is None else preset, overrides)
    elif preset is None:
        recipe = Recipe.from_yaml(file, overrides)
    else:
        raise OnPTQError("expected one of --preset and --recipe, got both")
    return recipe if mix is None else _with_mix(recipe, mix)


def _with_mix(recipe: Recipe, mix: str) -> Recipe:
    """The recipe with other schemes for the linears that `mix` names, or with those of a `mix.json`."""
    from onptq.schemes import Scheme

    scheme = Scheme.parse(recipe.scheme)
    if not mix.endswith(".json"):
        return recipe.with_overrides({"scheme": str(scheme.mixed(mix))})
    from onptq.files import read_json

    content = read_json(Path(mix))
    if not isinstance(content, dict) or not isinstance(content.get("scheme"), str):
        raise OnPTQError(f"--mix {mix}: expected the mix.json of `onptq mix`, with a scheme in it")
    mixed = Scheme.parse(content["scheme"])
    if mixed.unmixed != scheme.unmixed:
        raise OnPTQError(f"--mix {mix} was made for {mixed.unmixed}, and the scheme is {scheme.unmixed}")
    return recipe.with_overrides({"scheme": str(mixed)})


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


def use_one_thread(model: str) -> None:
    """Compute on one thread for a model of the zoo: GEMMs this small gain little from a second one, and wait long where a
    core is busy."""
    if model.startswith(ZOO) and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)


def short_name(model: str) -> str:
    """The last part of a model's name, for folders named after it."""
    return model.split(":", 1)[1] if is_cataloged(model) else Path(model).resolve().name
