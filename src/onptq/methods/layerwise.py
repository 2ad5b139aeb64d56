"""Answered prompts, and their hidden states on the way through the decoder, one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onptq.bank import Trajectory
from onptq.engine.prefixes import Prefixes, whole_prompts
from onptq.engine.rollout import rollouts
from onptq.errors import OnPTQError
from onptq.methods.guards import require_finite_hidden
from onptq.models.attention import trusted_attention
from onptq.models.decoder import layer_masks
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.experts import observing_routes, routed
from onptq.models.family import TEXT
from onptq.models.structure import EXPERTS, Block, Lent
from onptq.quantizer.policy import Policy

RESPONSE_TOKENS = 64
BATCH_TOKENS = 8192
INSTRUCTION = -1  # text of the prompt: neither response nor image nor audio


@dataclass(frozen=True)
class Answered:
    """A prompt followed by its response."""

    sequence: EncodedPrompt
    response: int  # how many of the last tokens are the response

    @property
    def kinds(self) -> Tensor:
        """[S] TEXT for tokens of the response, IMAGE, AUDIO, and INSTRUCTION for the prompt's text."""
        kinds = self.sequence.modality.long().clone()
        prompt = kinds[: self.sequence.length - self.response]
        prompt[prompt == TEXT] = INSTRUCTION
        return kinds


def answer_prompts(
    policy: Policy, prompts: Sequence[EncodedPrompt], responses: Sequence[Trajectory] | None = None
) -> list[Answered]:
    """The prompts with the given responses, or with the dense model's own greedy ones."""
    if responses is None:
        responses = rollouts(Prefixes(policy, prompts, max_tokens=RESPONSE_TOKENS, budget=0), side="D")
    by_prompt = {response.prompt: response.tokens for response in responses}
    answered = []
    for prompt in prompts:
        tokens = by_prompt.get(prompt.ordinal)
        if not tokens:
            raise OnPTQError(f"prompt {prompt.ordinal} has no response; expected one or more tokens for every prompt")
        ids = torch.tensor(tokens, dtype=torch.long, device=policy.device)
        answered.append(Answered(prompt.extended(ids, policy.embed(ids)), len(tokens)))
    return answered


def answered_sequences(
    policy: Policy, prompts: Sequence[EncodedPrompt], responses: Sequence[Trajectory] | None = None
) -> list[EncodedPrompt]:
    """The sequences of `answer_prompts`."""
    return [one.sequence for one in answer_prompts(policy, prompts, responses)]


@contextmanager
def observing(
    blocks: Sequence[Block], observe: Callable[[Block, str, Tensor], None], pairs: Sequence[str] | None = None
) -> Iterator[None]:
    """A context in which `observe(block, pair, x)` gets the inputs x [B, S, I] of the pair's consumers, not yet quantized.

    Of all pairs without `pairs`."""

    def hook(block: Block, pair: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, args: observe(block, pair, args[0])

    hooks = [
        block.reading(pair).register_forward_pre_hook(hook(block, pair))
        for block in blocks
        for pair in block.pairs
        if pairs is None or pair in pairs
    ]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


class Stream:
    """A batch of sequences on its way through the decoder: `hidden` is the input of the next block."""

    def __init__(self, policy: Policy, sequences: Sequence[EncodedPrompt]) -> None:
        batch = PromptBatch.of(sequences)
        tokens = whole_prompts(batch)
        self.sequences, self.real, self.deepstack = batch.prompts, batch.real, batch.deepstack
        self._structure, self._positions = policy.structure, batch.positions
        self._masks = layer_masks(policy.structure, tokens)
        self._rotary = policy.structure.rotary(batch.embeds, batch.positions)
        self.hidden, self._own = policy.structure.parted(batch.embeds)
        self._lent: Lent = {}
        self.routes: dict[int, Tensor] = {}  # of blocks with experts, the ones [B, S, k] that the router is to take

    def run(self, block: Block) -> Tensor:
        """The input of the next block [B, S, d], DeepStack's features included. `hidden` does not change."""
        with trusted_attention(), routed(block.module, self.routes.get(block.index)):
            out: Tensor = block.module(self.hidden, **self._around(block), **self._own[block.index])
        return out + self.deepstack[block.index] if block.index < len(self.deepstack) else out

    def _run_finite(self, block: Block) -> Tensor:
        return require_finite_hidden(self.run(block), self.real, self.sequences, block.index)

    def _around(self, block: Block) -> dict[str, Any]:
        mask = self._masks[block.layer_type]
        return self._structure.arguments(block, self._positions, mask, self._rotary, None, self._lent)  # type: ignore[no-any-return]

    def inputs(self, block: Block) -> dict[str, Tensor]:
        """The inputs of each pair's consumers, [B, S, I], from one run of the block; an expert's as one batch [1, n, I]."""
        inputs: dict[str, Tensor] = {}

        def observe(_: Block, pair: str, x: Tensor) -> None:
            inputs[pair] = x if pair.startswith(EXPERTS) else x.view(*self.real.shape, -1)

        with observing([block], observe):
            self._run_finite(block)
        return inputs

    def tokens(self, x: Tensor) -> Tensor:
        """The real tokens [n, I] of inputs [B, S, I], or of an expert's, which are no others."""
        return x[self.real] if x.shape[:2] == self.real.shape else x[0]

    def advance(self, block: Block) -> None:
        """Run the block and go on to the next one."""
        self.hidden = self._run_finite(block)

    def led(self, dense: Stream, block: Block) -> None:
        """Run the block of the dense stream and go on there; the router of this stream is to decide as that one does."""
        routes: dict[int, Tensor] = {}
        with observing_routes([block.module], routes.__setitem__):
            dense.advance(block)
        self.routes = {block.index: routes[0].view(*dense.hidden.shape[:2], -1)} if routes else {}

    def unit(self, block: Block, pair: str, x: Tensor) -> Tensor:
        """The output that a pair's error is measured on: of the attention for q/k/v, of the MLP for gate/up, of the linear
        itself for o and down."""
        if pair == "norm_qkv":
            attention = block.owner(block.consumers("v_o")[0])
            with trusted_attention():
                out = attention(hidden_states=x, **({} if block.recurrent else self._around(block)))
            return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]
        module = block.module.get_submodule("mlp") if pair == "norm_gate_up" else block.child(block.consumers(pair)[0])
        return module(x)  # type: ignore[no-any-return]

    def pad(self, values: Mapping[int, Tensor], fill: float = 0.0) -> Tensor:
        """[B, S] of one value per token, given by the sequences' ordinals."""
        rows = [values[sequence.ordinal] for sequence in self.sequences]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def open_streams(policy: Policy, sequences: Sequence[EncodedPrompt]) -> list[Stream]:
    """Streams of batches that fit BATCH_TOKENS."""
    batches = Prefixes(policy, sequences, max_tokens=0, batch_tokens=BATCH_TOKENS).batches
    return [Stream(policy, batch.prompts) for batch in batches]
