"""Products of a few rows by a kernel of our own, few_rows.cu, which reads codes where humming has put them. Its launches stand
among humming's schedules in a table."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from onptq_vllm.schedules.table import Product, Schedule

KERNEL = "few_rows"
MOST = 8  # rows
SINCE = (9, 0)  # GPUs whose blocks can share a sum
OUTPUTS, COLUMNS = 64, 16  # of a warp's step
WARPS, CLUSTERS, DEPTHS = (4, 8, 16), (1, 2, 4, 8), (2, 3, 4, 8)


def is_launch(schedule: Schedule) -> bool:
    return schedule.get("kernel") == KERNEL


def plain_product(config: str) -> Product | None:
    """Of humming's LayerConfig as text, unless something is in it that the kernel does not know."""
    layer = json.loads(config)
    values = {layer.get(name) for name in ("a_dtype", "bs_dtype", "c_dtype")}
    unknown = ("pad_shape_n", "pad_shape_k", "num_experts", "has_zero_point", "use_int_weight_scale")
    steps = layer.get("weight_scale_type") in ("channel", "group")
    if len(values) > 1 or any(layer.get(name) for name in unknown) or not steps:
        return None
    group = int(layer["weight_scale_group_size"])
    return Product(layer["shape_n"], layer["shape_k"], layer["a_dtype"], layer["b_dtype"], group)


def launches(product: Product, rows: int) -> Iterator[Schedule]:
    """Those whose warps have at least half as many steps as they keep on their way; none for products it cannot do."""
    values = product.activations in ("float16", "bfloat16") and product.weights == "uint4"
    if rows > MOST or not values or product.outputs % OUTPUTS or product.inputs % COLUMNS or product.group % COLUMNS:
        return
    for warps in WARPS:
        for cluster in CLUSTERS:
            for depth in DEPTHS:
                if warps * cluster * depth <= 2 * (product.inputs // COLUMNS):
                    yield {"kernel": KERNEL, "warps": warps, "cluster": cluster, "depth": depth}


def source(product: Product, launch: Schedule) -> str:
    named = {"N": product.outputs, "K": product.inputs, "GROUP": product.group}
    named |= {name.upper(): int(launch[name]) for name in ("warps", "cluster", "depth")}
    named |= {"BFLOAT16": 1} if product.activations == "bfloat16" else {}
    text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return "".join(f"#define {name} {value}\n" for name, value in named.items()) + text


@dataclass(frozen=True)
class FewRows:
    """Compiled for the current GPU by humming, which keeps it beside its own kernels."""

    product: Product
    launch: Schedule
    kernel: Any

    @classmethod
    def of(cls, product: Product, launch: Schedule) -> FewRows:
        kernel = _compiled()(source=source(product, launch))
        kernel.load_cubin()  # now: where a graph is being captured it may not be
        return cls(product, launch, kernel)

    def __call__(self, x: Tensor, codes: Tensor, steps: Tensor, bias: Tensor | None) -> Tensor:
        import cuda.bindings.driver as driver  # type: ignore[import-not-found, import-untyped, unused-ignore]

        y = x.new_empty(len(x), self.product.outputs)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.launch["cluster"], self.product.outputs // OUTPUTS, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * self.launch["warps"], 1, 1
        config.hStream = torch.cuda.current_stream(x.device).cuda_stream
        self.kernel.set_pdl_launch_attribute(config, True)
        tensors = (codes, x, steps, bias, y)
        values = (*(0 if one is None else one.data_ptr() for one in tensors), len(x))
        types = (*(ctypes.c_void_p for _ in tensors), ctypes.c_uint32)
        (error,) = driver.cuLaunchKernelEx(config, self.kernel.load_cubin(), (values, types), 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{self.product}, {self.launch}: {error!r}")
        return y


@cache
def _compiled() -> Any:
    import dataclasses

    from humming.jit.runtime import KernelRuntime  # type: ignore[import-not-found, import-untyped, unused-ignore]

    @dataclasses.dataclass(kw_only=True)
    class Kernel(KernelRuntime):  # type: ignore[misc, unused-ignore]
        name: ClassVar[str] = KERNEL
        source: str

        def init_kernel(self) -> None:
            self.code = self.source
            self.prepare()

    return Kernel
