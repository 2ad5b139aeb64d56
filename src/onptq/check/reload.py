"""A checkpoint that transformers has reloaded, compared with the logits of the graph it was folded from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onptq.checkpoint.names import find_decoder
from onptq.errors import OnPTQError
from onptq.schemes import UNQUANTIZED, Scheme

# Largest difference of a logit, relative to the largest logit, that rounding in the compute dtype explains.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Verification:
    max_abs_difference: float  # of any logit at any state
    argmax_agreement: float  # share of states that choose the same token
    states: int


def compare_with_graph(
    model: Any,
    folder: Path,
    inputs: Sequence[Mapping[str, Tensor]],
    expected: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    tolerance: float | None = None,
) -> Verification:
    """The differences between the reloaded model's logits and the expected ones, [B, T, V] per input.

    Raise where they are too large or another token is chosen.
    """
    if not inputs or len(inputs) != len(expected):
        counts = f"{len(inputs)} and {len(expected)}"
        raise OnPTQError(f"verification needs at least one input and as many expected logits, got {counts}")
    relative = TOLERANCE[dtype] if tolerance is None else tolerance
    difference, agreed, states = 0.0, 0, 0
    for number, (one, want) in enumerate(zip(inputs, expected, strict=True)):
        got = logits_of(model, one)
        if got.shape != want.shape:
            raise OnPTQError(f"{folder}: input {number} gives logits {list(got.shape)}, expected {list(want.shape)}")
        real = _real_positions(one)
        try:
            worst, same = _compare(got[real], want.float().cpu()[real], relative, dtype)
        except OnPTQError as error:
            raise OnPTQError(f"{folder}: the reloaded checkpoint {error} (input {number})") from None
        difference, agreed, states = max(difference, worst), agreed + same, states + int(real.sum())
    return Verification(difference, agreed / states, states)


@torch.inference_mode()
def logits_of(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits [B, T, V] in fp32 on the host."""
    logits: Tensor = model(**place(inputs, model), use_cache=False).logits
    return logits.float().cpu()


def place(inputs: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The inputs on the model's device, in the dtype it computes in."""
    weight = model.get_input_embeddings().weight
    return {name: _place(value, weight.dtype, weight.device) for name, value in inputs.items()}


def check_modules(
    model: nn.Module, ignore: Sequence[str], linears: tuple[str, ...] = (), scheme: Scheme | None = None
) -> None:
    """Raise unless all linears of every decoder layer carry a quantization scheme, and no other module does.

    A mixed `scheme` leaves some of them dense."""
    decoder = find_decoder({name for name, _ in model.named_parameters()}, ignore, linears)
    dense = {name for name in decoder.linears if scheme is not None and scheme.of(name) == UNQUANTIZED}
    expected = {decoder.prefix + name for name in decoder.linears if name not in dense}
    quantized = quantized_modules(model)
    if quantized != expected:
        raise OnPTQError(
            f"{type(model).__name__} quantizes other modules than its decoder's {len(expected)} linears: "
            f"wrongly quantized {sorted(quantized - expected)[:5]}, left out {sorted(expected - quantized)[:5]}"
        )


def quantized_modules(model: nn.Module) -> set[str]:
    """The linears that carry a scheme; an attention carries that of its KV cache."""
    carry = (
        (name, one) for name, one in model.named_modules() if getattr(one, "quantization_scheme", None) is not None
    )
    return {name for name, module in carry if not hasattr(module, "k_scale")}


def _compare(got: Tensor, want: Tensor, relative: float, dtype: torch.dtype) -> tuple[float, int]:
    """Largest difference and number of agreeing choices over states [S, V]; raise where `got` is wrong."""
    if not bool(torch.isfinite(got).all()):
        raise OnPTQError("gives logits that are not finite")
    worst = (got - want).abs().max().item()
    allowed = relative * want.abs().max().item()
    if worst > allowed:
        raise OnPTQError(
            f"differs from the folded model by {worst:.4g} in a logit, expected at most {allowed:.4g} in {dtype}"
        )
    same = got.argmax(-1) == want.argmax(-1)
    flips = int((~(same | _tied(got, want, dtype))).sum())
    if flips:
        raise OnPTQError(f"chooses another token than the folded model at {flips} of {len(same)} states")
    return worst, int(same.sum())


def _place(value: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _real_positions(one: Mapping[str, Tensor]) -> Tensor:
    """The positions [B, T] that are no padding, whose logits mean nothing."""
    return one.get("attention_mask", torch.ones_like(one["input_ids"])).bool().cpu()


def _tied(got: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    """The states where both choices have the same logit up to one rounding of the compute dtype."""
    best = want.max(-1).values
    chosen = want.gather(-1, got.argmax(-1, keepdim=True)).squeeze(-1)
    return best - chosen <= torch.finfo(dtype).eps * best.abs()
