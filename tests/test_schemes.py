from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onptq.errors import OnPTQError
from onptq.schemes import NAMED, PAPER_SCHEMES, Scheme

bits = st.integers(2, 8)
joint = st.builds(Scheme, bits, st.one_of(bits, st.just(16)), st.none() | st.integers(1, 4096))
weight_only = st.builds(Scheme, bits, st.just(16), st.none() | st.integers(1, 4096), st.booleans())


named = st.sampled_from(list(NAMED.values()))


@given(st.one_of(joint, weight_only, named))
def test_every_scheme_reads_back_from_its_own_name(scheme: Scheme) -> None:
    assert Scheme.parse(str(scheme)) == scheme
    assert Scheme.parse(f" {str(scheme).lower()} ") == scheme


@pytest.mark.parametrize("name", PAPER_SCHEMES)
def test_paper_schemes_are_symmetric_per_channel_and_keep_their_name(name: str) -> None:
    scheme = Scheme.parse(name)
    assert str(scheme) == name
    assert scheme.symmetric
    assert scheme.group_size is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int4", "W4A16"),
        ("W4", "W4A8"),
        ("W4A8-sym", "-asym"),
        ("W1A8", "2 to 8"),
        ("W4A12", "2 to 8"),
        ("W4A16-g0", "positive"),
        ("W4A8-g0", "positive"),
        ("W4A8-asym", "weight-only"),
        ("W16A8-g128", "quantized weights"),
    ],
)
def test_an_impossible_scheme_is_refused_with_what_is_possible(name: str, expected: str) -> None:
    with pytest.raises(OnPTQError, match=expected):
        Scheme.parse(name)


@pytest.mark.parametrize(
    ("name", "simulated"),
    [
        ("W4A16", False),
        ("W4A16-g128-asym", False),
        ("W8A8", False),
        ("W4A8", False),
        ("W4A6", True),
        ("W3A16", True),
        ("FP8", False),
    ],
)
def test_a_scheme_without_a_serving_kernel_is_a_simulation(name: str, simulated: bool) -> None:
    assert Scheme.parse(name).simulated is simulated


@pytest.mark.parametrize(("name", "whole"), [("W4A8", True), ("W4A8-g128", False), ("W4A16", False), ("W16A8", False)])
def test_one_product_of_integers_takes_one_scale_per_row(name: str, whole: bool) -> None:
    assert Scheme.parse(name).multiplies_integers is whole


def test_sixteen_bits_are_not_quantized() -> None:
    assert not Scheme.parse("W4A16").quantizes_activations
    assert Scheme.parse("W4A16").quantizes_weights
    assert not Scheme.parse("W16A16").quantizes_weights
