"""Listening to what enters the linears while prompts pass through the decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from onptq.models.structure import Block
from onptq.quantizer.theta import PAIRS


@contextmanager
def listening(
    blocks: Sequence[Block], hear: Callable[[Block, str, Tensor], None], pairs: Sequence[str] = tuple(PAIRS)
) -> Iterator[None]:
    """Inside, `hear(block, pair, x)` is told what enters the pair's consumers, x [B, S, I], before it is quantized."""

    def listener(block: Block, pair: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, args: hear(block, pair, args[0])

    hooks = [
        block.child(PAIRS[pair][1][0]).register_forward_pre_hook(listener(block, pair))
        for block in blocks
        for pair in pairs
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
