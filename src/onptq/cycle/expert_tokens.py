"""How many tokens each expert of a model saw: an expert that saw none was not calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onptq.bank import read_trajectories
from onptq.cycle.rounds import Cycle
from onptq.engine.prefixes import whole_prompts
from onptq.methods.experts import LEAST_TOKENS
from onptq.methods.layerwise import answered_sequences
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.experts import observing_routes
from onptq.quantizer.policy import Policy


def expert_summary(cycle: Cycle) -> dict[str, Any]:
    """`tokens` of each expert by layer, in the calibration prompts and the last responses to them, as D routes them; and the
    `cold` experts. Empty for a model without experts."""
    if not cycle.policy.structure.routed:
        return {}
    sequences: Sequence[EncodedPrompt] = cycle.inputs.prompts
    if rounds := cycle.recipe.rounds:
        trajectories = cycle.run.read(f"rounds/{rounds - 1}/trajectories.parquet", read_trajectories)
        sequences = answered_sequences(cycle.policy, sequences, trajectories)
    counts = tokens_per_expert(cycle.policy, sequences)
    few = {layer: [expert for expert, seen in enumerate(each) if seen < LEAST_TOKENS] for layer, each in counts.items()}
    return {"tokens": counts, "cold": {layer: experts for layer, experts in few.items() if experts}}


def cold_warning(summary: Mapping[str, Any]) -> str | None:
    """A sentence on how many experts are cold, if any."""
    left, every = (sum(map(len, summary[key].values())) if summary else 0 for key in ("cold", "tokens"))
    if not left:
        return None
    return (
        f"{left} of {every} experts read fewer than {LEAST_TOKENS} tokens of the calibration prompts and their responses: "
        "little was fitted of them, or nothing; more prompts, or longer ones, would reach them"
    )


@torch.no_grad()
def tokens_per_expert(policy: Policy, sequences: Sequence[EncodedPrompt]) -> dict[str, list[int]]:
    """How many tokens of the sequences D's router sends to each expert, by layer."""
    blocks, counts = policy.structure.blocks, dict[str, Tensor]()

    def count(place: int, index: Tensor) -> None:
        experts, layer = blocks[place].experts, f"layers.{place}"
        assert experts is not None
        seen = index.flatten().bincount(minlength=len(experts))
        counts[layer] = counts[layer] + seen if layer in counts else seen

    with observing_routes([block.module for block in blocks], count), policy.speaking("D"):
        for sequence in sequences:
            policy.run(whole_prompts(PromptBatch.of([sequence])))
    return {layer: seen.tolist() for layer, seen in counts.items()}
