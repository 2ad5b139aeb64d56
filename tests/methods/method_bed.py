"""What the tests of the methods share: a model small enough to compute by hand, short responses, and what a method may not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from conftest import Tiny
from torch import Tensor

from onptq.bank import Trajectory
from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import find_source
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.processing import PromptProcessor
from onptq.models.structure import Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.schemes import Scheme

PROMPTS = 3


def open_small(folder: Path) -> Tiny:
    source = find_source(folder)
    return Tiny(folder, source, PromptProcessor.from_folder(folder, source.family, source.config))


def exact_policy(bed: Tiny, scheme: str) -> Policy:
    """float64 all over, stored steps and gains too."""
    model = load_model(bed.source, torch.float64, torch.device("cpu"))
    return Policy(model, Scheme.parse(scheme), storage=torch.float64, eos=bed.source.eos())


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
def hearing(block: Block, name: str, heard: list[Tensor]) -> Iterator[None]:
    hook = block.child(name).register_forward_pre_hook(lambda module, args: heard.append(args[0][0]))
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def inputs_of(policy: Policy, side: str, sequences: Sequence[EncodedPrompt], block: Block, name: str) -> np.ndarray:
    """Every token that enters a linear, one sequence at a time, [tokens, I]."""
    heard: list[Tensor] = []
    with hearing(block, name, heard), policy.speaking(side):  # type: ignore[arg-type]
        for sequence in sequences:
            policy.run(tokens_of(sequence))
    return torch.cat(heard).double().numpy()


@torch.no_grad()
def block_outputs(policy: Policy, side: str, sequences: Sequence[EncodedPrompt]) -> list[list[Tensor]]:
    """What leaves every block, before DeepStack: [block][sequence]."""
    left: list[list[Tensor]] = [[] for _ in policy.structure.blocks]
    with policy.speaking(side):  # type: ignore[arg-type]
        for sequence in sequences:
            policy.run(tokens_of(sequence), observe=lambda index, hidden: left[index].append(hidden[0]))
    return left


def check_manners(
    bed: Tiny, scheme: str, method: Callable[[Policy, list[EncodedPrompt], Callable[[int], None]], Theta]
) -> tuple[Policy, Theta]:
    """The method tells of every block, gives the same theta twice, and leaves the policy as it was, frozen theta included."""
    policy = bed.policy(scheme)
    prompts = bed.encode(policy, 2)
    weights = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme))
    folded, modules = dict(policy.folded()), list(policy.model.modules())
    steps: list[int] = []
    theta = method(policy, prompts, steps.append)
    assert steps == [1] * policy.blocks
    again = method(policy, prompts, lambda blocks: None)
    assert theta.tensors().keys() == again.tensors().keys()
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in theta.tensors().items())
    assert not any(parameter.requires_grad or parameter.grad_fn for parameter in theta.tensors().values())

    assert all(a is b for a, b in zip(policy.model.modules(), modules, strict=True))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in policy.model.state_dict().items())
    assert all(piece is folded[path] for path, piece in policy.folded())
    assert not policy.switch.quantized
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)
    return policy, theta
