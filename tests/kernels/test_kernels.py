"""The choice between kernels and their plain twins, and that both agree, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from onptq import kernels
from onptq.errors import OnPTQError

CHECKS = ("checks_rows", "checks_weights", "checks_decisions", "checks_cycle")

if torch.cuda.is_available():
    pytest.register_assert_rewrite("kernel_support", *CHECKS)
    from checks_cycle import *  # noqa: F403
    from checks_decisions import *  # noqa: F403
    from checks_rows import *  # noqa: F403
    from checks_weights import *  # noqa: F403
else:

    @pytest.mark.slow
    @pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
    def test_kernels_agree_with_their_twins_in_tritons_interpreter() -> None:
        """In a process of its own, since Triton chooses the interpreter at import."""
        folder = Path(__file__).parent
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(f"{name}.py" for name in CHECKS)]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout
        assert "skipped" not in done.stdout


@pytest.mark.slow
def test_on_a_cpu_the_twins_compute_and_triton_is_not_imported() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from onptq.cycle import compare, objective
from onptq.quantizer.integers import quantize_rows
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.weights import fake_quantize_weight
from onptq.schemes import Scheme
x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
fake_quantize_activations(x, 8).sum().backward()
fake_quantize_weight(x, None, None, torch.zeros(4, 1), None, Scheme(4), torch.float32, torch.float32).sum().backward()
quantize_rows(x.detach(), 8)
with_triton = [name for name, module in sys.modules.items() if name.startswith("onptq.") and hasattr(module, "triton")]
assert sys.modules["triton"] is None and not with_triton, with_triton
"""
    environment = {name: value for name, value in os.environ.items() if name != kernels.SWITCH}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("choice", "fits"),
    [(None, False), ("auto", False), ("off", False), ("on", True)],
    ids=["unset", "auto", "off", "on"],
)
def test_cpu_tensors_go_to_kernels_only_if_switched_on(
    monkeypatch: pytest.MonkeyPatch, choice: str | None, fits: bool
) -> None:
    monkeypatch.setattr(kernels, "_triton_is_installed", lambda: True)
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    if choice is not None:
        monkeypatch.setenv(kernels.SWITCH, choice)
    assert kernels.fit(torch.ones(2), None) == fits
    assert not kernels.fit(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not kernels.fit(torch.ones(2), torch.ones(0))
    assert not kernels.fit(torch.ones(2, dtype=torch.bfloat16), dtypes={torch.float32})


def test_a_wrong_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SWITCH, "yes")
    with pytest.raises(OnPTQError, match="ONPTQ_KERNELS='yes' is none of auto, off, on"):
        kernels.fit(torch.ones(2))
    monkeypatch.setenv(kernels.SWITCH, "on")
    monkeypatch.setattr(kernels, "_triton_is_installed", lambda: False)
    with pytest.raises(OnPTQError, match="needs Triton"):
        kernels.fit(torch.ones(2))
