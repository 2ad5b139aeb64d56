"""Triton kernels. Each has a plain PyTorch twin, which defines it and runs wherever there is no GPU.

ONPTQ_KERNELS chooses: `auto` (the default) uses kernels on CUDA tensors where Triton is installed, `off` plain PyTorch,
`on` kernels on any device, for Triton's interpreter. Triton is imported when a kernel runs.
"""

from __future__ import annotations

import os
from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from onptq.errors import OnPTQError

SWITCH = "ONPTQ_KERNELS"
CHOICES = ("auto", "off", "on")
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def fit(*tensors: Tensor | None, dtypes: Set[torch.dtype] = DTYPES) -> bool:
    """Whether kernels take these tensors; `None` stands for an absent one."""
    choice = os.environ.get(SWITCH, "auto")
    if choice not in CHOICES:
        raise OnPTQError(f"{SWITCH}={choice!r} is none of {', '.join(CHOICES)}")
    present = [tensor for tensor in tensors if tensor is not None]
    if choice == "off" or any(not tensor.numel() or tensor.dtype not in dtypes for tensor in present):
        return False
    if choice == "on":
        if not _triton_is_installed():
            raise OnPTQError(f"{SWITCH}=on needs Triton, which is not installed; {SWITCH}=auto does without it")
        return True
    return all(tensor.is_cuda for tensor in present) and _triton_is_installed()


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which the tensor's GPU is the current one, where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None
