"""Numbers of a base method that are none: an error that names the module, the prompts and the step where they began."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from onptq.engine.finite import broken_block
from onptq.errors import OnPTQError
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta

ADVICE = "use --set compute.dtype=float32, or leave these prompts out"


def run_finite(policy: Policy, sequence: EncodedPrompt) -> None:
    """Run a sequence through the side that speaks; raise where a block's output is not finite."""
    if (block := broken_block(policy, sequence)) is not None:
        raise not_finite(f"activations of layers.{block}", [sequence])


def require_finite_hidden(hidden: Tensor, real: Tensor, sequences: Iterable[EncodedPrompt], block: int) -> Tensor:
    """The output [B, S, d] of a block, which is finite at every token that is `real`."""
    finite = hidden.isfinite().all(-1) | ~real
    if not bool(finite.all()):
        broken = [one for one, row in zip(sequences, finite.all(-1).tolist(), strict=True) if not row]
        raise not_finite(f"activations of layers.{block}", broken)
    return hidden


def require_finite_error(error: Tensor | float, what: str, step: int | None = None) -> None:
    """Raise where the error by which something is chosen or learned is not finite, for any of its entries."""
    finite = math.isfinite(error) if isinstance(error, float) else bool(error.isfinite().all())
    if not finite:
        when = "" if step is None else f" after step {step}"
        raise OnPTQError(f"the error of {what} is not finite{when}: {ADVICE}")


def require_finite_theta(theta: Theta) -> None:
    """Raise where an entry of theta is not finite."""
    for name, tensor in theta.tensors().items():
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise OnPTQError(f"the init is not finite: {name.replace('/', ' of ', 1)}: {ADVICE}")


def not_finite(what: str, sequences: Iterable[EncodedPrompt]) -> OnPTQError:
    ordinals = ", ".join(str(one.ordinal) for one in sequences)
    return OnPTQError(f"{what} are not finite at prompt {ordinals}: {ADVICE}")
