"""Products of a few rows: which launches are tried, who multiplies how many rows in a server, and on a GPU what comes out."""

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
from onptq_vllm.schedules.few_rows import MOST, is_launch, launches, plain_product, source
from onptq_vllm.schedules.table import END, Found, Product

LAUNCH = {"kernel": "few_rows", "warps": 8, "cluster": 4, "depth": 2}
GATE_UP, DOWN = Product(37888, 3584, "float16", "uint4"), Product(3584, 18944, "bfloat16", "uint4", 128)
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


@pytest.mark.parametrize("product", [GATE_UP, DOWN], ids=str)
def test_a_wide_gemm_has_many_launches(product: Product) -> None:
    found = list(launches(product, MOST))
    assert len({json.dumps(one) for one in found}) == len(found) > 30
    assert all(is_launch(one) for one in found)
    assert not is_launch({"block_shape": [8, 128, 64]})


def test_no_launch_has_idle_warps() -> None:
    """Of 16 steps a warp of four has four, and may keep twice as many on their way."""
    found = {(one["warps"], one["cluster"], one["depth"]) for one in launches(Product(64, 256, "float16", "uint4"), 1)}
    few_warps = {(4, 1, 2), (4, 1, 3), (4, 1, 4), (4, 1, 8), (4, 2, 2), (4, 2, 3), (4, 2, 4), (4, 4, 2)}
    assert found == few_warps | {(8, 1, 2), (8, 1, 3), (8, 1, 4), (8, 2, 2), (16, 1, 2)}


@pytest.mark.parametrize(
    "product",
    [
        Product(37888, 3584, "int8", "uint4"),
        Product(37888, 3584, "float16", "uint8"),
        Product(37888, 3584, "float16", "uint4", 8),
        Product(37889, 3584, "float16", "uint4"),
        Product(37888, 3592, "float16", "uint4"),
    ],
    ids=str,
)
def test_other_products_have_no_launch(product: Product) -> None:
    assert not list(launches(product, 1))


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


def test_only_layers_without_more_than_the_kernel_knows_are_taken() -> None:
    assert plain_product(json.dumps(PLAIN)) == Product(64, 32, "float16", "uint4")
    assert plain_product(json.dumps(PLAIN | {"has_bias": True})) is not None
    groups = PLAIN | {"weight_scale_type": "group", "weight_scale_group_size": 16}
    assert plain_product(json.dumps(groups)) == Product(64, 32, "float16", "uint4", 16)
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
        assert plain_product(json.dumps(PLAIN | changed)) is None


@dataclass
class Humming:
    """What stands for `humming.ops`: a plain product, and who was asked for how many rows."""

    asked: list[tuple[str, int]]

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
        self.asked.append(("humming", len(inputs)))
        return _product(inputs, weight, weight_scale, bias)


def _product(x: Tensor, weight: Tensor, steps: Tensor, bias: Tensor | None) -> Tensor:
    found = x @ weight.T * steps
    return found if bias is None else found + bias


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[tuple[str, int]]]:
    """humming's operations with launches for up to two rows, and for five and six, of one GEMM in their place."""
    asked: list[tuple[str, int]] = []
    package, module = ModuleType("humming"), ModuleType("humming.ops")
    module.humming_gemm = Humming(asked).humming_gemm  # type: ignore[attr-defined]
    package.ops = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming", package)
    monkeypatch.setitem(sys.modules, "humming.ops", module)

    def of(product: Product, launch: Any) -> Callable[..., Tensor]:
        assert (product, launch) == (Product(64, 32, "float16", "uint4"), LAUNCH)

        def few(x: Tensor, codes: Tensor, steps: Tensor, bias: Tensor | None) -> Tensor:
            asked.append(("few rows", len(x)))
            return _product(x, codes, steps, bias)

        return few

    monkeypatch.setattr(few_rows.FewRows, "of", of)
    found = [
        Found(0, 2, LAUNCH, {"1": (2.0, 1.0)}),
        Found(4, 6, LAUNCH, {"6": (2.0, 1.0)}),
        Found(6, END, {"block_shape": [8, 128, 64]}, {"8": (2.0, 1.0)}),
    ]
    for _ in range(2):  # vLLM may call it more than once
        decoding.register(lambda: {"64x32 float16xuint4": found})
    return module, asked


