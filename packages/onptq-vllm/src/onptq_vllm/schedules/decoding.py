"""What vLLM decodes with: products of a few rows go to few_rows.cu where a table has launches for them, all others to humming."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onptq_vllm.schedules.few_rows import FewRows, is_launch, plain_product
from onptq_vllm.schedules.table import Found

MARK = "_onptq_few_rows"  # of what took the place of humming's function; says for which rows of a layer
SCHEMA = "(Tensor x, Tensor codes, Tensor steps, Tensor? bias, Tensor? locks, str layer, str? compute) -> Tensor"

logger = logging.getLogger("onptq")


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
        product = plain_product(layer)
        found = chosen().get(str(product), ()) if product else ()
        return [(one, FewRows.of(product, one.schedule)) for one in found if product and is_launch(one.schedule)]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
    def any_of_ours(layer: str, compute: str | None) -> bool:
        """Not where rows must come out alike however many there are."""
        return not json.loads(compute or "{}").get("use_batch_invariant") and bool(ours(layer))

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
        if plain and any_of_ours(layer_config, compute_config):
            return product(inputs, weight, weight_scale, bias, locks, layer_config, compute_config)  # type: ignore[no-any-return, unused-ignore]
        named = {"layer_config": layer_config, "compute_config": compute_config, "tuning_config": tuning_config}
        return own(  # type: ignore[no-any-return]
            inputs=inputs, weight=weight, weight_scale=weight_scale, bias=bias, locks=locks, **named, **others
        )

    setattr(humming_gemm, MARK, lambda layer: [(found.above, found.upto) for found, _ in ours(layer)])
    ops.humming_gemm = humming_gemm
