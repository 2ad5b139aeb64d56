"""Divergences between next-token distributions, in fp32, over the whole vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def js_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """JS(p, q) in nats, [..., V] x [..., V] to [...]; symmetric, in [0, ln 2]."""
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    middle = torch.logaddexp(p, q) - math.log(2)
    total = (p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)
    return (total / 2).clamp(0, math.log(2))


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) in nats, [...]."""
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


DIVERGENCES = {"js": js_divergence, "kl": kl_divergence}
