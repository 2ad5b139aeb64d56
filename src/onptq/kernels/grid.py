"""The integer grid that kernels and their plain twins share. Imports no Triton."""

from __future__ import annotations

# A symmetric grid reaches half a scale beyond its last positive code. A row's largest weight would lie on the tie
# between two codes, where the last bit of a product decides. This factor moves it just inside.
OFF_TIE = 1 + 2**-10


def code_range(bits: int) -> tuple[int, int]:
    """The smallest and the largest signed code."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
