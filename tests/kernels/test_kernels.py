"""Who computes, kernels or their plain twins; and that both say the same, whether or not a GPU is here."""

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

CHECKS = Path(__file__).with_name("kernel_checks.py")

if torch.cuda.is_available():
    pytest.register_assert_rewrite("kernel_checks")
    from kernel_checks import *  # noqa: F403
else:

    @pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
    def test_kernels_agree_with_their_twins_in_tritons_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CHECKS)]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, cwd=CHECKS.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout
        assert "skipped" not in done.stdout


def test_on_the_cpu_the_plain_functions_compute_and_triton_is_never_imported() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from onptq.cycle import compare, objective
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.weights import fake_quantize_weight
from onptq.schemes import Scheme
x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
fake_quantize_activations(x, 8).sum().backward()
fake_quantize_weight(x, None, None, torch.zeros(4, 1), None, Scheme(4), torch.float32, torch.float32).sum().backward()
assert {name for name in sys.modules if name.startswith("onptq.kernels")} == {"onptq.kernels"}
"""
    environment = {name: value for name, value in os.environ.items() if name != kernels.SWITCH}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("choice", "fits"),
    [(None, False), ("auto", False), ("off", False), ("on", True)],
    ids=["unset", "auto", "off", "on"],
)
def test_cpu_tensors_go_to_kernels_only_when_told(
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


def test_a_switch_that_cannot_be_followed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SWITCH, "yes")
    with pytest.raises(OnPTQError, match="ONPTQ_KERNELS='yes' is none of auto, off, on"):
        kernels.fit(torch.ones(2))
    monkeypatch.setenv(kernels.SWITCH, "on")
    monkeypatch.setattr(kernels, "_triton_is_installed", lambda: False)
    with pytest.raises(OnPTQError, match="needs Triton"):
        kernels.fit(torch.ones(2))
