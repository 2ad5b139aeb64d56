"""The kernels of serving, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("onptq_vllm", reason="needs the package onptq-vllm: pip install ./packages/onptq-vllm")
pytest.importorskip("triton")

CHECKS = Path(__file__).with_name("serving_kernel_checks.py")

if torch.cuda.is_available():
    pytest.register_assert_rewrite("kernel_support", "serving_kernel_checks")
    from serving_kernel_checks import *  # noqa: F403
else:

    @pytest.mark.slow
    def test_serving_kernels_agree_with_their_twins_in_tritons_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CHECKS)]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, cwd=CHECKS.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout
        assert "skipped" not in done.stdout
