"""The receipt of a comparison of servers: who was asked what, and what came of it, in numbers."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.page.contract import Candidate, Page
from onptq.page.endpoints import Endpoint
from onptq.page.receipt import FORMAT, distances
from onptq.version import __version__


def receipt_of_servers(
    page: Page, endpoints: Sequence[Endpoint], models: Sequence[str], prompts: Sequence[Prompt], max_tokens: int
) -> Mapping[str, Any]:
    """Addresses, what the servers call their models, the hash of the prompts, and of every candidate how far it is.

    KL is that of the states up to the first fork, a lower bound. Noise is the share of answers with another text where a prompt
    was asked twice."""
    servers: list[dict[str, Any]] = [
        {"name": one.name, "url": one.url, "model": model} for one, model in zip(endpoints, models, strict=True)
    ]
    return {
        "format": FORMAT,
        "model": servers[0],
        "prompts": {"sha256": manifest_digest(prompts), "count": len(prompts)},
        "max_tokens": max_tokens,
        "versions": {"onptq": __version__, "python": platform.python_version()},
        "candidates": [server | _figures(one) for server, one in zip(servers[1:], page.candidates, strict=True)],
    }


def _figures(candidate: Candidate) -> dict[str, Any]:
    responses = [one for one in candidate.responses if one is not None]
    states = [one.states for one in responses if one.states is not None]
    kl = np.array([value for one in states for value in one.kl])
    same = [a == b for one in states for a, b in zip(one.quantized, one.reference, strict=True)]
    found: dict[str, Any] = {"answers": len(responses), "changed": sum(one.change != "same" for one in responses)}
    again = candidate.figures["noise_responses"].value
    found["noise"] = None if again is None else again / 100
    return found | ({**distances(kl), "top_1_agreement": float(np.mean(same))} if states else {})
