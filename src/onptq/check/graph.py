"""A checkpoint, reloaded, against the graph that it was folded from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onptq.check.examine import verify_export
from onptq.check.probes import probe_prompt
from onptq.check.trial import Answer
from onptq.checkpoint.source import Source
from onptq.data.prompts import Prompt
from onptq.engine.budget import give_back_memory
from onptq.engine.memory import free_memory
from onptq.models.processing import ModelInputs, PromptProcessor
from onptq.progress import Bar, Reporter
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.schemes import Scheme


@dataclass(frozen=True)
class Graph:
    """What the graph says, and the dense model's answers."""

    tried: list[ModelInputs]
    logits: list[Tensor]  # of the graph
    dense: Sequence[Answer]


def answer_graph(
    policy: Policy,
    theta: Theta,
    processor: PromptProcessor,
    prompts: Sequence[Prompt],
    dense: Sequence[Answer],
    bar: Bar,
) -> Graph:
    """What the checkpoint will be compared with, on a built-in prompt and these. Q is theta, simulated, as whoever loads the
    checkpoint computes it."""
    tried = [processor(prompt) for prompt in (probe_prompt(processor.family.modalities), *prompts)]
    policy.attach(theta)
    logits = []
    for inputs in tried:
        logits.append(_logits(policy, inputs))
        bar.advance()
    return Graph(tried, logits, dense)


def reload_and_check(
    out: Path,
    source: Source,
    scheme: Scheme,
    policy: Policy,
    graph: Graph,
    processor: PromptProcessor,
    reporter: Reporter,
) -> dict[str, Any] | None:
    """The checkpoint, loaded by transformers, against the graph; None where a model whose blocks were sharded does not fit
    whole. Releases the policy."""
    needed = sum(tensor.numel for tensor in source.checkpoint.tensors.values()) * policy.dtype.itemsize
    policy.release()
    give_back_memory()
    if policy.sharded is not None and needed > free_memory(policy.device):
        reporter.warn(
            f"{out} was not loaded to check it: whole, it takes {needed / 2**30:.1f} GiB, and {policy.device} has "
            f"{free_memory(policy.device) / 2**30:.1f}. `onptq verify {out}` does that where there is room"
        )
        return None
    verification, checks = verify_export(
        out,
        source,
        processor,
        [one.tensors for one in graph.tried],
        graph.logits,
        graph.dense,
        scheme=scheme,
        dtype=policy.dtype,
        device=policy.device,
    )
    for one in checks:
        if not one.passed:
            reporter.warn(f"{one.name}: the checkpoint {one.seen}")
    return asdict(verification) | {"checks": [asdict(one) for one in checks]}


@torch.no_grad()
def _logits(policy: Policy, inputs: ModelInputs) -> Tensor:
    tensors: Mapping[str, Tensor] = {name: tensor.to(policy.device) for name, tensor in inputs.tensors.items()}
    with policy.speaking("Q"):
        logits: Tensor = policy.model(**tensors, use_cache=False).logits
    return logits.float().cpu()
