"""RMS norms as transformers computes them: rounded once before the gain and once after it."""

from __future__ import annotations

from inspect import Parameter, signature

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onptq import kernels

EPS_NAMES = ("variance_epsilon", "eps")  # attributes that hold what is added to the mean square


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The norm of x [..., channels] with the gain [channels]."""
    if x.dtype == gain.dtype and kernels.fit(x, gain):
        from onptq.kernels.norms import rms_norm_rows

        return rms_norm_rows(x, gain, eps)
    return plain_norm(x, gain, eps)


@torch.no_grad()
def find_eps(norm: nn.Module) -> float | None:
    """The epsilon of a module that computes such a norm; None for any other module."""
    gain: Tensor = norm.weight  # type: ignore[assignment]
    if _is_gated(norm):
        return None
    eps = next((getattr(norm, name) for name in EPS_NAMES if hasattr(norm, name)), None)
    probe = torch.linspace(-1, 2, len(gain), dtype=gain.dtype, device=gain.device)
    small = probe * 1e-3  # where the epsilon shows
    is_rms_norm = isinstance(eps, float) and all(torch.equal(norm(x), plain_norm(x, gain, eps)) for x in (probe, small))
    return eps if is_rms_norm else None


@torch.no_grad()
def gain_offset(norm: nn.Module) -> float | None:
    """What a norm adds to its weight before it multiplies with it: 0, or 1 as in Gemma; None where it does neither."""
    weight: Tensor = norm.weight  # type: ignore[assignment]
    probe = torch.linspace(-1, 1, len(weight), dtype=weight.dtype, device=weight.device)
    inputs = (probe, torch.ones_like(probe)) if _is_gated(norm) else (probe,)
    once = norm(*inputs)
    for offset in (0.0, 1.0):
        twice = functional_call(norm, {"weight": 2 * weight + offset}, inputs)  # a gain of 2 (offset + weight)
        if torch.allclose(twice, 2 * once, rtol=1e-2):
            return offset
    return None


def _is_gated(norm: nn.Module) -> bool:
    """Whether what it computes is multiplied with a function of another input."""
    parameters = signature(norm.forward).parameters.values()
    return (
        sum(
            parameter.default is Parameter.empty
            for parameter in parameters
            if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        )
        > 1
    )


def divided_gain(weight: Tensor, log_out: Tensor, offset: float) -> Tensor:
    """The weight of a norm whose gain, offset + weight, is divided by s; fp32."""
    if not offset:
        return weight.float() / log_out.exp()
    return (weight.float() + offset) / log_out.exp() - offset


def plain_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * normed.to(x.dtype)
