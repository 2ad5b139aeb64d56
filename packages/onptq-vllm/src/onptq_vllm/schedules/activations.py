"""Activations of a GEMM, computed by one kernel and rounded by humming, or both by one kernel: checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from onptq.kernels.packets import unpacked
from onptq_vllm.schedules.captured import captured_seconds

Way = Literal["normed", "attended", "gated"]  # the operation that computes the activations
WAYS: Mapping[str, Way] = {
    "qkv_proj": "normed",
    "o_proj": "attended",
    "gate_up_proj": "normed",
    "down_proj": "gated",
}
EPS = 1e-6
CALLS = 4  # of a captured graph
LARGEST = 128  # of a code


@dataclass(frozen=True)
class Maker:
    """One way of computing activations: random inputs, the plain operation, and the kernel that also rounds."""

    draw: Callable[[int, int], tuple[Tensor, ...]]  # inputs for rows and columns of a GEMM
    plain: Callable[..., tuple[Tensor, ...]]  # the activations and other outputs; vLLM compiles the same
    packet: Callable[..., Tensor]
    roundings: int  # of a value to 16 bits before it is a code, that of its scale included


def time_rounding(way: Way, config: Any, rows: int, width: int, dtype: torch.dtype) -> tuple[float, float] | None:
    """Seconds of two kernels and of one; None where that one is wrong. `config` is humming's LayerConfig."""
    from humming.forward import may_process_input  # type: ignore[import-not-found, import-untyped, unused-ignore]

    maker = _maker(way)
    inputs = tuple(one.to("cuda", dtype) for one in maker.draw(rows, width))
    if not _is_right(maker, inputs, width):
        return None
    torch.compiler.reset()  # torch.compile stops after a number of shapes of one function
    plain = torch.compile(maker.plain, dynamic=False) if way != "attended" else maker.plain
    apart = captured_seconds(lambda call: may_process_input(config, plain(*inputs)[0]), CALLS)
    return apart, captured_seconds(lambda call: maker.packet(*inputs), CALLS)


def _is_right(maker: Maker, inputs: tuple[Tensor, ...], width: int) -> bool:
    codes, scale = unpacked(maker.packet(*inputs), width)
    error = codes.float() * scale - maker.plain(*(one.float() for one in inputs))[0]
    off = 0.5 + maker.roundings * LARGEST * torch.finfo(inputs[0].dtype).eps / 2
    return bool((error.abs() <= off * scale).all())  # False for a NaN


def _maker(way: Way) -> Maker:
    from onptq.kernels.codes import token_codes
    from onptq_vllm.kernels.gated import gated_codes
    from onptq_vllm.kernels.normed import normed_codes

    if way == "gated":
        return Maker(lambda rows, width: (torch.randn(rows, 2 * width),), _multiply_gates, gated_codes, 2)
    if way == "normed":
        return Maker(_draw_stream, _norm, lambda x, stream, gain: normed_codes(x, stream, gain, EPS)[0], 4)
    return Maker(lambda rows, width: (torch.randn(rows, width),), lambda x: (x,), token_codes, 1)


def _multiply_gates(pairs: Tensor) -> tuple[Tensor]:
    gate, up = pairs.chunk(2, -1)
    return (F.silu(gate) * up,)


def _draw_stream(rows: int, width: int) -> tuple[Tensor, ...]:
    return torch.randn(rows, width), torch.randn(rows, width), 1 + 0.1 * torch.randn(width)


def _norm(x: Tensor, stream: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    total = x.float() + stream.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    return normed.to(x.dtype) * gain, total.to(x.dtype)
