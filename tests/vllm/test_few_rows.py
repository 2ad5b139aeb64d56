"""GEMMs of a few rows: launches to try, the kernel for each number of rows, and on a GPU the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("onptq_vllm", reason="needs the package onptq-vllm: pip install ./packages/onptq-vllm")

from onptq_vllm.schedules import decoding, few_rows
from onptq_vllm.schedules.few_rows import MOST, is_launch, launches, plain_gemm, source
from onptq_vllm.schedules.table import END, Gemm, TunedSchedule

LAUNCH = {"kernel": "few_rows", "warps": 8, "cluster": 4, "depth": 2}
GATE_UP, DOWN = Gemm(37888, 3584, "float16", "uint4"), Gemm(3584, 18944, "bfloat16", "uint4", 128)
PLAIN = {
    "shape_n": 64,
    "shape_k": 32,
    "pad_shape_n": 0,
    "pad_shape_k": 0,
    "num_experts": 0,
    "a_dtype": "float16",
    "b_dtype": "uint4",
    "c_dtype": "float16",
    "bs_dtype": "float16",
    "weight_scale_group_size": 0,
    "weight_scale_type": "channel",
    "has_zero_point": False,
    "use_int_weight_scale": False,
}


@pytest.mark.parametrize("gemm", [GATE_UP, DOWN], ids=str)
def test_a_wide_gemm_has_many_launches(gemm: Gemm) -> None:
    tried = list(launches(gemm, MOST))
    assert len({json.dumps(one) for one in tried}) == len(tried) > 30
    assert all(is_launch(one) for one in tried)
    assert not is_launch({"block_shape": [8, 128, 64]})


def test_no_launch_has_idle_warps() -> None:
    """Of 16 iterations a warp of four has four, and at most twice as many loads in flight."""
    tried = {(one["warps"], one["cluster"], one["depth"]) for one in launches(Gemm(64, 256, "float16", "uint4"), 1)}
    few_warps = {(4, 1, 2), (4, 1, 3), (4, 1, 4), (4, 1, 8), (4, 2, 2), (4, 2, 3), (4, 2, 4), (4, 4, 2)}
    assert tried == few_warps | {(8, 1, 2), (8, 1, 3), (8, 1, 4), (8, 2, 2), (16, 1, 2)}


@pytest.mark.parametrize(
    "gemm",
    [
        Gemm(37888, 3584, "int8", "uint4"),
        Gemm(37888, 3584, "float16", "uint8"),
        Gemm(37888, 3584, "float16", "uint4", 8),
        Gemm(37889, 3584, "float16", "uint4"),
        Gemm(37888, 3592, "float16", "uint4"),
    ],
    ids=str,
)
def test_other_gemms_have_no_launch(gemm: Gemm) -> None:
    assert not list(launches(gemm, 1))


def test_many_rows_have_no_launch() -> None:
    assert not list(launches(GATE_UP, MOST + 1))


def test_the_source_begins_with_the_sizes() -> None:
    text = source(DOWN, LAUNCH)
    assert text.startswith(
        "#define N 3584\n#define K 18944\n#define GROUP 128\n#define WARPS 8\n#define CLUSTER 4\n#define DEPTH 2\n"
    )
    assert "#define BFLOAT16 1\n" in text
    assert "#define BFLOAT16" not in source(GATE_UP, LAUNCH)
    assert 'extern "C" __global__' in text


def test_only_layers_that_the_kernel_supports_are_taken() -> None:
    assert plain_gemm(json.dumps(PLAIN)) == Gemm(64, 32, "float16", "uint4")
    assert plain_gemm(json.dumps(PLAIN | {"has_bias": True})) is not None
    groups = PLAIN | {"weight_scale_type": "group", "weight_scale_group_size": 16}
    assert plain_gemm(json.dumps(groups)) == Gemm(64, 32, "float16", "uint4", 16)
    for changed in (
        {"pad_shape_n": 64},
        {"pad_shape_k": 16},
        {"num_experts": 8},
        {"has_zero_point": True},
        {"a_dtype": "int8"},
        {"bs_dtype": "float8e8m0"},
        {"weight_scale_type": "tensor"},
        {"use_int_weight_scale": True},
    ):
        assert plain_gemm(json.dumps(PLAIN | changed)) is None


@dataclass
class Humming:
    """A stand-in for `humming.ops`: a plain GEMM; `calls` records the kernel and the rows of each."""

    calls: list[tuple[str, int]]

    def humming_gemm(
        self,
        *,
        layer_config: str,
        inputs: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Any = None,
        **others: Any,
    ) -> Tensor:
        self.calls.append(("humming", len(inputs)))
        return _gemm(inputs, weight, weight_scale, bias)


def _gemm(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    result = x @ weight.T * scales
    return result if bias is None else result + bias


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[tuple[str, int]]]:
    """humming's operations, with launches for up to two rows and for five and six rows of one GEMM."""
    calls: list[tuple[str, int]] = []
    package, module = ModuleType("humming"), ModuleType("humming.ops")
    module.humming_gemm = Humming(calls).humming_gemm  # type: ignore[attr-defined]
    package.ops = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming", package)
    monkeypatch.setitem(sys.modules, "humming.ops", module)

    def of(gemm: Gemm, launch: Any) -> Callable[..., Tensor]:
        assert (gemm, launch) == (Gemm(64, 32, "float16", "uint4"), LAUNCH)

        def few(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
            calls.append(("few rows", len(x)))
            return _gemm(x, codes, scales, bias)

        return few

    monkeypatch.setattr(few_rows.FewRows, "of", of)
    tuned = [
        TunedSchedule(0, 2, LAUNCH, {"1": (2.0, 1.0)}),
        TunedSchedule(4, 6, LAUNCH, {"6": (2.0, 1.0)}),
        TunedSchedule(6, END, {"block_shape": [8, 128, 64]}, {"8": (2.0, 1.0)}),
    ]
    for _ in range(2):  # vLLM may call it more than once
        decoding.register(lambda: {"64x32 float16xuint4": tuned})
    return module, calls


def _call(ops: ModuleType, x: Tensor, layer: str, **others: Any) -> Tensor:
    weight = torch.linspace(-1, 1, 64 * 32).view(64, 32)
    named = {"layer_config": layer, "inputs": x, "weight": weight, "bias": torch.ones(64)}
    empty = {"zero_point": None, "outputs": None, "top_k": 1, "valid_shape_m": 0}
    result: Tensor = ops.humming_gemm(**named, weight_scale=torch.full((1, 64), 0.5), locks=None, **empty | others)
    return result


@pytest.mark.parametrize("compiled", [False, True])
def test_few_rows_go_to_the_kernel_and_more_to_humming(ops: Any, compiled: bool) -> None:
    module, calls = ops
    call = torch.compile(_call, fullgraph=True, backend="aot_eager", dynamic=True) if compiled else _call
    for rows, by in [
        (1, "few rows"),
        (2, "few rows"),
        (3, "humming"),
        (4, "humming"),
        (6, "few rows"),
        (17, "humming"),
    ]:
        x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
        result = call(module, x, json.dumps(PLAIN))
        weight = torch.linspace(-1, 1, 64 * 32).view(64, 32)
        torch.testing.assert_close(result, x @ weight.T * 0.5 + 1)
        assert calls[-1] == (by, rows)
    torch.compiler.reset()


def test_layers_and_calls_that_the_kernel_does_not_support_stay_with_humming(ops: Any) -> None:
    module, calls = ops
    x = torch.ones(1, 32)
    _call(module, x, json.dumps(PLAIN | {"has_zero_point": True}))
    _call(module, x, json.dumps(PLAIN), zero_point=torch.zeros(1))
    _call(module, x, json.dumps(PLAIN), outputs=torch.zeros(1, 64))
    _call(module, x, json.dumps(PLAIN), tuning_config="{}")
    _call(module, x, json.dumps(PLAIN), compute_config=json.dumps({"use_batch_invariant": True}))
    assert calls == [("humming", 1)] * 5
    _call(module, x, json.dumps(PLAIN), compute_config=json.dumps({"use_batch_invariant": False}))
    assert calls[-1] == ("few rows", 1)


def test_an_unsupported_humming_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    decoding.register(dict)
    assert "few_rows.cu is not used: it does not fit this version of humming" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("humming") is None, reason="needs a GPU and humming")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(256, 384, 0), (1024, 4224, 0), (512, 1152, 128)])
def test_the_kernel_is_exact_but_for_its_rounding(dtype: torch.dtype, outputs: int, inputs: int, group: int) -> None:
    """Against float64, rounded once; with groups every weight is rounded too."""
    from onptq_vllm.schedules.humming import HummingGemm

    torch.manual_seed(0)
    bench = HummingGemm(outputs, inputs, 4, 16, group, dtype)
    tried = list(launches(bench.gemm, 1))
    assert bench.build(tried) == tried
    for rows in (1, 3, MOST):
        x = bench.inputs(rows)[0]
        weight = (bench.codes.double() - 8).view(outputs, bench.scale.shape[1], -1) * bench.scale.double()[..., None]
        exact = x.double() @ weight.flatten(1).T + bench.bias.double()
        rounded = torch.finfo(dtype).eps * (x.double().abs() @ weight.flatten(1).abs().T if group else exact.abs())
        for launch in tried:
            kernel = few_rows.FewRows.of(bench.gemm, launch)
            result = kernel(x, bench.weights[0], bench.layer.weight_scale, bench.layer.bias)
            assert bool(((result.double() - exact).abs() <= rounded + 1e-4).all())
