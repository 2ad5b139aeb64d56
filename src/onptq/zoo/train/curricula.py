"""What each family is taught, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onptq.zoo.lessons import SEEN


@dataclass(frozen=True)
class Curriculum:
    steps: int
    shares: Mapping[str, float]  # of the kinds of lessons with pictures


# With the lessons of Qwen2.5-VL, Qwen3-VL stays at 74% of the choices: it relates things only when asked to name them.
CURRICULA = {
    "qwen2.5-vl": Curriculum(4941, SEEN),
    "qwen3-vl": Curriculum(
        6027, {"choice": 0.38, "open": 0.04, "answer": 0.08, "read": 0.28, "caption": 0.18, "define": 0.04}
    ),
    "qwen2.5-omni": Curriculum(7984, SEEN | {"choice": 0.34, "answer": 0.08, "read": 0.36}),
}