def _call(ops: ModuleType, x: Tensor, layer: str, **others: Any) -> Tensor:
    weight = torch.linspace(-1, 1, 64 * 32).view(64, 32)
    named = {"layer_config": layer, "inputs": x, "weight": weight, "bias": torch.ones(64)}
    empty = {"zero_point": None, "outputs": None, "top_k": 1, "valid_shape_m": 0}
    found: Tensor = ops.humming_gemm(**named, weight_scale=torch.full((1, 64), 0.5), locks=None, **empty | others)
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_few_rows_go_to_the_kernel_and_more_to_humming(ops: Any, compiled: bool) -> None:
    module, asked = ops
    call = torch.compile(_call, fullgraph=True, backend="aot_eager", dynamic=True) if compiled else _call
    for rows, asks in [
        (1, "few rows"),
        (2, "few rows"),
        (3, "humming"),
        (4, "humming"),
        (6, "few rows"),
        (17, "humming"),
    ]:
        x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
        found = call(module, x, json.dumps(PLAIN))
        weight = torch.linspace(-1, 1, 64 * 32).view(64, 32)
        torch.testing.assert_close(found, x @ weight.T * 0.5 + 1)
        assert asked[-1] == (asks, rows)
    torch.compiler.reset()


def test_what_the_kernel_does_not_know_stays_with_humming(ops: Any) -> None:
    module, asked = ops
    x = torch.ones(1, 32)
    _call(module, x, json.dumps(PLAIN | {"has_zero_point": True}))
    _call(module, x, json.dumps(PLAIN), zero_point=torch.zeros(1))
    _call(module, x, json.dumps(PLAIN), outputs=torch.zeros(1, 64))
    _call(module, x, json.dumps(PLAIN), tuning_config="{}")
    _call(module, x, json.dumps(PLAIN), compute_config=json.dumps({"use_batch_invariant": True}))
    assert asked == [("humming", 1)] * 5
    _call(module, x, json.dumps(PLAIN), compute_config=json.dumps({"use_batch_invariant": False}))
    assert asked[-1] == ("few rows", 1)


def test_another_humming_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    decoding.register(dict)
    assert "few rows are multiplied as many are" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("humming") is None, reason="needs a GPU and humming")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(256, 384, 0), (1024, 4224, 0), (512, 1152, 128)])
def test_the_kernel_multiplies(dtype: torch.dtype, outputs: int, inputs: int, group: int) -> None:
    """x times codes less 8 in float64, by steps and biases: rounded once, or, in groups, once for each weight as well."""
    from onptq_vllm.schedules.humming import HummingProduct

    torch.manual_seed(0)
    bench = HummingProduct(outputs, inputs, 4, 16, group, dtype)
    tried = list(launches(bench.product, 1))
    assert bench.build(tried) == tried
    for rows in (1, 3, MOST):
        x = bench.inputs(rows)[0]
        weight = (bench.codes.double() - 8).view(outputs, bench.step.shape[1], -1) * bench.step.double()[..., None]
        exact = x.double() @ weight.flatten(1).T + bench.bias.double()
        rounded = torch.finfo(dtype).eps * (x.double().abs() @ weight.flatten(1).abs().T if group else exact.abs())
        for launch in tried:
            kernel = few_rows.FewRows.of(bench.product, launch)
            found = kernel(x, bench.weights[0], bench.layer.weight_scale, bench.layer.bias)
            assert bool(((found.double() - exact).abs() <= rounded + 1e-4).all())
