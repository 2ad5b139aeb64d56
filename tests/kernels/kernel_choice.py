"""The switch between kernels and their plain twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from onptq import kernels


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`choose("kernels")` or `choose("twins")`: compute by them from now on. On a GPU kernels are the default."""

    def to(which: str) -> None:
        kernels_on = "auto" if torch.cuda.is_available() else "on"
        monkeypatch.setenv(kernels.SWITCH, kernels_on if which == "kernels" else "off")

    return to
