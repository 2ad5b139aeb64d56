"""The modules that a policy puts into each block: one set of weights, dense for D and under theta for Q."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from onptq.errors import OnPTQError
from onptq.models.structure import Block, place
from onptq.quantizer.folded import FoldedFollower, FoldedLinear, FoldedNorm
from onptq.quantizer.integers import LowBitLinear
from onptq.quantizer.norms import divided_gain, find_eps, gain_offset, rms_norm
from onptq.quantizer.numerics import cast_through, fitting_scale, in_offsets, product_dtype, quantize_inputs
from onptq.quantizer.settled import settled_codes, settled_linear
from onptq.quantizer.theta import (
    Learned,
    LinearTheta,
    Settled,
    Theta,
    clone_linear,
    log_scales_in,
    log_scales_out,
    pair_key,
)
from onptq.quantizer.weights import dequantize, fake_quantize_weight, of_groups, smoothed, to_groups, weight_codes
from onptq.schemes import Scheme

Keep = Literal["codes", "floats", "integers"]  # form of a frozen Q's weights between forwards
Whole = TypeVar("Whole", FoldedNorm, FoldedFollower)
NO_THETA = "the policy computes as Q but no theta was attached or frozen"


@dataclass
class Switch:
    """The state that every module of one policy shares."""

    quantized: bool = False
    generation: int = 0  # counts the changes of Q in any module


@dataclass(frozen=True)
class Live:
    """Q is fake-quantized in every forward and differentiable in theta."""

    theta: Theta


@dataclass
class Frozen:
    """Q is integer codes. They become floats in every forward, or once with `keep_weight`: faster, with more memory."""

    folded: FoldedLinear
    keep_weight: bool
    weight: Tensor | None = None


@dataclass(frozen=True)
class Integer:
    """Q is integer codes that are multiplied as integers."""

    folded: FoldedLinear
    linear: LowBitLinear


class QuantLinear(nn.Module):
    """D: the linear as it was loaded. Q: its `state`, which is None before Q has a theta."""

    def __init__(
        self, linear: nn.Linear, block: Block, name: str, scheme: Scheme, storage: torch.dtype, switch: Switch
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.block, self.name, self.storage, self.switch = block, name, storage, switch
        self.state: Live | Frozen | Integer | None = None
        self.use(scheme)

    def use(self, scheme: Scheme) -> None:
        """Take another scheme; what Q is does not change until it is given a theta again."""
        self.scheme = scheme
        self.tensor_scale = _tied_scale(self.block, self.name) if scheme.scales == "E4M3" else None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def path(self) -> str:
        return self.block.path(self.name)

    def forward(self, x: Tensor) -> Tensor:
        if not self.switch.quantized:
            return F.linear(x, self.weight, self.bias)
        match self.state:
            case Live(theta):
                x = quantize_inputs(x, self.scheme, self._input_scale(theta))
                return self._live_linear(x, theta)
            case Frozen(folded=folded) as frozen:
                x = quantize_inputs(x, self.scheme, folded.input_scale)
                return F.linear(x, *self._frozen_weight(frozen))
            case Integer(linear=linear):
                return linear(x)  # type: ignore[no-any-return]
            case None:
                raise RuntimeError(NO_THETA)

    def unrounded(self, x: Tensor, theta: Theta) -> Tensor:
        """Q's output for `x` if it rounded neither `x` nor the weight."""
        dtype, bias = self.weight.dtype, self._bias(theta)
        return F.linear(x, self._smoothed(theta).to(dtype), None if bias is None else bias.to(dtype))

    def become(self, state: Live | Frozen | Integer | None) -> None:
        self.switch.generation += 1
        self.state = state

    def attach(self, theta: Theta) -> None:
        self.become(Live(theta))

    def freeze(self, theta: Theta, keep: Keep = "codes") -> None:
        self.become(None)  # the memory of the last Q is free before the next one is folded
        folded = self.fold(theta)
        if keep == "integers":
            dtype, bias = self.weight.dtype, folded.bias
            bias = None if bias is None else bias.to(dtype)
            low_bit = LowBitLinear(folded.codes, folded.scale[:, 0].to(dtype), bias, self.scheme.activation_bits)
            self.become(Integer(folded, low_bit))
        else:
            self.become(Frozen(folded, keep_weight=keep == "floats"))

    def drop_floats(self) -> None:
        """Free the floats of a frozen Q's weight; the next forward makes them again."""
        if isinstance(self.state, Frozen):
            self.state.weight = None

    def folded(self) -> FoldedLinear:
        """The linear that Q deploys. That of an attached theta is folded anew in every call."""
        match self.state:
            case Live(theta):
                return self.fold(theta)
            case Frozen(folded=folded) | Integer(folded=folded):
                return folded
            case None:
                raise RuntimeError(NO_THETA)

    @torch.no_grad()
    def fold(self, theta: Theta) -> FoldedLinear:
        bias, linear = self._bias(theta), theta.linears[self.path]
        bias = None if bias is None else bias.to(self.storage, copy=True)  # the folded one may outlive the module's
        grid = self.scheme, self.storage, self.tensor_scale
        tensor_scales = self.tensor_scale, self._input_scale(theta)
        if isinstance(linear, Settled):
            levels = linear.levels.to(linear.scale.device)
            codes = settled_codes(levels, linear.scale, linear.ratio, *grid)
            return FoldedLinear(*codes, bias, *tensor_scales)
        weight = self._smoothed(theta)
        if self.scheme.quantizes_weights:
            offset = linear.offset if isinstance(linear, Learned) else None
            codes = weight_codes(weight, linear.ratio, offset, *grid)
            return FoldedLinear(*codes, bias, *tensor_scales)
        return FoldedLinear(weight.to(self.storage), weight.new_ones(1, 1), None, bias)

    @torch.no_grad()
    def settle(self, theta: Theta) -> LinearTheta:
        """The codes of theta, settled: from there on only their scales follow it. A dense linear has none."""
        if not self.scheme.quantizes_weights:
            return clone_linear(theta.linears[self.path])
        folded = self.fold(theta)
        levels = folded.codes
        if folded.zero is not None:
            levels = (levels.view(*folded.scale.shape, -1).short() - folded.zero[..., None]).view_as(levels)
        ratio = torch.zeros_like(theta.linears[self.path].ratio)
        return Settled(ratio, levels, folded.scale.float())

    @torch.no_grad()
    def centre(self, theta: Theta) -> LinearTheta:
        """The codes of theta as offsets [O, I] that put each weight in the middle of its code; a dense linear has none."""
        if not self.scheme.quantizes_weights:
            return clone_linear(theta.linears[self.path])
        folded, exact = self.fold(theta), self._smoothed(theta)
        rows, grid = self.scheme.block_rows, self.scheme.weight_grid
        level = to_groups(folded.codes.float(), folded.scale, rows)
        if folded.zero is not None:
            level = level - folded.zero.float()[..., None]
        scaled = to_groups(exact, folded.scale, rows) / folded.scale.float()[..., None]
        offset = of_groups(in_offsets(level - scaled, scaled, grid), exact.shape, rows)
        return Learned(theta.linears[self.path].ratio.detach().clone(), offset)

    def _input_scale(self, theta: Theta) -> Tensor | None:
        return theta.inputs.get(pair_key(self.block, self.block.pair_into(self.name)))

    def _live_linear(self, x: Tensor, theta: Theta) -> Tensor:
        dtype, bias, linear = self.weight.dtype, self._bias(theta), theta.linears[self.path]
        bias = None if bias is None else bias.to(dtype)
        if isinstance(linear, Settled):
            grid = self.storage, self.scheme, self.tensor_scale
            return settled_linear(x, linear.levels.to(x.device), linear.scale, linear.ratio, bias, *grid)
        weight = fake_quantize_weight(
            self.weight,
            log_scales_in(theta, self.block, self.name),
            log_scales_out(theta, self.block, self.name),
            linear.ratio,
            linear.offset if isinstance(linear, Learned) else None,
            self.scheme,
            self.storage,
            dtype,
            self.tensor_scale,
        )
        return F.linear(x, weight, bias)

    def _frozen_weight(self, frozen: Frozen) -> tuple[Tensor, Tensor | None]:
        folded, weight, dtype = frozen.folded, frozen.weight, self.weight.dtype
        if weight is None:
            if self.scheme.quantizes_weights:
                product = product_dtype(self.scheme, dtype)
                weight = dequantize(folded.codes, folded.scale, folded.zero, product, self.scheme.block_rows).to(dtype)
            else:
                weight = folded.codes.to(dtype)
            if frozen.keep_weight:
                frozen.weight = weight
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


