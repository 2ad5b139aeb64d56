"""What a method looks at while prompts pass through the decoder: the inputs of linears, and the residual stream block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from onptq.models.decoder import Tokens, run_blocks
from onptq.models.encoding import EncodedPrompt, PromptBatch
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


def prompt_tokens(prompt: PromptBatch, hidden: Tensor | None = None) -> Tokens:
    """One prompt for the decoder, or for a later block of it, which `hidden` [1, P, d] enters."""
    causal = torch.ones(prompt.width, prompt.width, dtype=torch.bool, device=prompt.embeds.device).tril()
    return Tokens(prompt.embeds if hidden is None else hidden, prompt.positions, causal[None, None], prompt.deepstack)


class Stream:
    """The residual stream of every prompt at the door of one block: memory holds one block's input, not every block's."""

    def __init__(self, policy: Policy, prompts: Sequence[EncodedPrompt]) -> None:
        self.structure = policy.structure
        self.prompts = [PromptBatch.of([prompt]) for prompt in prompts]
        self.hidden = [prompt.embeds for prompt in self.prompts]  # each [1, P, d]

    def run(self, block: Block, index: int) -> Tensor:
        """What the block, under whoever speaks, hands to the next one; DeepStack's features are in it."""
        tokens = prompt_tokens(self.prompts[index], self.hidden[index])
        return run_blocks(replace(self.structure, blocks=(block,)), tokens)

    def advance(self, block: Block) -> None:
        for index in range(len(self.hidden)):
            self.hidden[index] = self.run(block, index)


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
