"""An MLP's gated product as part of rounding it: humming reads gate and up and writes codes, instead of vLLM writing their
product in 16 bits and humming reading it again. vLLM leaves its own activation out where a linear is marked, and the linear's
input is then twice as wide as its weight, which is how the product is asked for. One rounding to 16 bits is left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Any

from onptq.schedules.table import Product

SILU = {"activation_type": "binary_split", "activation_impl": "(a / (1.f + expf(-a))) * b"}
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
        _multiply_pairs(forward)
        _mark_linears(HummingLinearKernel, chosen)
        _leave_products_out(Qwen2MLP)


def _multiply_pairs(forward: Any) -> None:
    own = forward.may_process_input

    def may_process_input(config: Any, inputs: Any, **options: Any) -> Any:
        return own(config, inputs, **(options | SILU if inputs.shape[-1] == 2 * config.shape_k else options))

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
