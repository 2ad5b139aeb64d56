"""`token_codes` as an operator that is opaque to torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from onptq.kernels.codes import BITS, token_codes
from onptq.kernels.packets import empty_packet


@cache
def operator() -> Callable[[Tensor], Tensor]:
    schema = f"(Tensor x, int bits={BITS}) -> Tensor"
    operation = torch.library.custom_op("onptq::token_codes", token_codes, mutates_args=(), schema=schema)

    @operation.register_fake
    def shape(x: Tensor, bits: int = BITS) -> Tensor:
        return empty_packet(x.shape[0], x.shape[1], x)

    return operation
