"""Number formats of a quantized linear: integers (W4A16, W8A8, any `WbAb`, `-g128`, `-asym`), and floats by their names.

A scheme is data: the grids of weights and activations, what shares a scale, and how scales are stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from onptq.errors import OnPTQError

PAPER_SCHEMES = ("W4A16", "W8A8", "W4A8", "W4A6")
UNQUANTIZED_BITS = 16  # activations of a weight-only scheme stay in the model's own dtype

CACHE = "+kv8"  # the KV cache in E4M3, one static scale for a layer's keys and one for its values
_PATTERN = re.compile(r"W(\d+)A(\d+)(?:-g(\d+))?(-asym)?", re.IGNORECASE)


@dataclass(frozen=True)
class Floats:
    """A grid of floating-point numbers of few bits, without infinities."""

    name: str
    bits: int
    mantissa: int  # bits of it
    least: int  # exponent of the smallest normal number
    largest: float

    @property
    def power(self) -> float:
        """The largest power of two."""
        return math.ldexp(1.0, math.frexp(self.largest)[1] - 1)


E4M3 = Floats("E4M3", bits=8, mantissa=3, least=-6, largest=448.0)
E2M1 = Floats("E2M1", bits=4, mantissa=1, least=0, largest=6.0)
Grid = int | Floats  # integers of so many bits, or floats

# dtype: that of the checkpoint's other tensors. E4M3: floats of 8 bits, under one scale for the whole tensor. E8M0: powers
# of two.
ScaleType = Literal["dtype", "E4M3", "E8M0"]


@dataclass(frozen=True)
class Scheme:
    """Weights with a scale per output row, per group of input columns or per block; activations with dynamic scales, per
    token or per group of channels. Integers, unless `weight_floats` or `activation_floats` say otherwise."""

    weight_bits: int
    activation_bits: int = UNQUANTIZED_BITS
    group_size: int | None = None  # input columns that share a scale
    symmetric: bool = True
    weight_floats: Floats | None = None
    activation_floats: Floats | None = None
    block_rows: int = 1  # output rows that share a scale
    activation_group: int | None = None  # channels that share a scale; None: all of a token's
    scales: ScaleType = "dtype"
    cache_floats: Floats | None = None  # of keys and values in the cache

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
        linears, plus, rest = text.strip().partition("+")
        cache = E4M3 if f"{plus}{rest}".lower() == CACHE else None
        named = {name.lower(): scheme for name, scheme in NAMED.items()}.get(linears.lower())
        match = _PATTERN.fullmatch(linears)
        if (named is None and match is None) or (plus and cache is None):
            raise OnPTQError(
                f"unknown scheme {text!r}: expected one of {', '.join((*PAPER_SCHEMES, *NAMED))}, any other WbAb with "
                "2 to 8 bits, with -gN for groups of N columns and, for weight-only schemes, -asym, e.g. W4A16-g128-asym; "
                f"each with {CACHE} for a KV cache of 8 bits"
            )
        if named is not None:
            return replace(named, cache_floats=cache)
        assert match is not None
        weight_bits, activation_bits, group_size, asymmetric = match.groups()
        return cls(
            int(weight_bits),
            int(activation_bits),
            int(group_size) if group_size else None,
            not asymmetric,
            cache_floats=cache,
        )

    @property
    def of_linears(self) -> Scheme:
        """The scheme without its KV cache."""
        return replace(self, cache_floats=None)

    @property
    def quantizes_cache(self) -> bool:
        return self.cache_floats is not None

    @property
    def quantizes_weights(self) -> bool:
        return self.weight_bits != UNQUANTIZED_BITS

    @property
    def quantizes_activations(self) -> bool:
        return self.activation_bits != UNQUANTIZED_BITS

    @property
    def weight_grid(self) -> Grid:
        return self.weight_floats or self.weight_bits

    @property
    def activation_grid(self) -> Grid:
        return self.activation_floats or self.activation_bits

    @property
    def scales_inputs(self) -> bool:
        """Whether a linear's input as a whole has a scale, which does not depend on it."""
        return self.scales == "E4M3" and self.quantizes_activations

    @property
    def of_integers(self) -> bool:
        """Whether everything that is quantized becomes integers."""
        return self.weight_floats is None and self.activation_floats is None

    @property
    def multiplies_integers(self) -> bool:
        """Whether a linear is one product of integers, scaled per row and per token."""
        return self.of_integers and self.quantizes_weights and self.quantizes_activations and self.group_size is None

    @property
    def kind(self) -> str:
        """Its name without KV cache, and without groups and zero points of integers, as servers know it."""
        linears = self.of_linears
        return str(linears) if linears in _NAMES else str(replace(linears, group_size=None, symmetric=True))

    @property
    def simulated(self) -> bool:
        """Whether no serving kernel exists, so that only transformers can run the checkpoint, as a simulation."""
        return self.of_linears not in _NAMES and self.kind not in {"W4A16", "W8A16", "W8A8", "W4A8"}

    @property
    def bits_per_weight(self) -> float:
        """Bits of a stored weight and of its share of a group's or block's scales; scales of whole rows are left out."""
        if self.group_size is None:
            return self.weight_bits
        scale = 16 if self.scales == "dtype" else 8
        zero = 0 if self.symmetric else self.weight_bits
        return self.weight_bits + (scale + zero) / (self.group_size * self.block_rows)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of a weight's scales. Rows of the last block may be missing, columns of the last group may not."""
        return math.ceil(rows / self.block_rows), columns // self.group_size if self.group_size else 1

    def __str__(self) -> str:
        cache = CACHE if self.quantizes_cache else ""
        if self.of_linears in _NAMES:
            return _NAMES[self.of_linears] + cache
        groups = f"-g{self.group_size}" if self.group_size else ""
        return f"W{self.weight_bits}A{self.activation_bits}{groups}{'' if self.symmetric else '-asym'}{cache}"


NAMED: Mapping[str, Scheme] = MappingProxyType(
    {
        "FP8": Scheme(8, 8, weight_floats=E4M3, activation_floats=E4M3),
        "FP8-block": Scheme(
            8, 8, group_size=128, weight_floats=E4M3, activation_floats=E4M3, block_rows=128, activation_group=128
        ),
        "W4AFP8": Scheme(4, 8, group_size=128, activation_floats=E4M3),
        "NVFP4A16": Scheme(4, group_size=16, weight_floats=E2M1, scales="E4M3"),
        "NVFP4": Scheme(
            4, 4, group_size=16, weight_floats=E2M1, activation_floats=E2M1, activation_group=16, scales="E4M3"
        ),
        "MXFP4": Scheme(
            4, 4, group_size=32, weight_floats=E2M1, activation_floats=E2M1, activation_group=32, scales="E8M0"
        ),
        "MXFP8": Scheme(
            8, 8, group_size=32, weight_floats=E4M3, activation_floats=E4M3, activation_group=32, scales="E8M0"
        ),
    }
)
_NAMES = {scheme: name for name, scheme in NAMED.items()}
