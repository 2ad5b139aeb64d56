"""A mix under a budget: what is raised, by what it saves on the quantized model's own states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Tiny

from onptq.cycle.allocate import Allocation, allocate
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.methods.rtn import rtn
from onptq.quantizer.mix import check_mix, multiplied_together
from onptq.schemes import Scheme

LOW, HIGH = "W3A16", "W8A16"


@pytest.fixture(scope="module")
def found(tiny: Callable[[str], Tiny]) -> tuple[Allocation, dict[tuple[str, ...], float]]:
    policy = tiny("qwen2.5-vl").policy(LOW)
    prefixes = Prefixes(policy, tiny("qwen2.5-vl").encode(policy, 3), max_tokens=3)
    measured: dict[tuple[str, ...], float] = {}
    found = allocate(
        policy, rtn(policy), prefixes, Scheme.parse(HIGH), 5.0, note=lambda group, kl: measured.update({group: kl})
    )
    return found, measured


def test_the_best_rates_are_raised_as_far_as_the_budget_goes(
    tiny: Callable[[str], Tiny], found: tuple[Allocation, dict[tuple[str, ...], float]]
) -> None:
    """Savings and sizes are taken again from scratch: a policy of the mixed scheme, and one for a single group."""
    mix, measured = found
    policy = tiny("qwen2.5-vl").policy(LOW)
    paths = tuple(policy.linears)
    groups = multiplied_together(paths)
    assert sorted(gain.linears for gain in mix.gains) == sorted(groups)
    assert set(measured) >= {(), *groups}
    rates = [gain.rate for gain in mix.gains]
    assert rates == sorted(rates, reverse=True)
    sizes = {path: linear.weight.numel() for path, linear in policy.linears.items()}
    taken: list[str] = []
    spent, budget, lowest, left = 0.0, 2.0 * sum(sizes.values()), mix.kl, 0
    for gain in mix.gains:
        bits = 5.0 * sum(sizes[path] for path in gain.linears)
        assert gain.bytes * 8 == pytest.approx(bits, abs=8)
        assert gain.saved == mix.kl - gain.kl
        if gain.saved <= 0 or spent + bits > budget:
            continue
        together = measured[(*taken, *gain.linears)]
        if together < lowest:
            taken += gain.linears
            spent, lowest = spent + bits, together
        else:
            left += 1
    assert mix.measured == lowest
    assert mix.raised == tuple(taken)
    assert {path for path in paths if mix.scheme.of(path) == Scheme.parse(HIGH)} == set(taken)
    assert mix.bits == pytest.approx(3 + spent / sum(sizes.values()))
    assert mix.bits <= 5.0
    check_mix(mix.scheme, paths)
    assert Scheme.parse(str(mix.scheme)) == mix.scheme

    theta = rtn(policy)
    policy.freeze(theta)
    prompts = tiny("qwen2.5-vl").encode(policy, 3)
    trajectories = follow(Prefixes(policy, prompts, max_tokens=3))
    for scheme, kl in (
        (mix.scheme, mix.measured),
        (policy.scheme.raised(mix.gains[0].linears, Scheme.parse(HIGH)), mix.gains[0].kl),
    ):
        other = tiny("qwen2.5-vl").policy(str(scheme))
        other.freeze(rtn(other))
        states = compare(Prefixes(other, tiny("qwen2.5-vl").encode(other, 3), max_tokens=3), trajectories)
        assert float(states.kl.mean()) == pytest.approx(kl, rel=1e-4)
    assert mix.measured < mix.kl


def test_what_is_known_is_not_measured_again_and_the_policy_is_what_it_was(
    tiny: Callable[[str], Tiny], found: tuple[Allocation, dict[tuple[str, ...], float]]
) -> None:
    policy = tiny("qwen2.5-vl").policy(LOW)
    prefixes = Prefixes(policy, tiny("qwen2.5-vl").encode(policy, 3), max_tokens=3)
    again = allocate(
        policy, rtn(policy), prefixes, Scheme.parse(HIGH), 5.0, found[1], lambda *_: pytest.fail("measured again")
    )
    assert again == found[0]
    assert {linear.scheme for linear in policy.linears.values()} == {Scheme.parse(LOW)}


@pytest.mark.parametrize(("bits", "raised"), [(2.5, HIGH), (4.0, "W2A16"), (4.0, LOW)])
def test_a_budget_below_the_scheme_and_a_raise_that_is_none_are_refused(
    tiny: Callable[[str], Tiny], bits: float, raised: str
) -> None:
    policy = tiny("llama").policy(LOW)
    prefixes = Prefixes(policy, tiny("llama").encode(policy, 1), max_tokens=1)
    with pytest.raises(OnPTQError, match="expected a budget between them"):
        allocate(policy, rtn(policy), prefixes, Scheme.parse(raised), bits)
