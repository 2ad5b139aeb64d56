"""The two kinds of module a policy swaps into each block. One set of weights, two policies: a switch says who speaks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from onptq.errors import OnPTQError
from onptq.models.structure import Block
from onptq.quantizer.folded import FoldedLinear, FoldedNorm
from onptq.quantizer.integer import cast_through, fake_quantize_activations
from onptq.quantizer.norms import find_eps, rms_norm
from onptq.quantizer.settled import settled_codes, settled_linear
from onptq.quantizer.theta import Theta, log_scales_in, log_scales_out
from onptq.quantizer.weights import dequantize, fake_quantize_weight, smoothed, weight_codes
from onptq.schemes import Scheme


@dataclass
class Switch:
    """Shared by every module of one policy."""

    quantized: bool = False
    keep_dequantized: bool = False  # hold Q's weights as floats between forwards: faster rollouts, more memory


class QuantLinear(nn.Module):
    """D: the linear as it came. Q: either live (differentiable in theta) or folded (integer codes)."""

    def __init__(
        self, linear: nn.Linear, block: Block, name: str, scheme: Scheme, storage: torch.dtype, switch: Switch
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.block, self.name, self.scheme, self.storage, self.switch = block, name, scheme, storage, switch
        self.live: Theta | None = None
        self.folded: FoldedLinear | None = None
        self._dequantized: Tensor | None = None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        if not self.switch.quantized:
            return F.linear(x, self.weight, self.bias)
        if self.scheme.quantizes_activations:
            x = fake_quantize_activations(x, self.scheme.activation_bits)
        return F.linear(x, *self._folded_weight()) if self.live is None else self._live_linear(x, self.live)

    def attach(self, theta: Theta) -> None:
        self.release()
        self.live = theta

    def release(self) -> None:
        self.live, self.folded, self._dequantized = None, None, None

    def freeze(self, theta: Theta) -> None:
        self.release()
        self.folded = self.fold(theta)

    @torch.no_grad()
    def fold(self, theta: Theta) -> FoldedLinear:
        bias, path = self._bias(theta), self.block.path(self.name)
        bias = None if bias is None else bias.to(self.storage)
        if path in theta.levels:
            settled = theta.levels[path], theta.step[path], theta.ratio[path]
            return FoldedLinear(*settled_codes(*settled, self.scheme, self.storage), bias)
        weight = self._smoothed(theta)
        if self.scheme.quantizes_weights:
            codes = weight_codes(weight, theta.ratio[path], theta.offset.get(path), self.scheme, self.storage)
            return FoldedLinear(*codes, bias)
        return FoldedLinear(weight.to(self.storage), weight.new_ones(1, 1), None, bias)

    def centred_offset(self, theta: Theta) -> Tensor:
        """From the smoothed weight to the code it was frozen to, in steps, [O, I]."""
        folded = self.folded
        assert folded is not None
        level, exact = folded.codes.float().view(*folded.step.shape, -1), self._smoothed(theta)
        if folded.zero is not None:
            level = level - folded.zero.float()[..., None]
        return level.view_as(exact) - (exact.view_as(level) / folded.step.float()[..., None]).view_as(exact)

    def _live_linear(self, x: Tensor, theta: Theta) -> Tensor:
        path, dtype, bias = self.block.path(self.name), self.weight.dtype, self._bias(theta)
        bias = None if bias is None else bias.to(dtype)
        if path in theta.levels:
            return settled_linear(x, theta.levels[path], theta.step[path], theta.ratio[path], bias, self.storage)
        weight = fake_quantize_weight(
            self.weight,
            log_scales_in(theta, self.block, self.name),
            log_scales_out(theta, self.block, self.name),
            theta.ratio[path],
            theta.offset.get(path),
            self.scheme,
            self.storage,
            dtype,
        )
        return F.linear(x, weight, bias)

    def _folded_weight(self) -> tuple[Tensor, Tensor | None]:
        folded = self.folded
        if folded is None:
            raise RuntimeError("the policy speaks as Q but no theta was attached or frozen")
        weight, dtype = self._dequantized, self.weight.dtype
        if weight is None:
            if folded.codes.is_floating_point():
                weight = folded.codes.to(dtype)
            else:
                weight = dequantize(folded.codes, folded.step, folded.zero, dtype)
            if self.switch.keep_dequantized:
                self._dequantized = weight
        return weight, None if folded.bias is None else folded.bias.to(dtype)

    def _smoothed(self, theta: Theta) -> Tensor:
        return smoothed(
            self.weight, log_scales_in(theta, self.block, self.name), log_scales_out(theta, self.block, self.name)
        )

    def _bias(self, theta: Theta) -> Tensor | None:
        if self.bias is None:
            return None
        log_out = log_scales_out(theta, self.block, self.name)
        return cast_through(self.bias.float() if log_out is None else self.bias.float() / log_out.exp(), self.storage)


class QuantNorm(nn.Module):
    """D: the norm as it came. Q: the same norm with its gain divided by s."""

    def __init__(self, norm: nn.Module, block: Block, name: str, storage: torch.dtype, switch: Switch) -> None:
        super().__init__()
        self.norm = norm
        _check_gain(norm, block.path(name))
        self.block, self.name, self.storage, self.switch = block, name, storage, switch
        self.eps = find_eps(norm)
        self.live: Theta | None = None
        self.folded: FoldedNorm | None = None

    @property
    def weight(self) -> Tensor:
        gain: Tensor = self.norm.weight  # type: ignore[assignment]
        return gain

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain()
        if self.eps is not None:
            return rms_norm(x, gain, self.eps)
        return functional_call(self.norm, {"weight": gain}, (x,))  # type: ignore[no-any-return]

    def gain(self) -> Tensor:
        """Of the side that speaks."""
        if not self.switch.quantized:
            return self.weight
        if self.live is not None:
            return self._gain(self.live).to(self.weight.dtype)
        if self.folded is None:
            raise RuntimeError("the policy speaks as Q but no theta was attached or frozen")
        return self.folded.weight.to(self.weight.dtype)

    def attach(self, theta: Theta) -> None:
        self.release()
        self.live = theta

    def release(self) -> None:
        self.live, self.folded = None, None

    def freeze(self, theta: Theta) -> None:
        self.release()
        self.folded = self.fold(theta)

    @torch.no_grad()
    def fold(self, theta: Theta) -> FoldedNorm:
        return FoldedNorm(self._gain(theta).to(self.storage))

    def _gain(self, theta: Theta) -> Tensor:
        log_out = log_scales_out(theta, self.block, self.name)
        assert log_out is not None
        return cast_through(self.weight.float() / log_out.exp(), self.storage)


@torch.no_grad()
def _check_gain(norm: nn.Module, path: str) -> None:
    """Folding divides the gain, so the norm must be linear in it; a norm that multiplies with 1 + weight is not."""
    weight: Tensor = norm.weight  # type: ignore[assignment]
    probe = torch.linspace(-1, 1, len(weight), dtype=weight.dtype, device=weight.device)
    doubled = functional_call(norm, {"weight": 2 * weight}, (probe,))
    if not torch.allclose(doubled, 2 * norm(probe), rtol=1e-2):
        raise OnPTQError(
            f"{path} ({type(norm).__name__}) does not multiply with its weight alone, so s cannot be folded into it"
        )
