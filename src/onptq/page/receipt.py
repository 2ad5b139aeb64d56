"""The receipt: what exactly was compared and what came of it, in numbers that another run can be held against."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onptq.bank import Column, States
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.model_card import HELD_OUT, init_kept
from onptq.evaluate.store import COST, IDENTITY, STATES, THETA
from onptq.files import read_json
from onptq.page.contract import Candidate, Page
from onptq.page.endpoints import Endpoint
from onptq.page.places import Comparison, Place
from onptq.plain_yaml import read_yaml
from onptq.run import RECORD, SUMMARY, SUMS
from onptq.version import __version__

FORMAT = 1
PERCENTILES = (50, 95, 99)


def receipt(place: Place) -> dict[str, Any]:
    """Hashes, versions and sizes, and of every candidate how far it is from the dense model."""
    home = place.home
    record = read_yaml(home / RECORD)
    content: dict[str, Any] = {
        "format": FORMAT,
        **{name: record.get(name) for name in ("model", "prompts", "items", "versions")},
    }
    if isinstance(place, Comparison):
        dense = home / DENSE / COST
        content["model"] |= {"bytes": read_json(dense)["checkpoint_bytes"]} if dense.is_file() else {}
        content["candidates"] = [_candidate(folder) for folder in _folders(home)]
    else:
        content["recipe"] = record["recipe"]
        content["candidates"] = [_result(home)]
    return content


def figures(states: States) -> dict[str, Any]:
    """Of a candidate's states: KL in nats, how often both models choose alike, and how often it contradicts itself."""
    return {
        **distances(states.kl.astype(np.float64)),
        "top_1_agreement": float((states.quantized == states.reference).mean()),
        "noise": float((states.token != states.quantized).mean()),
    }


def distances(kl: Column) -> dict[str, Any]:
    """How many states there are, and how their KL is spread."""
    return {
        "positions": len(kl),
        "kl": {
            "mean": float(kl.mean()),
            "median": float(np.quantile(kl, 0.5)),
            **{f"p{share}": float(np.quantile(kl, share / 100)) for share in PERCENTILES if share != 50},
            "max": float(kl.max()),
        },
    }


def receipt_of_servers(
    page: Page, endpoints: Sequence[Endpoint], models: Sequence[str], prompts: Sequence[Prompt], max_tokens: int
) -> Mapping[str, Any]:
    """Addresses, what the servers call their models, the hash of the prompts, and of every candidate how far it is.

    KL is that of the states up to the first fork, a lower bound. Noise is the share of answers with another text where a prompt
    was sent twice."""
    servers: list[dict[str, Any]] = [
        {"name": one.name, "url": one.url, "model": model} for one, model in zip(endpoints, models, strict=True)
    ]
    return {
        "format": FORMAT,
        "model": servers[0],
        "prompts": {"sha256": manifest_digest(prompts), "count": len(prompts)},
        "max_tokens": max_tokens,
        "versions": {"onptq": __version__, "python": platform.python_version()},
        "candidates": [server | _server_figures(one) for server, one in zip(servers[1:], page.candidates, strict=True)],
    }


def _candidate(folder: Path) -> dict[str, Any]:
    identity, cost = read_json(folder / IDENTITY), read_json(folder / COST)
    record: dict[str, Any] = {
        "name": identity["name"],
        "identity": {k: v for k, v in identity.items() if k not in ("name", "recipe")},
    }
    theta = _sums(folder.parents[1]).get(str((folder / THETA).relative_to(folder.parents[1])))
    if theta is not None:
        record["theta_sha256"] = theta
    states = folder / STATES
    return record | {"bytes": cost.get("checkpoint_bytes")} | (figures(States.read(states)) if states.is_file() else {})


def _result(home: Path) -> dict[str, Any]:
    """The checkpoint of a run, on its held-out prompts."""
    checkpoint = read_json(home / SUMMARY).get("checkpoint") or {}
    held_out = home / ("rounds/0" if init_kept(home) else "final") / HELD_OUT
    record = {"name": "result", "sha256": checkpoint.get("sha256"), "bytes": checkpoint.get("bytes")}
    return record | (figures(States.read(held_out)) if held_out.is_file() else {})


def _folders(home: Path) -> list[Path]:
    """The candidates that were measured, in the order they were begun."""
    begun = sorted(home.glob(f"candidates/*/{IDENTITY}"), key=lambda path: (path.stat().st_mtime_ns, path))
    return [path.parent for path in begun if (path.parent / COST).is_file()]


def _sums(home: Path) -> dict[str, str]:
    """By name, the last sum that a file was committed with."""
    sums: dict[str, str] = {}
    if (home / SUMS).is_file():
        for line in (home / SUMS).read_text(encoding="utf-8", errors="replace").splitlines():
            digest, _, name = line.partition("  ")
            sums[name] = digest
    return sums


def _server_figures(candidate: Candidate) -> dict[str, Any]:
    responses = [one for one in candidate.responses if one is not None]
    states = [one.states for one in responses if one.states is not None]
    kl = np.array([value for one in states for value in one.kl])
    same = [a == b for one in states for a, b in zip(one.quantized, one.reference, strict=True)]
    again = candidate.figures["noise_responses"].value
    counts: dict[str, Any] = {
        "answers": len(responses),
        "changed": sum(one.change != "same" for one in responses),
        "noise": None if again is None else again / 100,
    }
    return counts | ({**distances(kl), "top_1_agreement": float(np.mean(same))} if states else {})
