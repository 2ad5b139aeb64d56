"""The receipt: what exactly was compared and what came of it, in numbers that another run can be held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from onptq.bank import Column, States
from onptq.evaluate.candidates import DENSE
from onptq.evaluate.model_card import HELD_OUT, init_kept
from onptq.evaluate.store import COST, IDENTITY, STATES, THETA
from onptq.files import read_json
from onptq.page.places import Comparison, Place
from onptq.plain_yaml import read_yaml
from onptq.run import RECORD, SUMMARY, SUMS

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


def _candidate(folder: Path) -> dict[str, Any]:
    identity, cost = read_json(folder / IDENTITY), read_json(folder / COST)
    found: dict[str, Any] = {
        "name": identity["name"],
        "identity": {k: v for k, v in identity.items() if k not in ("name", "recipe")},
    }
    theta = _sums(folder.parents[1]).get(str((folder / THETA).relative_to(folder.parents[1])))
    if theta is not None:
        found["theta_sha256"] = theta
    states = folder / STATES
    return found | {"bytes": cost.get("checkpoint_bytes")} | (figures(States.read(states)) if states.is_file() else {})


def _result(home: Path) -> dict[str, Any]:
    """The checkpoint of a run, on its held-out prompts."""
    checkpoint = read_json(home / SUMMARY).get("checkpoint") or {}
    held_out = home / ("rounds/0" if init_kept(home) else "final") / HELD_OUT
    found = {"name": "result", "sha256": checkpoint.get("sha256"), "bytes": checkpoint.get("bytes")}
    return found | (figures(States.read(held_out)) if held_out.is_file() else {})


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
