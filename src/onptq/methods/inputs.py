"""Scales that are fixed before the model runs: of what enters linears, and of cached keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import rollouts
from onptq.methods.layerwise import RESPONSE_TOKENS, Stream, answered_sequences, observing, open_streams
from onptq.models.caching import Change, change_cached
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import EXPERTS, Block
from onptq.quantizer.caches import cache_scale
from onptq.quantizer.numerics import fitting_scale
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, layer_key, pair_key


def fit_scales(policy: Policy, theta: Theta, prompts: Sequence[EncodedPrompt]) -> None:
    """Give theta the scales that its scheme fixes and that it does not have yet."""
    if policy.scheme.scales_inputs and not theta.inputs:
        theta.inputs = fitting_inputs(policy, theta, prompts)
    if policy.scheme.quantizes_cache and not theta.caches:
        theta.caches = fitting_caches(policy, theta, prompts)


@torch.no_grad()
def fitting_inputs(policy: Policy, theta: Theta, prompts: Sequence[EncodedPrompt]) -> dict[str, Tensor]:
    """The scales that fit what Q under theta computes on the prompts and its own responses, by pair."""
    largest: dict[str, Tensor] = {}
    for block, stream in _own_streams(policy, theta, prompts):

        def observe(block: Block, pair: str, x: Tensor, real: Tensor = stream.real) -> None:
            _grow(largest, pair_key(block, pair), x[real] if x.shape[:-1] == real.shape else x)

        with observing([block], observe):
            stream.advance(block)
    for block in policy.structure.blocks:
        experts = [pair_key(block, pair) for pair in block.pairs if pair.startswith(EXPERTS)]
        if experts:  # one without tokens may meet any that the others do
            widest = torch.stack([largest[key] for key in experts if key in largest]).amax(0)
            largest.update({key: widest for key in experts if key not in largest})
    return {key: fitting_scale(absmax) for key, absmax in largest.items()}


@torch.no_grad()
def fitting_caches(policy: Policy, theta: Theta, prompts: Sequence[EncodedPrompt]) -> dict[str, Tensor]:
    """The scales [2] that fit the keys and values of Q under theta, over the prompts and its own responses, by layer."""
    keys, values = dict[str, Tensor](), dict[str, Tensor]()
    for block, stream in _own_streams(policy, theta, prompts):

        def see(
            key: Tensor, value: Tensor, name: str = layer_key(block), real: Tensor = stream.real
        ) -> tuple[Tensor, Tensor]:
            _grow(keys, name, key.transpose(1, 2)[real])
            _grow(values, name, value.transpose(1, 2)[real])
            return key, value

        with _seeing(block, see):
            stream.advance(block)
    found = {name: torch.cat((keys[name], values[name])) for name in keys}
    return {name: cache_scale(absmax, policy.scheme, policy.storage) for name, absmax in found.items()}


def _own_streams(policy: Policy, theta: Theta, prompts: Sequence[EncodedPrompt]) -> Iterator[tuple[Block, Stream]]:
    """Every block with every batch of prompts and Q's own responses in front of it, which whoever asks advances."""
    with policy.lent(), policy.speaking("Q"):
        policy.freeze(theta)
        responses = rollouts(Prefixes(policy, prompts, max_tokens=RESPONSE_TOKENS, budget=0), side="Q")
        streams = open_streams(policy, answered_sequences(policy, prompts, responses))
        for block in policy.gathered_blocks():
            for stream in streams:
                yield block, stream


@contextmanager
def _seeing(block: Block, see: Change) -> Iterator[None]:
    """A context in which `see` gets the keys and values of a block, if it has any, not yet quantized."""
    hook = change_cached(block.owner("o_proj"), lambda: see) if "o_proj" in block.linears else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def _grow(largest: dict[str, Tensor], key: str, x: Tensor) -> None:
    absmax = x.abs().amax().float().reshape(1)
    largest[key] = torch.maximum(largest[key], absmax) if key in largest else absmax
