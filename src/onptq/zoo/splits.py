"""The four splits of the embedded tasks, which share no item."""

from __future__ import annotations

from onptq.errors import OnPTQError

SPLITS = ("train", "calibration", "held-out", "test")


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise OnPTQError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
