"""A scheme for every linear under a budget: groups of linears are raised where that saves most KL on Q's own states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.quantizer.mix import multiplied_together
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.schemes import Scheme


@dataclass(frozen=True)
class Gain:
    """What raising some linears that servers multiply as one saves."""

    linears: tuple[str, ...]
    kl: float  # mean over the states, with them alone raised
    saved: float
    bytes: int  # that it adds

    @property
    def rate(self) -> float:
        return self.saved / self.bytes


@dataclass(frozen=True)
class Allocation:
    """The mixed scheme, and what was measured for it."""

    scheme: Scheme
    gains: tuple[Gain, ...]  # the best rate first
    raised: tuple[str, ...]  # linears that have the higher scheme
    chosen: int  # of the gains, those that the budget paid for and that save anything beside the others
    bits: float  # per weight of all linears, scales of groups included
    kl: float  # of the scheme that everything starts from
    added: float  # KL expected if savings added up
    measured: float  # KL of the mix


def allocate(
    policy: Policy,
    theta: Theta,
    prefixes: Prefixes,
    higher: Scheme,
    bits: float,
    known: Mapping[tuple[str, ...], float] | None = None,
    note: Callable[[tuple[str, ...], float], None] = lambda linears, kl: None,
) -> Allocation:
    """The mix of the policy's scheme and a `higher` one with at most so many bits a weight, and little KL.

    Every group of linears is raised by itself. Then they are raised together one after another, the most KL saved per byte
    first; since savings do not add up, each is measured beside those that are raised already, and stays if KL falls.
    All KLs are those at the states of the policy's scheme. `known` are KLs of an earlier process by the linears that were
    raised, () for none; `note` gets every new one. Q is frozen under theta afterwards."""
    sizes = {path: linear.weight.numel() for path, linear in policy.linears.items()}
    total, lower = sum(sizes.values()), policy.scheme.base
    more = (higher.bits_per_weight - lower.bits_per_weight) / 8
    budget = (bits - lower.bits_per_weight) * total / 8
    if more <= 0 or budget < 0:
        raise OnPTQError(
            f"{bits:g} bits a weight: {lower} takes {lower.bits_per_weight:g} and {higher} {higher.bits_per_weight:g}; "
            "expected a budget between them, and a scheme to raise to that takes more"
        )
    policy.freeze(theta, keep="floats")
    trajectories = follow(prefixes)
    measured = dict(known or {})

    def kl_of(raised: tuple[str, ...]) -> float:
        if raised not in measured:
            with policy.raised(theta, raised, higher):
                measured[raised] = float(compare(prefixes, trajectories).kl.mean())
            note(raised, measured[raised])
        return measured[raised]

    start = kl_of(())
    gains = []
    for group in multiplied_together(tuple(sizes)):
        kl = kl_of(group)
        gains.append(Gain(group, kl, start - kl, round(more * sum(sizes[path] for path in group))))
    gains.sort(key=lambda gain: -gain.rate)
    chosen, raised, spent, lowest = list[Gain](), tuple[str, ...](), 0, start
    for gain in gains:
        if gain.saved > 0 and spent + gain.bytes <= budget and kl_of(raised + gain.linears) < lowest:
            chosen.append(gain)
            raised, spent = raised + gain.linears, spent + gain.bytes
            lowest = kl_of(raised)
    return Allocation(
        policy.scheme.raised(raised, higher),
        tuple(gains),
        raised,
        len(chosen),
        lower.bits_per_weight + 8 * spent / total,
        start,
        start - sum(gain.saved for gain in chosen),
        lowest,
    )
