"""Decoding in vLLM: GEMMs of a few rows go to few_rows.cu if the table has launches for them, all others to humming."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onptq_vllm.schedules.few_rows import FewRows, is_launch, plain_gemm
from onptq_vllm.schedules.table import TunedSchedule

MARK = "_onptq_few_rows"  # attribute of the replaced function: the rows of a layer that few_rows.cu computes
SCHEMA = "(Tensor x, Tensor codes, Tensor scales, Tensor? bias, Tensor? locks, str layer, str? compute) -> Tensor"

logger = logging.getLogger("onptq")


def register(chosen: Callable[[], Mapping[str, Sequence[TunedSchedule]]]) -> None:
    """Replace humming's GEMM. `chosen` returns the tuned schedules by GEMM."""
    try:
        from humming import ops  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        logger.warning("few_rows.cu is not used: it does not fit this version of humming (%s)", error)
        return
    own = ops.humming_gemm
    if hasattr(own, MARK):
        return

    @cache
    def ours(layer: str) -> list[tuple[TunedSchedule, FewRows]]:
        gemm = plain_gemm(layer)
        tuned = chosen().get(str(gemm), ()) if gemm else ()
        return [(one, FewRows.of(gemm, one.schedule)) for one in tuned if gemm and is_launch(one.schedule)]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
    def any_of_ours(layer: str, compute: str | None) -> bool:
        """Whether few_rows.cu has launches for the layer; never where results must not depend on the number of rows."""
        return not json.loads(compute or "{}").get("use_batch_invariant") and bool(ours(layer))

    @torch.library.custom_op("onptq::few_rows_or_humming", mutates_args=(), schema=SCHEMA)
    def few_rows_or_humming(
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        locks: Tensor | None,
        layer: str,
        compute: str | None,
    ) -> Tensor:
        for tuned, few_rows in ours(layer):
            if tuned.above < len(x) <= tuned.upto:
                return few_rows(x.contiguous(), codes, scales, bias)
        return own(  # type: ignore[no-any-return]
            layer_config=layer,
            compute_config=compute,
            inputs=x,
            weight=codes,
            weight_scale=scales,
            bias=bias,
            locks=locks,
        )

    @few_rows_or_humming.register_fake
    def shape(x: Tensor, codes: Tensor, scales: Tensor, bias: Any, locks: Any, layer: str, compute: Any) -> Tensor:
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
            operands = (inputs, weight, weight_scale, bias, locks)
            return few_rows_or_humming(*operands, layer_config, compute_config)  # type: ignore[no-any-return, unused-ignore]
        named = {"layer_config": layer_config, "compute_config": compute_config, "tuning_config": tuning_config}
        return own(  # type: ignore[no-any-return]
            inputs=inputs, weight=weight, weight_scale=weight_scale, bias=bias, locks=locks, **named, **others
        )

    setattr(humming_gemm, MARK, lambda layer: [(tuned.above, tuned.upto) for tuned, _ in ours(layer)])
    ops.humming_gemm = humming_gemm
