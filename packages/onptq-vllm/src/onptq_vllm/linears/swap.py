"""Low-bit linears swapped into a quantized checkpoint that was loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from onptq.errors import OnPTQError
from onptq.models.structure import find_structure
from onptq.quantizer.integers import LowBitLinear
from onptq.quantizer.numerics import round_to_codes
from onptq.quantizer.weights import dequantize

Backend = Literal["torch", "humming"]
Make = Callable[[LowBitLinear], nn.Module]


@dataclass(frozen=True)
class Swapped:
    count: int
    left: Mapping[str, int]  # linears that were not swapped, by the reason


class Unfit(Exception):
    """A linear that is not swapped; the message is the reason."""


@torch.no_grad()
def swap_linears(model: nn.Module, backend: Backend = "torch") -> Swapped:
    """Replace every linear of a loaded quantized checkpoint that integers can compute."""
    make, head = _maker(backend), model.get_output_embeddings()  # type: ignore[operator]
    named = {
        block.child(name) for block in find_structure(model, linears=nn.Module).blocks for name in block.linears
    }  # other quantizers' too
    count, left = 0, Counter[str]()
    for name, module in list(model.named_modules()):
        if not (isinstance(module, nn.Linear) or module in named):
            continue
        try:
            linear = _low_bit(module)
            if module is head:
                raise Unfit("output head")
        except Unfit as reason:
            left[str(reason)] += 1
            continue
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, make(linear))
        count += 1
    return Swapped(count, dict(left))


def _low_bit(module: nn.Module) -> LowBitLinear:
    """The low-bit linear of one that compressed-tensors simulates, with its weight unpacked; raises Unfit."""
    scheme = getattr(module, "quantization_scheme", None)
    if scheme is None:
        raise Unfit("not quantized" if type(module) is nn.Linear else f"{type(module).__name__} of another quantizer")
    if type(module) is not nn.Linear or module._forward_pre_hooks or module._forward_hooks or len(module._modules):
        raise Unfit("more than a linear: hooks or transforms")
    weights, inputs = scheme.weights, scheme.input_activations
    if weights is None or weights.type != "int" or weights.num_bits > 8:
        raise Unfit("weights are not integers of at most 8 bits")
    if not weights.symmetric or weights.strategy != "channel":
        kind = "symmetric" if weights.symmetric else "asymmetric"
        raise Unfit(f"{kind} weights with scales per {weights.strategy}, not symmetric ones per channel")
    if inputs is None:
        raise Unfit("activations are not quantized")
    if inputs.type != "int" or inputs.num_bits > 8 or not inputs.symmetric or inputs.dynamic is not True:
        raise Unfit("activations are not symmetric integers of at most 8 bits with dynamic scales")
    if inputs.strategy != "token" or scheme.output_activations is not None:
        raise Unfit("activations are not rounded per token at the input")
    weight, scale = module.weight, module.weight_scale
    assert isinstance(scale, torch.Tensor)
    codes = round_to_codes(weight.float(), scale.float(), weights.num_bits).to(torch.int8)
    if not torch.equal(dequantize(codes, scale, None, weight.dtype), weight):
        raise Unfit("the loaded weight is not codes times scales")
    return LowBitLinear(codes, scale[:, 0], module.bias, inputs.num_bits)


def _maker(backend: str) -> Make:
    if backend == "torch":
        return lambda linear: linear
    if backend == "humming":
        from onptq_vllm.linears.humming import HummingLinear

        return HummingLinear
    raise OnPTQError(f"unknown backend {backend!r}: expected torch or humming")
