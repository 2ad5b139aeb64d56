"""The measured rates: of blocks like the model's, whatever the threads do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onptq.checkpoint.source import find_source
from onptq.plan import probe
from onptq.plan.parts import Shapes, find_parts
from onptq.plan.probe import probe_rates
from onptq.plan.seconds import Pace, Rates
from onptq.schemes import Scheme

W4A8 = Scheme.parse("W4A8")
WAIT = 0.1


@pytest.fixture(scope="module")
def shapes(small: Path) -> Shapes:
    return find_parts(find_source(small), W4A8).shapes


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rates(shapes: Shapes, scheme: Scheme = W4A8, settled: bool = True) -> Rates:
    return probe_rates(shapes, scheme, "floats", settled, torch.device("cpu"), torch.float32)


def tokens(pace: Pace, count: int) -> float:
    return pace.forward + count * pace.token


@pytest.mark.parametrize("scheme", ["W4A8", "W4A16-g32-asym"])
def test_a_probe_takes_seconds_and_learning_costs_more_than_reading(shapes: Shapes, scheme: str) -> None:
    began = time.monotonic()
    measured = rates(shapes, Scheme.parse(scheme))
    assert time.monotonic() - began < 30  # of a few seconds, on a machine that may be busy
    assert tokens(measured.learning, 256) > tokens(measured.dense, 256) > 0
    assert tokens(measured.rounding, 256) > tokens(measured.dense, 256)
    assert measured.decoding == measured.quantized
    assert measured.state > 0


def test_codes_that_are_not_settled_are_learned_as_an_init_learns_them(shapes: Shapes) -> None:
    measured = rates(shapes, settled=False)
    assert measured.learning == measured.rounding


@pytest.mark.slow
def test_a_larger_block_takes_longer_in_proportion(shapes: Shapes) -> None:
    """Of blocks of more than a few million parameters a smaller one is measured."""
    sizes = {"hidden": 4096, "ffn": 16384, "query": 4096, "kv": 1024, "head_dim": 128}
    larger = replace(shapes, **sizes, block=2 * 10**8, active=2 * 10**8)
    much = replace(larger, block=4 * larger.block, active=4 * larger.active)
    one, four = rates(larger), rates(much)
    assert tokens(one.dense, 256) > 100 * tokens(rates(shapes).dense, 256)
    assert 2 < tokens(four.dense, 256) / tokens(one.dense, 256) < 8


def test_threads_that_wait_for_cores_make_no_estimate_longer(
    shapes: Shapes, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every forward waits for WAIT seconds here, as threads do on a busy machine."""
    seen: list[int] = []

    def waiting(run: Callable[..., object]) -> Callable[..., object]:
        def wait(*arguments: object) -> object:
            seen.append(torch.get_num_threads())
            time.sleep(WAIT)
            return run(*arguments)

        return wait

    for name in ("_forward", "_learn"):
        monkeypatch.setattr(probe, name, waiting(getattr(probe, name)))
    monkeypatch.setattr(probe, "REPETITIONS", 1)
    torch.set_num_threads(16)
    measured = rates(shapes)
    assert torch.get_num_threads() == 16, "the probe leaves the threads as they were"
    assert seen[:2] == [16] * 2
    assert set(seen[2:]) == {1}, "a single thread is faster, and is what the rest is measured with"
    assert measured.slowdown > 1
    for name in ("dense", "quantized", "rounding", "learning"):
        pace = getattr(measured, name)
        assert tokens(pace, probe.MANY) < WAIT / probe.BLOCKS, f"{name}: no time in which nothing is computed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("keep", ["integers", "floats", "codes", "nothing"])
def test_on_a_gpu_a_replayed_forward_is_the_fastest(shapes: Shapes, keep: str) -> None:
    device = torch.device("cuda", 0)
    measured = probe_rates(shapes, W4A8, keep, True, device, torch.bfloat16)  # type: ignore[arg-type]
    assert 0 < measured.decoding.forward < measured.quantized.forward
    assert tokens(measured.learning, 256) > tokens(measured.dense, 256) > 0
    assert measured.slowdown == 1
