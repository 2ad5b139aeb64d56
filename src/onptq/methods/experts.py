"""What the experts of a block read, and which methods know it: each expert sees the tokens that D's router sends there."""

from __future__ import annotations

from torch import Tensor

from onptq.errors import OnPTQError
from onptq.methods.linears import dense_weight
from onptq.models.experts import by_expert
from onptq.models.family import Family
from onptq.models.structure import EXPERTS, UP_DOWN, Block, place

KNOWN = ("rtn", "smoothquant", "search", "signround", "search+signround")  # methods that fit experts
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


def read_by(block: Block, name: str, inputs: dict[str, Tensor]) -> Tensor | None:
    """What a linear reads, [n, I]; None of a cold expert's."""
    pair = block.pair_into(name)
    if pair == "norm_gate_up" and name.startswith(EXPERTS):
        return inputs.get(place(name).rpartition(".")[0])
    return inputs.get(pair)
