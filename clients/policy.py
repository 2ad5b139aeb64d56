"""Rollouts by vLLM beside OnPTQ's own: the same bank, but for near ties, which are counted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from cases import Case
from numpy.typing import NDArray

import onptq
from onptq.bank import States, Trajectory, load_bank, load_trajectories
from onptq.checkpoint.source import Source
from onptq.cycle.disagreements import NEAR_TIE, Disagreements
from onptq.data.manifest import load_manifest
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.recipe import Recipe
from onptq.run import run_home
from onptq.schemes import Scheme
from onptq.zoo.suite import items

IMAGES, LONG = "images", "long"
ROW = (
    0.05  # by which numbers of a state may differ: in a batch of another width some activations round to the next code
)
NUMBERS = ("margin_dense", "margin_quant", "erosion", "js", "kl")
CHOICES = ("reference", "competitor", "quantized")
FIXED: Mapping[str, Any] = {
    "init": "rtn",
    "rounds": 1,
    "data.holdout": 0,
    "calibrate.epochs": 1,
    "calibrate.keep": "last",
    "compute.device": "cpu",
}


@dataclass(frozen=True)
class Rollouts:
    """One model and its prompts, whose responses are written by both."""

    name: str
    case: Case
    changes: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"policy-{self.name}"

    def prompts(self, source: Source) -> list[Prompt]:
        if self.name == IMAGES:
            drawn = [
                item.prompt for task in ("caption", "choice") for item in items(source.family.name, task, "train", 4)
            ]
            words = [
                Prompt(0, f"text-{number}", [{"role": "user", "content": [{"type": "text", "text": text}]}])
                for number, text in enumerate(("Define membrane.", "Define a harbour."))
            ]
            prompts = [*drawn, *words]
        else:
            prompts = load_manifest(source.folder / "prompts.jsonl")[:2]
        return [Prompt(place, one.id, one.messages, one.images, one.audios) for place, one in enumerate(prompts)]

    def recipe(self, engine: str) -> Recipe:
        changes = {"scheme": str(self.case.scheme), "follow.engine": engine, **FIXED, **self.changes}
        return Recipe.preset("light", changes)


@dataclass(frozen=True)
class Beside:
    """The two banks of one case in numbers."""

    label: str
    scheme: str
    responses: int = 0
    longest: int = 0  # tokens of a response of the server
    states: int = 0  # of the server's bank
    equal: int = 0  # of those, the ones that both banks have with the same choices and numbers
    parted: int = 0  # responses that differ
    near_ties: int = 0  # states of the server's bank whose token is not Q's choice
    largest_gap: float = 0.0  # logits between the two tokens, for Q, at those states
    seconds: Mapping[str, float] = field(default_factory=dict)
    fault: str | None = None


def beside_our_own(python: Path, out: Path, flags: Set[str]) -> list[Beside]:
    return [compare(one, python, out) for one in chosen("avx512f" in flags)]


def chosen(has_4_bits: bool) -> list[Rollouts]:
    """An image model, and one of text that writes 2,000 tokens."""
    four = Scheme.parse("W4A16" if has_4_bits else "W8A8")
    return [
        Rollouts(IMAGES, Case("zoo:qwen2.5-vl", Scheme.parse("W8A8")), {"follow.max_tokens": 32}),
        Rollouts(LONG, Case("random:qwen3", four), {"follow.max_tokens": 2000, "method": "static"}),
    ]


def compare(rollouts: Rollouts, python: Path, out: Path) -> Beside:
    """Quantize twice, and hold the server's bank against ours."""
    began, label = time.monotonic(), rollouts.label
    source = rollouts.case.source(out / "models")
    prompts = rollouts.prompts(source)
    seconds: dict[str, float] = {}
    folders = {engine: out / label / engine for engine in ("own", "vllm")}
    try:
        for engine, folder in folders.items():
            recipe = rollouts.recipe(engine)
            onptq.quantize(source, folder, calibration=prompts, recipe=recipe, verify=False, vllm_python=python)
            seconds[engine] = round(time.monotonic() - began - sum(seconds.values()), 1)
    except OnPTQError as error:
        return Beside(label, rollouts.case.scheme_name, seconds=seconds, fault=str(error))
    own, served = (run_home(folder) for folder in folders.values())
    return beside(rollouts, own, served, seconds)


def beside(rollouts: Rollouts, own: Path, served: Path, seconds: Mapping[str, float]) -> Beside:
    """The banks of two runs."""
    ours, theirs = (load_trajectories(home) for home in (own, served))
    our_bank, their_bank = (load_bank(home) for home in (own, served))
    differing = Disagreements.read(served / "rounds/0/disagreements.parquet")
    common = {one.prompt: shared(one, other) for one, other in zip(ours, theirs, strict=True)}
    equal, wrong = equal_rows(our_bank, their_bank, common)
    partings = {
        (one.prompt, common[one.prompt] + 1)
        for one, other in zip(ours, theirs, strict=True)
        if one.tokens != other.tokens
    }
    result = Beside(
        rollouts.label,
        rollouts.case.scheme_name,
        len(theirs),
        max(len(one.tokens) for one in theirs),
        len(their_bank),
        equal,
        len(partings),
        len(differing),
        float(differing.gap.max(initial=0.0)),
        seconds,
    )
    # Where responses part, the server did not take Q's choice, or our own cached decoding did not.
    explained = {*keys(our_bank.take(disagreeing(our_bank))), *keys(their_bank.take(disagreeing(their_bank)))}
    fault = None
    if wrong:
        fault = f"{wrong} states that both visited have other choices or numbers"
    elif partings - explained:
        fault = f"responses part at {sorted(partings - explained)}, where both took Q's choice"
    elif result.largest_gap >= NEAR_TIE:
        fault = f"the server chose a token {result.largest_gap:.3f} logits below Q's own, not less than {NEAR_TIE}"
    return replace(result, fault=fault)


def disagreeing(states: States) -> NDArray[Any]:
    return np.flatnonzero(states.token != states.quantized)


def shared(one: Trajectory, other: Trajectory) -> int:
    """The number of tokens before two responses part."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    most = min(len(one.tokens), len(other.tokens))
    return next((place for place, (mine, their) in enumerate(pairs) if mine != their), most)


def equal_rows(ours: States, theirs: States, common: Mapping[int, int]) -> tuple[int, int]:
    """States with the same prefix in both banks: how many are the same but for the token that was written, and how many not."""
    places = [
        {key: row for row, key in enumerate(keys(states)) if key[1] <= common[key[0]] + 1} for states in (ours, theirs)
    ]
    both = [key for key in places[0] if key in places[1]]
    one, other = (
        states.take(np.array([own[key] for key in both])) for states, own in zip((ours, theirs), places, strict=True)
    )
    same = np.ones(len(both), bool)
    for name in NUMBERS:
        same &= np.isclose(getattr(one, name), getattr(other, name), rtol=0, atol=ROW)
    tied = np.minimum(np.abs(one.margin_quant), np.abs(one.margin_dense)) < ROW
    for name in CHOICES:
        same &= (getattr(one, name) == getattr(other, name)) | tied
    return int(same.sum()), int((~same).sum())


def keys(states: States) -> list[tuple[int, int]]:
    return list(zip(states.prompt.tolist(), states.t.tolist(), strict=True))
