"""Which scheme to take: what serves on a GPU, by the serving table, and fits into its memory, by the headers of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onptq.checkpoint.exportable import check_cached, check_exportable, check_groups, output_bytes
from onptq.checkpoint.served import ADA, AMPERE, BLACKWELL, HOPPER, Served
from onptq.checkpoint.served_by_sglang import SGLANG
from onptq.checkpoint.served_by_vllm import VLLM
from onptq.checkpoint.serving import serve_command, serving
from onptq.checkpoint.source import Source, find_source
from onptq.errors import OnPTQError, did_you_mean
from onptq.plan.machine import GPUS
from onptq.plan.parts import OTHER_MODELS, Parts, find_parts
from onptq.plan.planning import local_folder
from onptq.schemes import E4M3, NAMED, UNQUANTIZED_BITS, Scheme

SERVERS = (VLLM, SGLANG)
SHARE = 0.9  # of the memory for weights and KV cache; the rest is left to activations and to the server itself
CONTEXT = 8192  # tokens in the KV cache, of all requests together
GENERATIONS = {"ampere": AMPERE, "ada": ADA, "hopper": HOPPER, "blackwell": BLACKWELL}
CANDIDATES = ("W4A16-g128", "W4A16", "W4A8", "W4A8-g128", "W8A8", "W8A16", *NAMED)

_FP8 = "8 bits on both sides; loses least of what was measured, and vLLM makes it at load time (docs/results.md)"
_W4A16 = "4-bit weights, activations in 16 bits: decoding reads a quarter of the weights"
_W4A8 = "4-bit weights and int8 GEMMs"
_W8A8 = "8 bits on both sides, int8 GEMMs; larger than 4-bit weights"
_MXFP4 = "4 bits on both sides, with coarser scales than NVFP4"
_NVFP4A16 = "4-bit weights, activations in 16 bits"
# What to take of that which fits, best first, and why. A scheme that no rule names comes after these.
RULES: Mapping[str, tuple[tuple[str, str], ...]] = {
    AMPERE: (("W4A16-g128", _W4A16), ("W8A8", _W8A8), ("W4A8", _W4A8)),
    ADA: (("FP8", _FP8), ("W4A8", _W4A8), ("W4A16-g128", _W4A16)),
    HOPPER: (
        ("FP8", _FP8),
        ("W4A8", f"{_W4A8}; 1.86x FP16's prefill and 1.69x its decoding on an H200 (docs/performance.md)"),
        ("W4AFP8", "4-bit weights with FP8's GEMMs"),
        ("W4A16-g128", _W4A16),
    ),
    BLACKWELL: (
        ("NVFP4", "4 bits on both sides; GEMMs of its numbers begin with Blackwell"),
        ("FP8", _FP8),
        ("MXFP4", _MXFP4),
        ("NVFP4A16", _NVFP4A16),
        ("W4A16-g128", _W4A16),
    ),
}
NO_RULE = "serves as well; no rule prefers it"


@dataclass(frozen=True)
class Target:
    """A GPU and the memory that there is for a model."""

    name: str
    generation: str
    gib: float | None  # None where only the generation is known


@dataclass(frozen=True)
class Choice:
    """A scheme that the GPU serves."""

    scheme: Scheme
    row: Served
    also: tuple[Served, ...]  # ways of other servers on the same GPU
    reason: str
    bits: float  # of a quantized weight, its share of the scales included
    weight_bytes: int | None = None  # of what the server loads; None without a model
    cache_bytes: int | None = None
    fits: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "scheme": str(self.scheme),
            "fits": self.fits,
            "bits": self.bits,
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "reason": self.reason,
            "command": serve_command("FOLDER", self.row),
            **asdict(self.row),
            "also": [asdict(row) | {"command": serve_command("FOLDER", row)} for row in self.also],
        }


@dataclass(frozen=True)
class LeftOut:
    """A scheme that is no choice: the GPU does not serve it, or the model does not take it."""

    scheme: Scheme
    why: str


@dataclass(frozen=True)
class Advice:
    target: Target
    model: str | None
    context: int
    choices: tuple[Choice, ...]  # best first; what does not fit comes last
    left_out: tuple[LeftOut, ...]

    @property
    def best(self) -> Choice | None:
        """What to take; None where nothing fits."""
        return next((choice for choice in self.choices if choice.fits is not False), None)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.target),
            "model": self.model,
            "context": self.context,
            "share": SHARE,
            "take": None if self.best is None else str(self.best.scheme),
            "choices": [choice.to_json() for choice in self.choices],
            "left_out": [{"scheme": str(one.scheme), "why": one.why} for one in self.left_out],
        }


def advise(gpu: str, memory: float | None = None, model: str | Path | None = None, context: int = CONTEXT) -> Advice:
    """The schemes that a GPU serves, best first; of `model`, those that fit into `memory` GiB with so many cached tokens.

    Reads headers alone. Raises where there is no such GPU or model."""
    target = find_target(gpu, memory)
    source = None if model is None else find_source(local_folder(model))
    if source is not None and target.gib is None:
        raise OnPTQError(f"--gpu {gpu} says no memory: expected --memory beside it, in GiB")
    sizes = None if source is None else _Sizes(source, context)
    choices: list[Choice] = []
    left_out: list[LeftOut] = []
    for scheme in map(Scheme.parse, CANDIDATES):
        rows = _serve(scheme, target.generation)
        why = (sizes.refusal(scheme) if sizes else None) if rows else _unserved(scheme, target.generation)
        if why is not None:
            left_out.append(LeftOut(scheme, why))
        else:
            choices += _choices(scheme, rows, target, sizes)
    order = [name for name, _ in RULES[target.generation]]

    def rank(choice: Choice) -> tuple[bool, bool, int, float]:
        name = str(choice.scheme.of_linears)
        place = order.index(name) if name in order else len(order)
        return choice.fits is False, choice.scheme.quantizes_cache, place, choice.bits

    ranked = tuple(sorted(choices, key=rank))
    return Advice(target, None if model is None else str(model), context, ranked, tuple(left_out))


def find_target(gpu: str, memory: float | None) -> Target:
    """The GPU by its name, the beginning of one, or its generation; with all of its memory, or so many GiB."""
    if gpu.lower() in GENERATIONS:
        return Target(gpu.lower(), GENERATIONS[gpu.lower()], memory)
    sheets = [sheet for name, sheet in GPUS.items() if name.startswith(gpu.lower()) and gpu]
    if len({sheet.generation for sheet in sheets}) != 1:
        raise OnPTQError(
            f"unknown --gpu {gpu!r}{did_you_mean(gpu, [*GPUS, *GENERATIONS])}; expected one of "
            f"{', '.join((*GPUS, *GENERATIONS))}"
        )
    name = sheets[0].name if len(sheets) == 1 else gpu.lower()
    return Target(name, sheets[0].generation, memory or (sheets[0].gib if len(sheets) == 1 else None))


class _Sizes:
    """The bytes of a checkpoint under each scheme, as far as a server loads it, and of its KV cache."""

    def __init__(self, source: Source, context: int) -> None:
        check_exportable(source)
        self.source = source
        parts: Parts = find_parts(source, Scheme.parse(CANDIDATES[0]))
        self.unloaded = sum(part.bytes for part in parts.parts if part.name == OTHER_MODELS)
        shapes = parts.shapes
        self.cache_bytes = context * shapes.layers * 2 * shapes.kv * UNQUANTIZED_BITS // 8

    def weights(self, scheme: Scheme) -> int:
        return output_bytes(self.source, scheme) - self.unloaded

    def cache(self, scheme: Scheme) -> int:
        return self.cache_bytes // 2 if scheme.quantizes_cache else self.cache_bytes

    def refusal(self, scheme: Scheme) -> str | None:
        """Why the model cannot be written in a scheme; None where it can."""
        try:
            check_groups(self.source, scheme)
            check_cached(self.source, scheme)
        except OnPTQError as error:
            return str(error)
        return None


def _choices(scheme: Scheme, rows: Sequence[Served], target: Target, sizes: _Sizes | None) -> Iterator[Choice]:
    """The scheme; where it does not fit, also with a KV cache of 8 bits if that makes it fit."""
    choice = _choice(scheme, rows, target, sizes)
    yield choice
    smaller = replace(scheme, cache_floats=E4M3)
    served = _serve(smaller, target.generation)
    if choice.fits is False and sizes is not None and served and sizes.refusal(smaller) is None:
        smaller_choice = _choice(smaller, served, target, sizes)
        if smaller_choice.fits:
            yield replace(smaller_choice, reason=f"{choice.reason}; a KV cache of 8 bits makes it fit")


def _choice(scheme: Scheme, rows: Sequence[Served], target: Target, sizes: _Sizes | None) -> Choice:
    row, *also = rows
    reason = dict(RULES[target.generation]).get(str(scheme.of_linears), NO_RULE)
    choice = Choice(scheme, row, tuple(also), reason, scheme.bits_per_weight)
    if sizes is None or target.gib is None:
        return choice
    weights, cache = sizes.weights(scheme), sizes.cache(scheme)
    fits = weights + cache <= SHARE * target.gib * 2**30
    return replace(choice, weight_bytes=weights, cache_bytes=cache, fits=fits)


def _rows(scheme: Scheme, generation: str) -> list[list[Served]]:
    """The ways of each server on that GPU, its default first."""
    every = [row for row in serving(scheme) if row.hardware == generation]
    return [[row for row in every if row.server == server] for server in SERVERS]


def _serve(scheme: Scheme, generation: str) -> list[Served]:
    """The first way of each server in which the GPU serves a scheme."""
    first = (next((row for row in rows if row.verdict == "serves"), None) for rows in _rows(scheme, generation))
    return [row for row in first if row is not None]


def _unserved(scheme: Scheme, generation: str) -> str:
    first = [rows[0] for rows in _rows(scheme, generation)]
    return "; ".join(f"{row.server} {row.verdict}: {row.note} ({row.evidence})" for row in first)
