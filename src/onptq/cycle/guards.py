"""Numbers of an update that are none: an error that names the step, the prompt and the module where they began."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from onptq.engine.finite import broken_block
from onptq.errors import OnPTQError
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy

ADVICE = "lower calibrate.lr_smoothing and calibrate.lr_step, or use float32"


def require_finite_loss(
    terms: Mapping[str, float], policy: Policy, prompts: Sequence[EncodedPrompt], step: int
) -> None:
    """Raise where the loss of a step on these prompts is not finite."""
    if not math.isfinite(terms["loss"]):
        broken = ", ".join(name for name, value in terms.items() if name != "loss" and not math.isfinite(value))
        raise OnPTQError(
            f"step {step}: the calibration loss is not finite ({broken or terms}; {_origin(policy, prompts)}): {ADVICE}"
        )


def without_finite_gradient(learned: Mapping[str, Tensor], step: int) -> OnPTQError:
    """The error of a step whose gradients, of parameters by name, are not all finite."""
    broken = [name for name, one in learned.items() if one.grad is not None and not bool(one.grad.isfinite().all())]
    where = f"{broken[0]} and {len(broken) - 1} more" if len(broken) > 1 else "".join(broken) or "their norm"
    return OnPTQError(f"step {step}: gradients of the update are not finite ({where}): {ADVICE}")


def _origin(policy: Policy, prompts: Sequence[EncodedPrompt]) -> str:
    """The first block of the quantized model that gives a prompt activations which are not finite, in words."""
    for prompt in prompts:
        with policy.speaking("Q"):
            block = broken_block(policy, prompt)
        if block is not None:
            return f"activations of layers.{block} at prompt {prompt.ordinal}"
    return f"all activations are, at prompts {', '.join(str(prompt.ordinal) for prompt in prompts)}"
