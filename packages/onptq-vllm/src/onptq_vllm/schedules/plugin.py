"""The plugin that vLLM calls at its start (entry point `vllm.general_plugins`), to use the schedules of `onptq tune`."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from onptq.errors import OnPTQError
from onptq_vllm.schedules import decoding, rounding
from onptq_vllm.schedules.few_rows import is_launch
from onptq_vllm.schedules.table import Gemm, Table, overlay, table_path, tables_exist

PACKAGE = "humming-kernels"
MARK = "_onptq_schedules"  # attribute of the replaced function: vLLM may call the plugin more than once in a process

logger = logging.getLogger("onptq")


def register() -> None:
    """Patch humming and vLLM. Without humming, or without a table, nothing changes."""
    if find_spec("humming") is None or not tables_exist():
        return
    _register_schedules()
    decoding.register(lambda: tuned_here().gemms)
    rounding.register(lambda: {name for name, seconds in tuned_here().rounding.items() if seconds})
    _join_compile_key()


def _register_schedules() -> None:
    from humming.tune.base import DeviceHeuristics  # type: ignore[import-not-found, import-untyped, unused-ignore]

    own = DeviceHeuristics.get_configs
    if hasattr(own, MARK):
        return

    def get_configs(cls: Any, layer_config: Any, *args: Any, **options: Any) -> Any:
        intervals = own.__func__(cls, layer_config, *args, **options)
        plain = not any(options.get(name) for name in ("use_f16_accum", "use_batch_invariant")) and not args
        tuned = tuned_here().gemms.get(str(Gemm.of(layer_config)), ()) if plain else ()
        schedules = [one for one in tuned if not is_launch(one.schedule)]
        return overlay(intervals, schedules) if schedules and not layer_config.num_experts else intervals

    setattr(get_configs, MARK, True)
    DeviceHeuristics.get_configs = classmethod(get_configs)


def _join_compile_key() -> None:
    """Make the table part of the key of vLLM's compile cache, so that a new table compiles anew."""
    try:
        from vllm import envs  # type: ignore[import-not-found]
    except ImportError:
        return
    envs.environment_variables["ONPTQ_TUNED"] = lambda: tuned_here().text()


@cache
def tuned_here() -> Table:
    """The table of this GPU, read when the first weights are loaded. A file that cannot be read is warned of once."""
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
    logger.info("schedules of %d GEMMs from %s", len(table.gemms), path)
    return table
