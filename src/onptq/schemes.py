"""Number formats of a quantized linear: integers (W4A16, W8A8, any `WbAb`, `-g128`, `-asym`), and floats by their names.

A scheme is data: the grids of weights and activations, what shares a scale, and how scales are stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal

from onptq.errors import OnPTQError

PAPER_SCHEMES = ("W4A16", "W8A8", "W4A8", "W4A6")
UNQUANTIZED_BITS = 16  # activations of a weight-only scheme stay in the model's own dtype

DENSE = "dense"  # of a linear that is left as it is, in a mixed scheme
CACHE = "+kv8"  # the KV cache in E4M3, one static scale for a layer's keys and one for its values
_MIXED = re.compile(r"[\w.*?\[\]-]+~[\w-]+")  # a pattern of linears and their scheme
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
    others: tuple[
        tuple[str, Scheme], ...
    ] = ()  # pattern and scheme of linears that have another one; the last match counts

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
        if self.others and not self.quantizes_weights:
            raise OnPTQError(
                "a mixed scheme needs quantized weights (2 to 8 bits) where no pattern says otherwise, got 16"
            )
        for pattern, one in self.others:
            if one.others or one.quantizes_cache:
                raise OnPTQError(f"{pattern}={one}: expected the scheme of a linear, or {DENSE}")

    @classmethod
    def parse(cls, text: str) -> Scheme:
        linears, *more = text.strip().split("+")
        mixed = [one for one in more if _MIXED.fullmatch(one)]
        rest = [one for one in more if one not in mixed]
        cache = E4M3 if [one.lower() for one in rest] == [CACHE[1:]] else None
        named = {name.lower(): scheme for name, scheme in NAMED.items()}.get(linears.lower())
        match = _PATTERN.fullmatch(linears)
        if (named is None and match is None) or (rest and cache is None):
            raise OnPTQError(
                f"unknown scheme {text!r}: expected one of {', '.join((*PAPER_SCHEMES, *NAMED))}, any other WbAb with "
                "2 to 8 bits, with -gN for groups of N columns and, for weight-only schemes, -asym, e.g. W4A16-g128-asym; "
                f"each with {CACHE} for a KV cache of 8 bits"
            )
        others = tuple((pattern, cls._part(name)) for pattern, _, name in (one.partition("~") for one in mixed))
        if named is not None:
            return replace(named, cache_floats=cache, others=others)
        assert match is not None
        weight_bits, activation_bits, group_size, asymmetric = match.groups()
        grouped = int(group_size) if group_size else None
        plain = cls(int(weight_bits), int(activation_bits), grouped, not asymmetric)
        return replace(plain, cache_floats=cache, others=others)

    @classmethod
    def _part(cls, name: str) -> Scheme:
        return UNQUANTIZED if name.lower() == DENSE else cls.parse(name)

    def mixed(self, patterns: str) -> Scheme:
        """The scheme with another one for some linears: `mlp.down_proj=W8A8,layers.0.*=dense`."""
        parts = [one.strip() for one in patterns.split(",")]
        for one in parts:
            if not _MIXED.fullmatch(one.replace("=", "~", 1)):
                raise OnPTQError(f"{one!r} in the mix {patterns!r}: expected PATTERN=SCHEME or PATTERN={DENSE}")
        return Scheme.parse("+".join((str(self), *(one.replace("=", "~", 1) for one in parts))))

    def raised(self, paths: Sequence[str], scheme: Scheme) -> Scheme:
        """The scheme with another one for the linears of these names."""
        return replace(self, others=(*self.others, *((path, scheme) for path in paths)))

    def of(self, path: str) -> Scheme:
        """The scheme of one linear, by its name relative to the decoder: `layers.3.self_attn.q_proj`."""
        for pattern, scheme in reversed(self.others):
            if selects(pattern, path):
                return scheme
        return self.base

    @property
    def base(self) -> Scheme:
        """The scheme of the linears that no pattern names."""
        return replace(self, cache_floats=None, others=())

    @property
    def unmixed(self) -> Scheme:
        """The scheme of the linears that no pattern names, with the KV cache."""
        return replace(self, others=())

    @property
    def parts(self) -> tuple[Scheme, ...]:
        """The schemes of all linears."""
        return tuple(dict.fromkeys((self.base, *(scheme for _, scheme in self.others))))

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
        """Whether the input of some linear has a scale as a whole, which does not depend on it."""
        return any(one.scales == "E4M3" and one.quantizes_activations for one in self.parts)

    @property
    def of_integers(self) -> bool:
        """Whether everything that is quantized becomes integers."""
        return self.weight_floats is None and self.activation_floats is None

    @property
    def multiplies_integers(self) -> bool:
        """Whether every linear is one product of integers, scaled per row and per token."""
        return all(
            one.of_integers and one.quantizes_weights and one.quantizes_activations and one.group_size is None
            for one in self.parts
        )

    @property
    def kind(self) -> str:
        """Its name without KV cache, and without groups and zero points of integers, as servers know it."""
        linears = self.base
        return str(linears) if linears in _NAMES else str(replace(linears, group_size=None, symmetric=True))

    @property
    def simulated(self) -> bool:
        """Whether no serving kernel exists, so that only transformers can run the checkpoint, as a simulation."""
        return self.base not in _NAMES and self.kind not in {"W4A16", "W8A16", "W8A8", "W4A8"}

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
        if self.cache_floats is not None or self.others:
            others = (f"+{pattern}~{DENSE if one == UNQUANTIZED else one}" for pattern, one in self.others)
            return f"{self.base}{CACHE if self.quantizes_cache else ''}{''.join(others)}"
        if self in _NAMES:
            return _NAMES[self]
        groups = f"-g{self.group_size}" if self.group_size else ""
        return f"W{self.weight_bits}A{self.activation_bits}{groups}{'' if self.symmetric else '-asym'}"


def selects(pattern: str, path: str) -> bool:
    """Whether a pattern names a linear: all of its name, or the end of it."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


UNQUANTIZED = Scheme(UNQUANTIZED_BITS)


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
