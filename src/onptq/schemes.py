"""Number formats of a quantized linear: W4A16, W8A8, W4A8, W4A6, any WbAb, `-g128`, `-asym`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onptq.errors import OnPTQError

PAPER_SCHEMES = ("W4A16", "W8A8", "W4A8", "W4A6")
UNQUANTIZED_BITS = 16  # activations of a weight-only scheme stay in the model's own dtype

_PATTERN = re.compile(r"W(\d+)A(\d+)(?:-g(\d+))?(-asym)?", re.IGNORECASE)


@dataclass(frozen=True)
class Scheme:
    """Integer weights, per output row or per group of input columns; integer activations, dynamic and per token."""

    weight_bits: int
    activation_bits: int = UNQUANTIZED_BITS
    group_size: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        for side, bits in (("weight", self.weight_bits), ("activation", self.activation_bits)):
            if not (2 <= bits <= 8 or bits == UNQUANTIZED_BITS):
                raise OnPTQError(f"{side} bits must be 2 to 8, or {UNQUANTIZED_BITS} for none; got {bits}")
        if self.weight_bits == UNQUANTIZED_BITS and (self.group_size is not None or not self.symmetric):
            raise OnPTQError("groups and asymmetric weights need quantized weights (2 to 8 bits), got 16")
        if self.group_size is not None and self.group_size < 1:
            raise OnPTQError(f"group size must be positive, got {self.group_size}")
        if self.quantizes_activations and not self.symmetric:
            raise OnPTQError(f"asymmetric weights are for weight-only schemes (A16), got A{self.activation_bits}")

    @classmethod
    def parse(cls, text: str) -> Scheme:
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise OnPTQError(
                f"unknown scheme {text!r}: expected one of {', '.join(PAPER_SCHEMES)}, any other WbAb with 2 to 8 "
                "bits, with -gN for groups of N columns and, for weight-only schemes, -asym, e.g. W4A16-g128-asym"
            )
        weight_bits, activation_bits, group_size, asymmetric = match.groups()
        return cls(int(weight_bits), int(activation_bits), int(group_size) if group_size else None, not asymmetric)

    @property
    def quantizes_weights(self) -> bool:
        return self.weight_bits != UNQUANTIZED_BITS

    @property
    def quantizes_activations(self) -> bool:
        return self.activation_bits != UNQUANTIZED_BITS

    @property
    def multiplies_integers(self) -> bool:
        """Whether a linear is one product of integers, scaled per row and per token."""
        return self.quantizes_weights and self.quantizes_activations and self.group_size is None

    @property
    def simulated(self) -> bool:
        """Whether no serving kernel exists, so that only transformers can run the checkpoint, as a simulation."""
        return str(Scheme(self.weight_bits, self.activation_bits)) not in {"W4A16", "W8A16", "W8A8", "W4A8"}

    def __str__(self) -> str:
        groups = f"-g{self.group_size}" if self.group_size else ""
        return f"W{self.weight_bits}A{self.activation_bits}{groups}{'' if self.symmetric else '-asym'}"