@torch.no_grad()
def _tied_scale(block: Block, name: str) -> Tensor:
    """The tensor scale that fits all linears with the same input: servers multiply them as one. Experts have their own."""
    owner = place(name).rpartition(".")[0]
    readers = block.consumers(block.pair_into(name))
    together = [one for one in readers if place(one).rpartition(".")[0] == owner]
    weights: list[Tensor] = [block.child(one).weight for one in together]  # type: ignore[misc]
    return fitting_scale(torch.stack([weight.abs().amax() for weight in weights]).amax())


class Reweighted(nn.Module, Generic[Whole]):
    """A module whose weight alone differs between D and Q: loaded for D, live or folded for Q."""

    whole: type[Whole]  # its folded form

    def __init__(self, module: nn.Module, block: Block, name: str, storage: torch.dtype, switch: Switch) -> None:
        super().__init__()
        self.inner = module
        self.block, self.name, self.storage, self.switch = block, name, storage, switch
        self.state: Live | Whole | None = None

    def of(self, theta: Theta) -> Tensor:
        """Q's weight under theta, in the storage dtype's values."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.inner.weight  # type: ignore[assignment]
        return weight

    @property
    def path(self) -> str:
        return self.block.path(self.name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.inner, {"weight": self.present()}, args, kwargs)

    def present(self) -> Tensor:
        """The weight of the side that the policy computes as."""
        if not self.switch.quantized:
            return self.weight
        match self.state:
            case Live(theta):
                return self.of(theta).to(self.weight.dtype)
            case None:
                raise RuntimeError(NO_THETA)
            case folded:
                return folded.weight.to(self.weight.dtype)

    def become(self, state: Live | Whole | None) -> None:
        self.switch.generation += 1
        self.state = state

    def attach(self, theta: Theta) -> None:
        self.become(Live(theta))

    def freeze(self, theta: Theta, keep: Keep = "codes") -> None:
        self.become(self.fold(theta))

    def folded(self) -> Whole:
        match self.state:
            case Live(theta):
                return self.fold(theta)
            case None:
                raise RuntimeError(NO_THETA)
            case folded:
                return folded

    @torch.no_grad()
    def fold(self, theta: Theta) -> Whole:
        return self.whole(self.of(theta).to(self.storage, copy=True))


class QuantNorm(Reweighted[FoldedNorm]):
    """D: the norm as it was loaded. Q: the same norm with its gain divided by s, live or folded."""

    whole = FoldedNorm

    def __init__(self, norm: nn.Module, block: Block, name: str, storage: torch.dtype, switch: Switch) -> None:
        super().__init__(norm, block, name, storage, switch)
        self.eps, offset = find_eps(norm), gain_offset(norm)
        if offset is None:
            raise OnPTQError(f"{self.path} ({type(norm).__name__}) multiplies with neither its weight nor 1 + weight")
        self.offset = offset

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.eps is not None:
            return rms_norm(args[0], self.present(), self.eps)
        return super().forward(*args, **kwargs)

    def of(self, theta: Theta) -> Tensor:
        log_out = log_scales_out(theta, self.block, self.name)
        assert log_out is not None
        return cast_through(divided_gain(self.weight, log_out, self.offset), self.storage)


class QuantFollower(Reweighted[FoldedFollower]):
    """D: a matrix as it was loaded, of a linear or of a router. Q: the same with its columns times s, never rounded."""

    whole = FoldedFollower

    def of(self, theta: Theta) -> Tensor:
        return cast_through(smoothed(self.weight, log_scales_in(theta, self.block, self.name), None), self.storage)
