"""Damaged files of every kind: each is read, or refused in words, within bounded time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded import guarded, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import KINDS, MOST, Mutation, mutated
from readers import READERS, readable

EXAMPLES = 30  # `campaign.py` draws more
SLOW = (
    "safetensors",
    "tokenizer_config.json",
    "tokenizer.json",
    "preprocessor_config.json",
    "chat template",
    "config.json",
)

MUTATIONS = st.lists(
    st.builds(Mutation, st.sampled_from(KINDS), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32 - 1)),
    min_size=1,
    max_size=MOST,
)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(name: str) -> None:
    seed = readable(name)

    def work(case: Path) -> None:
        @settings(
            max_examples=EXAMPLES // 6 if name in SLOW else EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(MUTATIONS)
        def run(mutations: list[Mutation]) -> None:
            data = mutated(seed, mutations)
            case.write_bytes(data)
            outcome(READERS[name].read, data)

        run()

    trouble, data = guarded(work)
    assert trouble is None, f"{trouble}\n{data[:200]!r}"


def test_a_case_that_hangs_or_takes_all_memory_is_noticed() -> None:
    def endless(case: Path) -> None:
        case.write_bytes(b"x")
        bytearray(2**33)

    trouble, data = guarded(endless)
    assert trouble is not None
    assert "MemoryError" in trouble
    assert data == b"x"
