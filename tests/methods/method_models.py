"""A model small enough to compute by hand, short responses, and what every method has to leave unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import Tiny
from torch import Tensor

from onptq.bank import Trajectory
from onptq.checkpoint.source import find_source
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.processing import PromptProcessor
from onptq.models.structure import Block
from onptq.quantizer.folded import Folded
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.schemes import Scheme

PROMPTS = 3


def open_small(folder: Path) -> Tiny:
    source = find_source(folder)
    return Tiny(folder, source, PromptProcessor.from_folder(folder, source.family, source.config))


def exact_policy(checkpoint: Tiny, scheme: str) -> Policy:
    """float64 all over, stored scales and gains too."""
    model = checkpoint.model(torch.float64)
    return Policy(model, Scheme.parse(scheme), storage=torch.float64, eos=checkpoint.source.eos())


def short_responses(prompts: Sequence[EncodedPrompt]) -> list[Trajectory]:
    return [
        Trajectory(prompt.ordinal, tuple(range(20 + place, 25 + 2 * place)), True)
        for place, prompt in enumerate(prompts)
    ]


def sequences_of(policy: Policy, prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
    """The prompts with those responses behind them."""
    extended = []
    for prompt, response in zip(prompts, short_responses(prompts), strict=True):
        ids = torch.tensor(response.tokens)
        extended.append(prompt.extended(ids, policy.embed(ids)))
    return extended


def tokens_of(sequence: EncodedPrompt) -> Tokens:
    batch = PromptBatch.of([sequence])
    causal = torch.ones(sequence.length, sequence.length, dtype=torch.bool).tril()
    return Tokens(batch.embeds, batch.positions, causal[None, None], batch.deepstack)


@contextmanager
def recording(block: Block, name: str, inputs: list[Tensor]) -> Iterator[None]:
    hook = block.child(name).register_forward_pre_hook(lambda module, args: inputs.append(args[0][0]))
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def inputs_of(policy: Policy, side: str, sequences: Sequence[EncodedPrompt], block: Block, name: str) -> np.ndarray:
    """Every token that enters a linear, one sequence at a time, [tokens, I]."""
    inputs: list[Tensor] = []
    with recording(block, name, inputs), policy.speaking(side):  # type: ignore[arg-type]
        for sequence in sequences:
            policy.run(tokens_of(sequence))
    return torch.cat(inputs).double().numpy()


@torch.no_grad()
def block_outputs(policy: Policy, side: str, sequences: Sequence[EncodedPrompt]) -> list[list[Tensor]]:
    """Outputs of every block, before DeepStack: [block][sequence]."""
    left: list[list[Tensor]] = [[] for _ in policy.structure.blocks]
    with policy.speaking(side):  # type: ignore[arg-type]
        for sequence in sequences:
            policy.run(tokens_of(sequence), observe=lambda index, hidden: left[index].append(hidden[0]))
    return left


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def unchanged(policy: Policy, prompt: EncodedPrompt) -> Iterator[None]:
    """A context after which the policy must be the one it was before.

    The same modules with the same hooks, weights with the same bits and the same `requires_grad`, the same Q: its state in every
    module, the tensors of that state, and what it computes for the prompt.
    """

    def hooks() -> list[list[dict[int, Any]]]:
        return [[dict(getattr(module, name)) for name in HOOKS] for module in policy.model.modules()]

    def outputs() -> list[Tensor]:
        return [block[0] for side in "DQ" for block in block_outputs(policy, side, [prompt])]

    modules, parameters = list(policy.model.modules()), dict(policy.model.named_parameters())
    bits = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    requires_grad = {name: parameter.requires_grad for name, parameter in parameters.items()}
    states = [module.state for module in policy.wrapped]
    folded = {path: folded_tensors(piece) for path, piece in policy.folded()}
    folded_bits = {path: [tensor.clone() for tensor in tensors] for path, tensors in folded.items()}
    hooked, computed, quantized = hooks(), outputs(), policy.switch.quantized
    yield
    assert all(a is b for a, b in zip(policy.model.modules(), modules, strict=True))
    assert hooks() == hooked
    for name, parameter in policy.model.named_parameters():
        assert parameter is parameters[name], name
        assert (parameter.requires_grad, parameter.grad) == (requires_grad[name], None), name
    assert all(torch.equal(tensor, bits[name]) for name, tensor in policy.model.state_dict().items())
    assert all(module.state is state for module, state in zip(policy.wrapped, states, strict=True))
    for path, piece in policy.folded():
        pairs = zip(folded_tensors(piece), folded_bits[path], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), path
    assert policy.switch.quantized == quantized
    assert all(torch.equal(a, b) for a, b in zip(outputs(), computed, strict=True))


def folded_tensors(piece: Folded) -> list[Tensor]:
    values = (getattr(piece, field.name) for field in fields(piece))
    return [value for value in values if value is not None]


def same_theta(one: Theta, other: Theta) -> bool:
    """Whether two thetas have the same tensors, bit by bit."""
    mine, theirs = one.tensors(), other.tensors()
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def check_contract(
    checkpoint: Tiny, scheme: str, method: Callable[[Policy, list[EncodedPrompt], Callable[[int], None]], Theta]
) -> tuple[Policy, Theta]:
    """The method reports every block, gives the same theta twice, and leaves the policy unchanged, its frozen Q included."""
    policy = checkpoint.policy(scheme)
    prompts = checkpoint.encode(policy, 2)
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme))
    blocks: list[int] = []
    with unchanged(policy, prompts[0]):
        theta = method(policy, prompts, blocks.append)
    assert blocks == [1] * policy.blocks
    assert same_theta(theta, method(policy, prompts, lambda blocks: None))
    assert not any(tensor.requires_grad or tensor.grad_fn for tensor in theta.tensors().values())
    assert all(torch.isfinite(tensor).all() for tensor in theta.tensors().values())
    return policy, theta
