"""An MLP's gated product as part of rounding it: one kernel reads gates and what they multiply and writes codes, instead of vLLM
writing the product in 16 bits and humming reading it again. vLLM leaves its own activation out where a linear is marked; what
enters the linear is then twice as wide as its weight, and so asks for the product."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Any

from onptq.schedules.table import Product

MARK = "_onptq_gated"

logger = logging.getLogger("onptq")


def register(chosen: Callable[[], Container[str]]) -> None:
    """`chosen` names the products for which it was right and faster; asked when the first weights are there."""
    try:
        from humming import forward  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from vllm.model_executor.kernels.linear.mixed_precision.humming import (  # type: ignore[import-not-found]
            HummingLinearKernel,
        )
        from vllm.model_executor.models.qwen2 import Qwen2MLP  # type: ignore[import-not-found]
    except ImportError as error:
        logger.warning("gated products stay apart from rounding: this vLLM or humming is another (%s)", error)
        return
    if not hasattr(Qwen2MLP.forward, MARK):
        from onptq.kernels.gated import operator

        _multiply_pairs(forward, operator())
        _mark_linears(HummingLinearKernel, chosen)
        _leave_products_out(Qwen2MLP)


def _multiply_pairs(forward: Any, codes: Callable[[Any], tuple[Any, Any]]) -> None:
    own = forward.may_process_input

    def may_process_input(config: Any, inputs: Any, **options: Any) -> Any:
        """Codes, steps of groups and steps of tokens."""
        if inputs.shape[-1] != 2 * config.shape_k:
            return own(config, inputs, **options)
        found, step = codes(inputs)
        return found, None, step

    forward.may_process_input = may_process_input


def _mark_linears(kernel: Any, chosen: Callable[[], Container[str]]) -> None:
    own = kernel.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        own(self, layer)
        metas = getattr(layer, "humming_metas", None) or {"": getattr(self, "layer_config", None)}
        setattr(layer, MARK, any(one is not None and str(Product.of(one)) in chosen() for one in metas.values()))

    kernel.process_weights_after_loading = process_weights_after_loading


def _leave_products_out(mlp: Any) -> None:
    own = mlp.forward

    def forward(self: Any, x: Any) -> Any:
        if not getattr(self.down_proj, MARK, False):
            return own(self, x)
        pairs, _ = self.gate_up_proj(x)
        return self.down_proj(pairs)[0]

    setattr(forward, MARK, True)
    mlp.forward = forward
