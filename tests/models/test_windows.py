"""Windows of a tower in one call: the naive attention of each."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from onptq.models.windows import attend_windows


def naive(query: Tensor, key: Tensor, value: Tensor, bounds: list[int], scaling: float) -> Tensor:
    windows = []
    for begin, end in pairwise(bounds):
        q, k, v = (tensor[0, :, begin:end].double() for tensor in (query, key, value))
        windows.append((q @ k.transpose(1, 2) * scaling).softmax(-1) @ v)
    return torch.cat(windows, 1).transpose(0, 1)[None]


@pytest.mark.parametrize("bounds", [[0, 4, 8, 12], [0, 7, 8, 12], [0, 12]])
def test_each_row_attends_to_its_window(bounds: list[int]) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 12, 6)
    longest = max(b - a for a, b in pairwise(bounds))
    attended, _ = attend_windows(nn.Identity(), query, key, value, None, 0.3, torch.tensor(bounds), longest)
    torch.testing.assert_close(attended.double(), naive(query, key, value, bounds, 0.3), atol=1e-6, rtol=1e-5)
