"""Every kernel compiles for its GPUs with the shapes of a 7B model, for which Triton needs no GPU."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from onptq import kernels
from onptq.methods.signround import signed_step
from onptq.quantizer.norms import rms_norm
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.weights import dequantize, fake_quantize_weight
from onptq.schemes import Scheme

triton = pytest.importorskip("triton")

WIDTH, FFN = 3584, 18944
STATES, OUTPUTS, VOCABULARY = 3, 4, 2048  # larger ones give the same code


class Target:
    """A stand-in for Triton's driver of a GPU with that compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches compiled kernels by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@pytest.fixture
def compiled(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """The names of kernels that were compiled instead of launched."""
    names: set[str] = set()
    function = importlib.import_module("triton.runtime.jit").JITFunction
    run = function.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"]
        names.add(self.__name__)

    monkeypatch.setenv(kernels.SWITCH, "on")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(function, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", Target(capability))
    return names


def launched(package: ModuleType) -> set[str]:
    """All kernels of the package: compiled functions of its modules that no other one calls."""
    modules = [
        importlib.import_module(f"{package.__name__}.{one.name}") for one in pkgutil.iter_modules(package.__path__)
    ]
    function = importlib.import_module("triton.runtime.jit").JITFunction
    results = {
        one.__name__: one.src
        for module in modules
        for one in vars(module).values()
        if isinstance(one, function) and one.__module__ == module.__name__
    }
    called = {
        name for name in results for other, text in results.items() if other != name and re.search(rf"\b{name}\(", text)
    }
    return set(results) - called


TARGETS = pytest.mark.parametrize(
    ("capability", "dtype"), [(80, torch.bfloat16), (90, torch.bfloat16), (90, torch.float32)], ids=str
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@TARGETS
def test_every_kernel_compiles(compiled: set[str], dtype: torch.dtype) -> None:
    def rows(count: int, width: int) -> torch.Tensor:
        return torch.zeros(count, width, dtype=dtype)

    x = rows(STATES, WIDTH).requires_grad_()
    rms_norm(fake_quantize_activations(x, 8), rows(1, WIDTH)[0].requires_grad_(), 1e-6).sum().backward()
    rms_norm(x, rows(1, WIDTH)[0], 1e-6).sum().backward()
    for name in ("W4A16", "W4A16-g128-asym"):
        scheme = Scheme.parse(name)
        groups = FFN // scheme.group_size if scheme.group_size else 1
        shapes = ((FFN,), (OUTPUTS,), (OUTPUTS, groups), (OUTPUTS, FFN))
        theta = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        weight = rows(OUTPUTS, FFN)
        log_in, log_out, ratio, offset = theta
        fake_quantize_weight(weight, log_in, log_out, ratio, offset, scheme, torch.bfloat16, dtype).sum().backward()
        ratio, offset = (one.detach().requires_grad_() for one in (ratio, offset))
        fake_quantize_weight(weight, None, None, ratio, offset, scheme, torch.bfloat16, dtype).sum().backward()
        scale = torch.ones(OUTPUTS, groups)
        zero = None if scheme.symmetric else scale.to(torch.int8)
        dequantize(weight.to(torch.int8), scale, zero, dtype)
    signed_step(torch.zeros(OUTPUTS, FFN), torch.zeros(OUTPUTS, FFN), 0.1, -0.5, 0.5)

    from onptq.kernels.codes import token_codes
    from onptq.kernels.decisions import decide_states, kl_of_states
    from onptq.kernels.products import scaled_rows

    token_codes(rows(STATES, WIDTH))
    for count, bias in ((STATES, None), (100, rows(1, FFN)[0]), (1000, None), (2000, rows(1, FFN)[0])):
        codes, scale = torch.zeros(count, WIDTH, dtype=torch.int8), torch.ones(count, 1)
        scaled_rows(codes, scale, torch.zeros(FFN, WIDTH, dtype=torch.int8), rows(1, FFN)[0], bias, dtype)
    head = rows(VOCABULARY, WIDTH)
    for bias in (None, rows(1, VOCABULARY)[0]):
        decide_states(x, x, head, bias)
        kl_of_states(rows(STATES, WIDTH), x, head, bias).sum().backward()
    assert compiled == launched(kernels)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@TARGETS
def test_every_serving_kernel_compiles(compiled: set[str], dtype: torch.dtype) -> None:
    serving = pytest.importorskip("onptq_vllm.kernels", reason="needs the package onptq-vllm")
    gated, normed = (importlib.import_module(f"onptq_vllm.kernels.{name}") for name in ("gated", "normed"))
    gated.gated_codes(torch.zeros(STATES, 2 * FFN, dtype=dtype))
    normed.normed_codes(
        *(torch.zeros(shape, dtype=dtype) for shape in ((STATES, WIDTH), (STATES, WIDTH), (WIDTH,))), 1e-6
    )
    assert compiled == launched(serving)
