"""GEMMs of a few rows by a kernel of our own, few_rows.cu, which reads codes in humming's layout.

Its launches are entries of a table beside humming's schedules."""

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

from onptq_vllm.schedules.table import Gemm, Schedule

KERNEL = "few_rows"
MOST = 8  # rows
SINCE = (9, 0)  # compute capability from which blocks form clusters
OUTPUTS, COLUMNS = 64, 16  # of a warp's iteration
WARPS, CLUSTERS, DEPTHS = (4, 8, 16), (1, 2, 4, 8), (2, 3, 4, 8)


def is_launch(schedule: Schedule) -> bool:
    return schedule.get("kernel") == KERNEL


def plain_gemm(config: str) -> Gemm | None:
    """The GEMM of humming's LayerConfig as text; None if it has something that the kernel does not support."""
    layer = json.loads(config)
    values = {layer.get(name) for name in ("a_dtype", "bs_dtype", "c_dtype")}
    unsupported = ("pad_shape_n", "pad_shape_k", "num_experts", "has_zero_point", "use_int_weight_scale")
    scales = layer.get("weight_scale_type") in ("channel", "group")
    if len(values) > 1 or any(layer.get(name) for name in unsupported) or not scales:
        return None
    group = int(layer["weight_scale_group_size"])
    return Gemm(layer["shape_n"], layer["shape_k"], layer["a_dtype"], layer["b_dtype"], group)


def launches(gemm: Gemm, rows: int) -> Iterator[Schedule]:
    """Launches whose warps have at least half as many iterations as loads in flight; none for GEMMs it does not
    support."""
    values = gemm.activations in ("float16", "bfloat16") and gemm.weights == "uint4"
    if rows > MOST or not values or gemm.outputs % OUTPUTS or gemm.inputs % COLUMNS or gemm.group % COLUMNS:
        return
    for warps in WARPS:
        for cluster in CLUSTERS:
            for depth in DEPTHS:
                if warps * cluster * depth <= 2 * (gemm.inputs // COLUMNS):
                    yield {"kernel": KERNEL, "warps": warps, "cluster": cluster, "depth": depth}


def source(gemm: Gemm, launch: Schedule) -> str:
    named = {"N": gemm.outputs, "K": gemm.inputs, "GROUP": gemm.group}
    named |= {name.upper(): int(launch[name]) for name in ("warps", "cluster", "depth")}
    named |= {"BFLOAT16": 1} if gemm.activations == "bfloat16" else {}
    text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return "".join(f"#define {name} {value}\n" for name, value in named.items()) + text


@dataclass(frozen=True)
class FewRows:
    """A launch, compiled for the current GPU by humming and cached with its own kernels."""

    gemm: Gemm
    launch: Schedule
    kernel: Any

    @classmethod
    def of(cls, gemm: Gemm, launch: Schedule) -> FewRows:
        kernel = _compiled()(source=source(gemm, launch))
        kernel.load_cubin()  # now: not allowed while a graph is captured
        return cls(gemm, launch, kernel)

    def __call__(self, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        import cuda.bindings.driver as driver  # type: ignore[import-not-found, import-untyped, unused-ignore]

        y = x.new_empty(len(x), self.gemm.outputs)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.launch["cluster"], self.gemm.outputs // OUTPUTS, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * self.launch["warps"], 1, 1
        config.hStream = torch.cuda.current_stream(x.device).cuda_stream
        self.kernel.set_pdl_launch_attribute(config, True)
        tensors = (codes, x, scales, bias, y)
        values = (*(0 if one is None else one.data_ptr() for one in tensors), len(x))
        types = (*(ctypes.c_void_p for _ in tensors), ctypes.c_uint32)
        (error,) = driver.cuLaunchKernelEx(config, self.kernel.load_cubin(), (values, types), 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{self.gemm}, {self.launch}: {error!r}")
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
