"""Listening to what enters the linears while prompts pass through the decoder, and lending the policy to a method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from onptq.models.structure import LINEARS, NORMS, Block
from onptq.policy import Policy
from onptq.quantizer.modules import QuantLinear, QuantNorm
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


@contextmanager
def lent(policy: Policy) -> Iterator[None]:
    """Inside, Q may be given any theta; afterwards it has the one it had before, or none."""
    modules = [block.child(name) for block in policy.structure.blocks for name in (*NORMS, *LINEARS)]
    wrapped = [module for module in modules if isinstance(module, QuantLinear | QuantNorm)]
    before = [(module.live, module.folded) for module in wrapped]
    try:
        yield
    finally:
        for module, (live, folded) in zip(wrapped, before, strict=True):
            module.release()
            module.live, module.folded = live, folded  # type: ignore[assignment]
