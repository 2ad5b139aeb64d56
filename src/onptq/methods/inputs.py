"""Tensor scales of what enters the linears of a theta, for schemes that fix them before the model runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import rollouts
from onptq.methods.layerwise import RESPONSE_TOKENS, answered_sequences, observing, open_streams
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import EXPERTS, Block
from onptq.quantizer.numerics import fitting_scale
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, pair_key


@torch.no_grad()
def fitting_inputs(policy: Policy, theta: Theta, prompts: Sequence[EncodedPrompt]) -> dict[str, Tensor]:
    """The scales that fit what Q under theta computes on the prompts and its own responses, by pair."""
    largest: dict[str, Tensor] = {}
    with policy.lent(), policy.speaking("Q"):
        policy.freeze(theta)
        responses = rollouts(Prefixes(policy, prompts, max_tokens=RESPONSE_TOKENS, budget=0), side="Q")
        streams = open_streams(policy, answered_sequences(policy, prompts, responses))
        for block in policy.gathered_blocks():
            for stream in streams:

                def observe(block: Block, pair: str, x: Tensor, real: Tensor = stream.real) -> None:
                    tokens = x[real] if x.shape[:-1] == real.shape else x
                    absmax, key = tokens.abs().amax().float().reshape(1), pair_key(block, pair)
                    largest[key] = torch.maximum(largest[key], absmax) if key in largest else absmax

                with observing([block], observe):
                    stream.advance(block)
            experts = [pair_key(block, pair) for pair in block.pairs if pair.startswith(EXPERTS)]
            if experts:  # one without tokens may meet any that the others do
                widest = torch.stack([largest[key] for key in experts if key in largest]).amax(0)
                largest.update({key: widest for key in experts if key not in largest})
    return {key: fitting_scale(absmax) for key, absmax in largest.items()}
