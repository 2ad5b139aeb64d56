"""Activations in vLLM, rounded by the kernel of the norm or gated MLP that computes them.

humming's own kernel would read them again. Codes go through vLLM's linears as packets (`kernels.packets`), in the place
of activations. Their scales are those of the checkpoint's format, absmax / 127.5; humming's own are absmax / 127.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from inspect import signature
from typing import Any

from onptq.kernels.packets import packet_width, unpacked
from onptq_vllm.schedules.table import Gemm

MARK = "_onptq_rounds"  # attribute of linears and of humming's layer configurations
DECODER = ("self", "positions", "hidden_states", "residual")

logger = logging.getLogger("onptq")


def register(chosen: Callable[[], Container[str]]) -> None:
    """Patch humming and vLLM. `chosen` returns the GEMMs to round for; it is called when the first weights are
    loaded."""
    try:
        from humming import forward  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from vllm.model_executor.kernels.linear.mixed_precision.humming import (  # type: ignore[import-not-found]
            HummingLinearKernel,
        )
        from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2MLP  # type: ignore[import-not-found]
        from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer  # type: ignore[import-not-found]
    except ImportError as error:
        logger.warning("activations are rounded by humming: unsupported version of vLLM or humming (%s)", error)
        return
    if hasattr(Qwen2MLP.forward, MARK):
        return
    _take_packets(forward)
    _mark(HummingLinearKernel, chosen)
    _round_gated(Qwen2MLP)
    for layer in (Qwen2DecoderLayer, Qwen3DecoderLayer):
        if tuple(signature(layer.forward).parameters) == DECODER:
            _round_normed(layer)
        else:
            logger.warning("norms do not round: unsupported %s in this version of vLLM", layer.__name__)


def _take_packets(forward: Any) -> None:
    from onptq_vllm.kernels.tokens import operator

    own, token_codes = forward.may_process_input, operator()

    def may_process_input(config: Any, inputs: Any, **options: Any) -> Any:
        """Codes, scales of groups and scales of tokens. A marked layer takes activations or a packet of them."""
        if not getattr(config, MARK, False):
            return own(config, inputs, **options)
        columns, packed = inputs.shape[-1], packet_width(config.shape_k, inputs.dtype)
        if columns not in (config.shape_k, packed):
            raise ValueError(
                f"a layer of {config.shape_k} inputs got {columns} columns: expected {config.shape_k} of activations or "
                f"{packed} of a packet"
            )
        packet = token_codes(inputs) if columns == config.shape_k else inputs
        codes, scale = unpacked(packet, config.shape_k)
        return codes, None, scale

    forward.may_process_input = may_process_input


def _mark(kernel: Any, chosen: Callable[[], Container[str]]) -> None:
    own = kernel.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        own(self, layer)
        metas = getattr(layer, "humming_metas", None) or {"": getattr(self, "layer_config", None)}
        configs = [one for one in metas.values() if one is not None]
        for one in configs:
            rounds = _is_whole(one) and str(Gemm.of(one)) in chosen()
            object.__setattr__(one, MARK, rounds)  # humming's configuration is frozen
        setattr(layer, MARK, bool(configs) and all(getattr(one, MARK) for one in configs))

    kernel.process_weights_after_loading = process_weights_after_loading


def _is_whole(config: Any) -> bool:
    """Whether activations are as wide as humming's weight: no columns were added to it."""
    return not getattr(config, "pad_shape_k", 0)


def _round_gated(mlp: Any) -> None:
    from onptq_vllm.kernels.gated import operator

    own, gated_codes = mlp.forward, operator()

    def forward(self: Any, x: Any) -> Any:
        if not getattr(self.down_proj, MARK, False):
            return own(self, x)
        pairs, _ = self.gate_up_proj(x)
        return self.down_proj(gated_codes(pairs))[0]

    setattr(forward, MARK, True)
    mlp.forward = forward


def _round_normed(layer: Any) -> None:
    from onptq_vllm.kernels.normed import operator

    normed_codes = operator()

    def normed(norm: Any, linear: Any, x: Any, stream: Any) -> Any:
        if stream is None:
            return norm(x), x
        if not getattr(linear, MARK, False):
            return norm(x, stream)
        return normed_codes(x, stream, norm.weight.data, norm.variance_epsilon)

    def forward(self: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
        x, residual = normed(self.input_layernorm, self.self_attn.qkv_proj, hidden_states, residual)
        x = self.self_attn(positions=positions, hidden_states=x)
        x, residual = normed(self.post_attention_layernorm, self.mlp.gate_up_proj, x, residual)
        return self.mlp(x), residual

    layer.forward = forward
