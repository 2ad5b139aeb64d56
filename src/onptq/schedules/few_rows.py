"""Products of a few rows by a kernel of our own, few_rows.cu, which reads codes where humming has put them. Its launches stand
among humming's schedules in a table."""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from onptq.schedules.table import Found, Product, Schedule

KERNEL = "few_rows"
MARK = "_onptq_few_rows"  # of what took the place of humming's function; says for which rows of a layer
MOST = 8  # rows
SINCE = (9, 0)  # GPUs whose blocks can share a sum
OUTPUTS, COLUMNS = 64, 16  # of a warp's step
WARPS, CLUSTERS, DEPTHS = (4, 8, 16), (1, 2, 4, 8), (2, 3, 4, 8)

logger = logging.getLogger("onptq")

SCHEMA = "(Tensor x, Tensor codes, Tensor steps, Tensor? bias, Tensor? locks, str layer, str? compute) -> Tensor"


def is_launch(schedule: Schedule) -> bool:
    return schedule.get("kernel") == KERNEL


def launches(product: Product, rows: int) -> Iterator[Schedule]:
    """Those whose warps have at least half as many steps as they keep on their way; none for products it cannot do."""
    values = product.activations in ("float16", "bfloat16") and product.weights == "uint4" and not product.group
    if rows > MOST or not values or product.outputs % OUTPUTS or product.inputs % COLUMNS:
        return
    for warps in WARPS:
        for cluster in CLUSTERS:
            for depth in DEPTHS:
                if warps * cluster * depth <= 2 * (product.inputs // COLUMNS):
                    yield {"kernel": KERNEL, "warps": warps, "cluster": cluster, "depth": depth}


def source(product: Product, launch: Schedule) -> str:
    named = {"N": product.outputs, "K": product.inputs}
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


def register(chosen: Callable[[], Mapping[str, Sequence[Found]]]) -> None:
    """Where `chosen` has launches for a product, humming is asked for other numbers of rows only."""
    try:
        from humming import ops  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        logger.warning("few rows are multiplied as many are: this humming is another (%s)", error)
        return
    own = ops.humming_gemm
    if hasattr(own, MARK):
        return

    @cache
    def ours(layer: str) -> list[tuple[Found, FewRows]]:
        product = plain_product(json.loads(layer))
        found = chosen().get(str(product), ()) if product else ()
        return [(one, FewRows.of(product, one.schedule)) for one in found if product and is_launch(one.schedule)]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
    def any_of_ours(layer: str) -> bool:
        return bool(ours(layer))

    @torch.library.custom_op("onptq::few_rows_or_humming", mutates_args=(), schema=SCHEMA)
    def product(
        x: Tensor,
        codes: Tensor,
        steps: Tensor,
        bias: Tensor | None,
        locks: Tensor | None,
        layer: str,
        compute: str | None,
    ) -> Tensor:
        for found, few_rows in ours(layer):
            if found.above < len(x) <= found.upto:
                return few_rows(x.contiguous(), codes, steps, bias)
        return own(  # type: ignore[no-any-return]
            layer_config=layer,
            compute_config=compute,
            inputs=x,
            weight=codes,
            weight_scale=steps,
            bias=bias,
            locks=locks,
        )

    @product.register_fake
    def shape(x: Tensor, codes: Tensor, steps: Tensor, bias: Any, locks: Any, layer: str, compute: Any) -> Tensor:
        return x.new_empty(x.shape[0], json.loads(layer)["shape_n"])

    def humming_gemm(
        *,
        layer_config: str,
        inputs: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        locks: Tensor | None = None,
        compute_config: str | None = None,
        tuning_config: str | None = None,
        **others: Any,
    ) -> Tensor:
        plain = tuning_config is None and not any(isinstance(one, Tensor) for one in others.values())
        if plain and any_of_ours(layer_config):
            return product(inputs, weight, weight_scale, bias, locks, layer_config, compute_config)  # type: ignore[no-any-return, unused-ignore]
        named = {"layer_config": layer_config, "compute_config": compute_config, "tuning_config": tuning_config}
        return own(  # type: ignore[no-any-return]
            inputs=inputs, weight=weight, weight_scale=weight_scale, bias=bias, locks=locks, **named, **others
        )

    setattr(humming_gemm, MARK, lambda layer: [(found.above, found.upto) for found, _ in ours(layer)])
    ops.humming_gemm = humming_gemm


def plain_product(layer: Mapping[str, Any]) -> Product | None:
    """Of humming's LayerConfig as text, unless something is in it that the kernel does not know."""
    values = {layer[name] for name in ("a_dtype", "bs_dtype", "c_dtype")}
    unknown = ("pad_shape_n", "pad_shape_k", "num_experts", "has_zero_point", "use_int_weight_scale")
    if len(values) > 1 or any(layer[name] for name in unknown) or layer["weight_scale_type"] != "channel":
        return None
    group = int(layer["weight_scale_group_size"])
    return Product(layer["shape_n"], layer["shape_k"], layer["a_dtype"], layer["b_dtype"], group)
