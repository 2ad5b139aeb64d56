"""The kernels of serving against plain PyTorch and float64; `test_serving_kernels.py` runs these."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from kernel_support import DEVICE, DTYPES, SIZES, check_codes, normal
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from onptq.kernels.packets import unpacked
from onptq.quantizer.norms import plain_norm
from onptq_vllm.kernels import gated, normed, tokens
from onptq_vllm.kernels.gated import gated_codes
from onptq_vllm.kernels.normed import normed_codes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_codes_of_gated_pairs_agree_with_float64(rows: int, width: int, dtype: torch.dtype) -> None:
    pairs = normal(rows, 2 * width, seed=width)
    pairs[-1] *= 0 if rows > 2 else 20
    pairs = pairs.to(dtype)
    gate, up = pairs.double().chunk(2, -1)
    # In float32 on a GPU the fast exponential counts as well.
    roundings = 4 if dtype == torch.float32 and pairs.is_cuda else 2
    check_codes(gated_codes(pairs), gate * torch.sigmoid(gate) * up, roundings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_codes_of_normed_streams_agree_with_float64(rows: int, width: int, dtype: torch.dtype) -> None:
    x, stream = (normal(rows, width, seed=width + one) for one in (0, 1))
    x[0], stream[0] = 5 * x[0], 0
    if rows > 2:
        x[-1] = stream[-1] = 0
    x, stream, gain = x.to(dtype), stream.to(dtype), (1 + normal(width, seed=2) / 4).to(dtype)
    packet, total = normed_codes(x, stream.T.contiguous().T, gain, 1e-5)  # in any memory layout
    assert torch.equal(total, x + stream)
    assert total.is_contiguous()
    exact = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()
    check_codes(packet, exact, 3, plain_norm(total, gain, 1e-5))


@pytest.mark.parametrize("kernel", [tokens, gated, normed])
def test_operators_have_the_shapes_of_their_fakes(kernel: ModuleType) -> None:
    operator = kernel.operator
    x = normal(3, 64).half()
    inputs = (x, x, x[0], 1e-6) if kernel is normed else (x,)
    with FakeTensorMode() as mode:
        fake = operator()(*(mode.from_tensor(one) if isinstance(one, Tensor) else one for one in inputs))
    real = operator()(*inputs)
    for one, other in zip(*((pair if isinstance(pair, tuple) else (pair,)) for pair in (fake, real)), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert operator() is operator()


def test_a_token_with_a_nan_or_infinity_has_a_scale_that_is_not_finite() -> None:
    x = torch.cat((normal(4, 50), torch.zeros(4, 14, device=DEVICE)), dim=1)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    gated_packet = gated_codes(torch.cat((x, x), dim=1))
    normed_packet, _ = normed_codes(x, torch.zeros_like(x), torch.ones(64, device=DEVICE), 1e-6)
    for packet in (gated_packet, normed_packet):
        assert unpacked(packet, 64)[1][:, 0].isfinite().tolist() == [True, False, False, True]
