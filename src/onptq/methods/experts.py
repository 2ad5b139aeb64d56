"""What the experts of a block read, and which methods know it: each expert sees the tokens that D's router sends there."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from onptq.errors import OnPTQError
from onptq.methods.layerwise import Stream
from onptq.methods.linears import dense_weight
from onptq.models.experts import by_expert, observing_routes
from onptq.models.family import Family
from onptq.models.structure import EXPERTS, UP_DOWN, Block, place

KNOWN = (  # methods that fit experts
    "rtn",
    "smoothquant",
    "awq",
    "mbq",
    "masquant",
    "gptq",
    "search",
    "signround",
    "smoothquant+gptq",
    "search+gptq",
    "search+signround",
)
BESIDE = "beside "
ROUTES = "routes"  # among the inputs of a block: the experts [n, k] of every token
LEAST_TOKENS = 8  # of an expert that is fitted; one with fewer keeps what it began with


def check_method(name: str, family: Family) -> None:
    """Refuse a method that would give every token to every expert."""
    if family.has_experts and name not in KNOWN:
        raise OnPTQError(
            f"{name} does not know experts, and {family.model_class} has some in "
            f"{next(one for one in family.linears if f'.{EXPERTS}' in one)}; expected one of {', '.join(KNOWN)}"
        )


def read_by_experts(block: Block, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a block with those of each expert: by its name what it reads, by its pair what its down_proj reads.

    They are computed from the tokens that every expert could read and from their routes. Cold experts are not there."""
    if block.experts is None:
        return inputs
    x, index = inputs["norm_gate_up"], inputs[ROUTES]
    added = {}
    for number, (rows, _) in enumerate(by_expert(index, len(block.experts))):
        if len(rows) < LEAST_TOKENS:
            continue
        name, act_fn = f"{EXPERTS}{number}", block.experts[number].act_fn
        gate, up = (x[rows] @ dense_weight(block, f"{name}.{part}").T for part in ("gate_proj", "up_proj"))
        added[name], added[f"{name}.{UP_DOWN}"] = x[rows], act_fn(gate) * up  # type: ignore[operator]
    return inputs | added


def inputs_of(stream: Stream, block: Block, beside: Tensor | None = None) -> dict[str, Tensor]:
    """The inputs [B, S, I] of each pair's consumers, from one run of the block. Those of an expert are the real tokens alone
    that the router sends there, [1, n, I]: by its name what it reads, by its pair what its down_proj reads.

    `beside` [B, S] has a value for each token; the values come back under BESIDE, followed by the name of an expert."""
    routes: dict[int, Tensor] = {}
    with observing_routes([block.module], routes.__setitem__):
        inputs = stream.inputs(block)
    if block.experts is None:
        return inputs
    real, x = stream.real.flatten(), inputs["norm_gate_up"].flatten(0, 1)
    for number, (rows, _) in enumerate(by_expert(routes[0], len(block.experts))):
        name, kept = f"{EXPERTS}{number}", real[rows]
        if not bool(kept.any()):
            inputs.pop(f"{name}.{UP_DOWN}", None)
            continue
        inputs[name] = x[None, rows[kept]]
        inputs[f"{name}.{UP_DOWN}"] = inputs[f"{name}.{UP_DOWN}"][:, kept]
        if beside is not None:
            inputs[BESIDE + name] = beside.flatten()[None, rows[kept]]
    return inputs


def is_cold(key: str, tokens: int) -> bool:
    """Whether `tokens` are too few for what an expert reads, by its name or its pair."""
    return key.startswith(EXPERTS) and tokens < LEAST_TOKENS


def read_by(block: Block, name: str, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """What a linear reads, of the entries by pair and by expert; None of a cold expert's."""
    pair = block.pair_into(name)
    if pair == "norm_gate_up" and name.startswith(EXPERTS):
        return inputs.get(place(name).rpartition(".")[0])
    return inputs.get(pair)
