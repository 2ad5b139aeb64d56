"""Which items may be learned from: four splits that share nothing."""

from __future__ import annotations

from onptq.errors import OnPTQError

SPLITS = ("train", "calibration", "held-out", "test")


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise OnPTQError(f"there is no split {split!r}; expected one of: {', '.join(SPLITS)}")
