"""What vLLM calls at its start (entry point `vllm.general_plugins`): it then takes what `onptq tune` found."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from onptq.errors import OnPTQError
from onptq_vllm.schedules import decoding, rounding
from onptq_vllm.schedules.few_rows import is_launch
from onptq_vllm.schedules.table import Product, Table, overlay, table_path, tables_exist

PACKAGE = "humming-kernels"
MARK = "_onptq_schedules"  # of what took the place of humming's function: vLLM may call more than once in a process

logger = logging.getLogger("onptq")


def register() -> None:
    """Without humming, or without a file for this GPU and this version of it, nothing changes."""
    if find_spec("humming") is None or not tables_exist():
        return
    _register_schedules()
    decoding.register(lambda: found_here().products)
    rounding.register(lambda: {name for name, seconds in found_here().rounding.items() if seconds})
    _join_compile_key()


def _register_schedules() -> None:
    from humming.tune.base import DeviceHeuristics  # type: ignore[import-not-found, import-untyped, unused-ignore]

    own = DeviceHeuristics.get_configs
    if hasattr(own, MARK):
        return

    def get_configs(cls: Any, layer_config: Any, *args: Any, **options: Any) -> Any:
        intervals = own.__func__(cls, layer_config, *args, **options)
        plain = not any(options.get(name) for name in ("use_f16_accum", "use_batch_invariant")) and not args
        found = found_here().products.get(str(Product.of(layer_config)), ()) if plain else ()
        schedules = [one for one in found if not is_launch(one.schedule)]
        return overlay(intervals, schedules) if schedules and not layer_config.num_experts else intervals

    setattr(get_configs, MARK, True)
    DeviceHeuristics.get_configs = classmethod(get_configs)


def _join_compile_key() -> None:
    """vLLM takes a compiled model from its cache where nothing has changed that it knows of: it is told of the table."""
    try:
        from vllm import envs  # type: ignore[import-not-found]
    except ImportError:
        return
    envs.environment_variables["ONPTQ_FOUND"] = lambda: found_here().text()


@cache
def found_here() -> Table:
    """On this GPU, read when the first weights are there; a file that cannot be read is said once and left."""
    import torch

    try:
        here = torch.cuda.get_device_name(), version(PACKAGE)
        path = table_path(*here)
        if not path.is_file():
            return Table(*here)
        table = Table.read(path)
        table.check(path, *here)
    except (OnPTQError, PackageNotFoundError) as error:
        logger.warning("%s", error)
        return Table("", "")
    logger.info("schedules of %d products from %s", len(table.products), path)
    return table
