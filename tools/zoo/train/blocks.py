"""One block of each kind over the transformers modules' own parameters, as functions that compile once for all layers.

Weights that read the same input are multiplied together, and nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Rotary = tuple[Tensor, Tensor]  # cos and sin, [B or 1, L, head width]


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> Linear:
        return cls(module.weight, module.bias)


class Joined(NamedTuple):
    """Linears with a common input. Their concatenation is part of the graph, so each gets its own gradient."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, *modules: Any) -> Joined:
        return cls(tuple(module.weight for module in modules), tuple(module.bias for module in modules))


class DecoderBlock(NamedTuple):
    norm1: Tensor
    norm2: Tensor
    qkv: Joined
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    gate_up: Joined
    down: Linear

    @classmethod
    def of(cls, layer: Any) -> DecoderBlock:
        attention, mlp = layer.self_attn, layer.mlp
        normed = hasattr(attention, "q_norm")
        return cls(
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            Joined.of(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.q_norm.weight if normed else None,
            attention.k_norm.weight if normed else None,
            Linear.of(attention.o_proj),
            Joined.of(mlp.gate_proj, mlp.up_proj),
            Linear.of(mlp.down_proj),
        )


class WindowedBlock(NamedTuple):
    """A block of the vision tower of Qwen2.5: RMS norms and a gated MLP."""

    norm1: Tensor
    norm2: Tensor
    qkv: Joined
    out: Linear
    gate_up: Joined
    down: Linear

    @classmethod
    def of(cls, block: Any) -> WindowedBlock:
        attention, mlp = block.attn, block.mlp
        parts = (attention.qkv,) if hasattr(attention, "qkv") else (attention.q, attention.k, attention.v)
        return cls(
            block.norm1.weight,
            block.norm2.weight,
            Joined.of(*parts),
            Linear.of(attention.proj),
            Joined.of(mlp.gate_proj, mlp.up_proj),
            Linear.of(mlp.down_proj),
        )


class PlainBlock(NamedTuple):
    """A block of Qwen3's vision tower and of Omni's audio tower: layer norms and an MLP without gate."""

    norm1: Linear
    norm2: Linear
    qkv: Joined
    out: Linear
    up: Linear
    down: Linear

    @classmethod
    def of_vision(cls, block: Any) -> PlainBlock:
        return cls(
            Linear.of(block.norm1),
            Linear.of(block.norm2),
            Joined.of(block.attn.qkv),
            Linear.of(block.attn.proj),
            Linear.of(block.mlp.linear_fc1),
            Linear.of(block.mlp.linear_fc2),
        )

    @classmethod
    def of_audio(cls, layer: Any) -> PlainBlock:
        attention = layer.self_attn
        return cls(
            Linear.of(layer.self_attn_layer_norm),
            Linear.of(layer.final_layer_norm),
            Joined.of(attention.q_proj, attention.k_proj, attention.v_proj),
            Linear.of(attention.out_proj),
            Linear.of(layer.fc1),
            Linear.of(layer.fc2),
        )


def decode(x: Tensor, block: DecoderBlock, rotary: Rotary, head_dim: int, eps: float) -> Tensor:
    """A decoder layer over right-padded rows [B, L, H]: padding comes last, so causality alone hides it."""
    q, k, v = _heads(_joined(rms_norm(x, block.norm1, eps), block.qkv), block.qkv, head_dim)
    if block.q_norm is not None and block.k_norm is not None:
        q, k = rms_norm(q, block.q_norm, eps), rms_norm(k, block.k_norm, eps)
    q, k = _rotate(q, rotary), _rotate(k, rotary)
    # Repeated here, since not every fast attention kernel takes fewer heads of k and v than of q.
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + _linear(_flat(attended), block.out)
    return x + _gated(rms_norm(x, block.norm2, eps), block.gate_up, block.down)


def see_windowed(x: Tensor, block: WindowedBlock, rotary: Rotary, head_dim: int) -> Tensor:
    """A vision block over images [B, patches, H] that are one window each."""
    q, k, v = _thirds(_joined(rms_norm(x, block.norm1, 1e-6), block.qkv), head_dim)
    seen = F.scaled_dot_product_attention(_rotate(q, rotary), _rotate(k, rotary), v)
    x = x + _linear(_flat(seen), block.out)
    return x + _gated(rms_norm(x, block.norm2, 1e-6), block.gate_up, block.down)


def see_plain(x: Tensor, block: PlainBlock, rotary: Rotary, head_dim: int) -> Tensor:
    q, k, v = _thirds(_joined(layer_norm(x, block.norm1, 1e-6), block.qkv), head_dim)
    seen = F.scaled_dot_product_attention(_rotate(q, rotary), _rotate(k, rotary), v)
    x = x + _linear(_flat(seen), block.out)
    raised = F.gelu(_linear(layer_norm(x, block.norm2, 1e-6), block.up), approximate="tanh")
    return x + _linear(raised, block.down)


def hear(x: Tensor, block: PlainBlock, mask: Tensor, head_dim: int) -> Tensor:
    """An audio block over [B, frames, H]; `mask` [B, 1, 1, frames] is true where there is audio."""
    q, k, v = _thirds(_joined(layer_norm(x, block.norm1, 1e-5), block.qkv), head_dim)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x = x + _linear(_flat(attended), block.out)
    return x + _linear(F.gelu(_linear(layer_norm(x, block.norm2, 1e-5), block.up)), block.down)


def token_losses(x: Tensor, norm: Tensor, eps: float, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy [K] of each target after its state in x [K, H]."""
    return F.cross_entropy(F.linear(rms_norm(x, norm, eps), head).float(), targets, reduction="none")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(x.dtype)


def layer_norm(x: Tensor, norm: Linear, eps: float) -> Tensor:
    return F.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, eps).to(x.dtype)


def _linear(x: Tensor, linear: Linear) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)


def _joined(x: Tensor, linears: Joined) -> Tensor:
    if all(bias is None for bias in linears.biases):
        return F.linear(x, torch.cat(linears.weights))
    pairs = zip(linears.weights, linears.biases, strict=True)
    filled = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs]
    return F.linear(x, torch.cat(linears.weights), torch.cat(filled))


def _gated(x: Tensor, gate_up: Joined, down: Linear) -> Tensor:
    gate, up = _joined(x, gate_up).chunk(2, -1)
    return _linear(F.silu(gate) * up, down)


def _heads(qkv: Tensor, linears: Joined, head_dim: int) -> tuple[Tensor, ...]:
    batch, length = qkv.shape[:2]
    parts = qkv.split([len(weight) for weight in linears.weights], -1)
    return tuple(part.view(batch, length, -1, head_dim).transpose(1, 2) for part in parts)


def _thirds(qkv: Tensor, head_dim: int) -> tuple[Tensor, ...]:
    batch, length = qkv.shape[:2]
    return tuple(part.view(batch, length, -1, head_dim).transpose(1, 2) for part in qkv.chunk(3, -1))


def _flat(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = (part[:, None] for part in rotary)
    first, second = x.float().chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
