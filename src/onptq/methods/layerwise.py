"""One block at a time: streams of sequences through the decoder, and linears that answer in another's place meanwhile.

Quantized linears are simulated in the dense model's coordinates, Q(x / s) Q(W diag(s))^T: what folding makes of them, with
nothing to fold back between two candidates. Nothing stays on the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onptq.bank import Trajectory
from onptq.engine.prefixes import Prefixes, prompt_mask
from onptq.engine.rollout import greedy_rollouts
from onptq.errors import OnPTQError
from onptq.methods.activations import listening
from onptq.methods.linears import rounded_weight
from onptq.models.attention import trusted_attention
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.family import TEXT
from onptq.models.structure import Block
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import PAIRS, Theta, log_scales_in

RESPONSE_TOKENS = 64
BATCH_TOKENS = 8192
INSTRUCTION = -1  # text of the prompt: neither response nor picture nor sound
IN_ORDER = ("norm_qkv", "v_o", "norm_gate_up", "up_down")  # as a block runs them

Answer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Answered:
    """A prompt with its response behind it."""

    sequence: EncodedPrompt
    response: int  # how many of the last tokens are the response

    @property
    def kinds(self) -> Tensor:
        """[S] TEXT for tokens of the response, IMAGE, AUDIO, and INSTRUCTION for the prompt's text."""
        kinds = self.sequence.modality.long().clone()
        kinds[: self.sequence.length - self.response][kinds[: self.sequence.length - self.response] == TEXT] = (
            INSTRUCTION
        )
        return kinds


def answer_prompts(
    policy: Policy, prompts: Sequence[EncodedPrompt], responses: Sequence[Trajectory] | None = None
) -> list[Answered]:
    """The prompts with the given responses, or with the dense model's own greedy ones."""
    if responses is None:
        responses = greedy_rollouts(Prefixes(policy, prompts, max_tokens=RESPONSE_TOKENS), side="D")
    by_prompt = {response.prompt: response.tokens for response in responses}
    answered = []
    for prompt in prompts:
        tokens = by_prompt.get(prompt.ordinal)
        if not tokens:
            raise OnPTQError(f"prompt {prompt.ordinal} has no response; expected one or more tokens for every prompt")
        ids = torch.tensor(tokens, dtype=torch.long, device=policy.device)
        answered.append(Answered(prompt.extended(ids, policy.embed(ids)), len(tokens)))
    return answered


class Stream:
    """Some sequences on their way through the decoder: `hidden` is what enters the next block."""

    def __init__(self, policy: Policy, sequences: Sequence[EncodedPrompt]) -> None:
        batch = PromptBatch.of(sequences)
        positions = batch.positions if batch.positions.shape[0] > 1 else batch.positions[0]
        self.sequences, self.real, self.deepstack = batch.prompts, batch.real, batch.deepstack
        self.mask = prompt_mask(batch.real)
        self.rotary = policy.structure.decoder.rotary_emb(batch.embeds, positions)  # type: ignore[operator]
        self.hidden = batch.embeds

    def run(self, block: Block) -> Tensor:
        """What enters the next block, [B, S, d], DeepStack's features included; the stream stays where it is."""
        with trusted_attention():
            out: Tensor = block.module(
                self.hidden, attention_mask=self.mask, position_embeddings=self.rotary, past_key_values=None
            )
        return out + self.deepstack[block.index] if block.index < len(self.deepstack) else out

    def entering(self, block: Block) -> dict[str, Tensor]:
        """What enters each pair's consumers, [B, S, I], in one run of the block."""
        seen: dict[str, Tensor] = {}
        with listening([block], lambda block, pair, x: seen.update({pair: x})):
            self.run(block)
        return seen

    def advance(self, block: Block) -> None:
        self.hidden = self.run(block)

    def unit(self, block: Block, pair: str, x: Tensor) -> Tensor:
        """What a pair's error is measured on: the attention for q/k/v, the MLP for gate/up, the linear itself for o and down."""
        if pair == "norm_qkv":
            attention = block.owner("q_proj")
            with trusted_attention():
                out: Tensor = attention(
                    hidden_states=x, attention_mask=self.mask, position_embeddings=self.rotary, past_key_values=None
                )[0]
            return out
        module = block.owner("gate_proj") if pair == "norm_gate_up" else block.child(PAIRS[pair][1][0])
        return module(x)  # type: ignore[no-any-return]

    def pad(self, values: Mapping[int, Tensor], fill: float = 0.0) -> Tensor:
        """[B, S] of one value per token, by the sequences' ordinals."""
        rows = [values[sequence.ordinal] for sequence in self.sequences]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def open_streams(policy: Policy, sequences: Sequence[EncodedPrompt]) -> list[Stream]:
    batches = Prefixes(policy, sequences, max_tokens=0, batch_tokens=BATCH_TOKENS).batches
    return [Stream(policy, batch.prompts) for batch in batches]


class _Standin(nn.Module):
    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(x)


@contextmanager
def replaced(block: Block, answers: Mapping[str, Answer]) -> Iterator[None]:
    """Within it, other functions stand in for the named linears of the block."""
    before = {name: block.child(name) for name in answers}
    try:
        for name, answer in answers.items():
            block.replace(name, _Standin(answer))
        yield
    finally:
        for name, module in before.items():
            block.replace(name, module)


def quantized_linear(
    policy: Policy, theta: Theta, block: Block, name: str, log_in: Tensor | None = None, *, activations: bool = True
) -> Answer:
    """The linear as theta deploys it, or with other scales [I]; without `activations` only its weight is quantized."""
    log_in = log_scales_in(theta, block, name) if log_in is None else log_in
    weight = rounded_weight(policy, theta, block, name, log_in)
    bias: Tensor | None = block.child(name).bias  # type: ignore[assignment]
    quantizes = activations and policy.scheme.quantizes_activations

    def answer(x: Tensor) -> Tensor:
        x = (x / log_in.exp()).to(x.dtype)
        return F.linear(fake_quantize_activations(x, policy.scheme.activation_bits) if quantizes else x, weight, bias)

    return answer


def quantized_linears(
    policy: Policy, theta: Theta, block: Block, pairs: Iterable[str], *, activations: bool = True
) -> dict[str, Answer]:
    """The consumers of some pairs, as theta deploys them."""
    names = [name for pair in pairs for name in PAIRS[pair][1]]
    return {name: quantized_linear(policy, theta, block, name, activations=activations) for name in names}
