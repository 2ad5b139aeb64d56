"""RMS norms beside a float64 oracle and beside the modules of every family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import FAMILIES, Tiny
from torch import Tensor, nn

from onptq.models.structure import NORMS
from onptq.quantizer.modules import QuantNorm
from onptq.quantizer.norms import find_eps, rms_norm


def oracle(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Row by row, channel by channel."""
    rows = []
    for row in x.view(-1, x.shape[-1]):
        mean = sum(one * one for one in row) / len(row)
        rows.append(torch.stack([g * one / (mean + eps).sqrt() for g, one in zip(gain, row, strict=True)]))
    return torch.stack(rows).view_as(x)


def test_what_leaves_and_its_gradients_are_the_oracles() -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad, gain = (torch.randn(shape, generator=generator) for shape in ((2, 3, 12), (2, 3, 12), (12,)))
    found = []
    for function, dtype in ((rms_norm, torch.float32), (oracle, torch.float64)):
        entering, multiplied = (one.to(dtype, copy=True).requires_grad_() for one in (x, gain))
        out = function(entering, multiplied, 1e-2)
        out.backward(grad.to(dtype))
        found.append((out.detach(), entering.grad, multiplied.grad))
    for ours, exact in zip(*found, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_norms_of_every_family_are_seen_and_give_the_same_bits(
    tiny: Callable[[str], Tiny], family: str, dtype: torch.dtype
) -> None:
    policy = tiny(family).policy(dtype=dtype)
    for block in policy.structure.blocks:
        for name in NORMS:
            norm = block.child(name)
            assert isinstance(norm, QuantNorm)
            assert norm.eps == policy.structure.decoder.config.rms_norm_eps  # type: ignore[union-attr]
            x = torch.randn(2, 5, len(norm.weight), generator=torch.Generator().manual_seed(1)).to(dtype)
            assert torch.equal(norm(x), norm.inner(x))


class Centred(nn.Module):
    """Linear in its gain, and another norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 2, 16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps)


def test_another_norm_is_not_taken_for_one() -> None:
    assert find_eps(nn.RMSNorm(16, eps=1e-3)) == 1e-3
    assert find_eps(nn.RMSNorm(16)) is None  # it has no epsilon of its own
    other = nn.RMSNorm(16, eps=1e-3)
    other.eps, other.variance_epsilon = 1e-3, 1e-5  # type: ignore[assignment]
    assert find_eps(other) is None
    assert find_eps(Centred()) is None
