"""A quantization_config in one form for all makers, and how the weights of a module are stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onptq.checkpoint.folder import StoredTensor
from onptq.errors import OnPTQError
from onptq.schemes import E4M3, NAMED, UNQUANTIZED_BITS, Floats, Grid, Scheme

COMPRESSED = "compressed-tensors"
GROUPED = {"dtype": "group", "E4M3": "tensor_group", "E8M0": "group"}  # strategies of groups, by how scales are stored


@dataclass(frozen=True)
class Numbers:
    """One number format: of weights, of activations or of the KV cache."""

    bits: int
    type: str = "int"
    strategy: str | None = None  # tensor, channel, group, tensor_group, block, token
    group_size: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    dynamic: bool = False

    def __str__(self) -> str:
        span = {
            "group": f"groups of {self.group_size}",
            "tensor_group": f"groups of {self.group_size} in a tensor",
            "block": f"blocks of {self.block}",
        }.get(self.strategy or "", f"per {self.strategy}" if self.strategy else "unknown strategy")
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits}-bit {self.type}, {span}, {kind}{', dynamic' if self.dynamic else ''}"


def weight_numbers(scheme: Scheme) -> Numbers | None:
    """The format of a scheme's weights; None where they are not quantized."""
    if not scheme.quantizes_weights:
        return None
    bits, kind = _type(scheme.weight_grid)
    if scheme.block_rows > 1:
        assert scheme.group_size is not None
        return Numbers(bits, kind, "block", block=(scheme.block_rows, scheme.group_size))
    strategy = GROUPED[scheme.scales] if scheme.group_size else "channel"
    return Numbers(bits, kind, strategy, scheme.group_size, symmetric=scheme.symmetric)


def activation_numbers(scheme: Scheme) -> Numbers | None:
    """The format of a scheme's activations; None where they are not quantized."""
    if not scheme.quantizes_activations:
        return None
    bits, kind = _type(scheme.activation_grid)
    strategy = GROUPED[scheme.scales] if scheme.activation_group else "token"
    return Numbers(bits, kind, strategy, scheme.activation_group, dynamic=True)


def cache_numbers(scheme: Scheme) -> Numbers | None:
    """The format of a scheme's KV cache; None where it is not quantized."""
    return None if scheme.cache_floats is None else Numbers(*_type(scheme.cache_floats), "tensor")


def _type(grid: Grid) -> tuple[int, str]:
    return (grid.bits, "float") if isinstance(grid, Floats) else (grid, "int")


@dataclass(frozen=True)
class Group:
    """Modules that share their number formats."""

    weights: Numbers | None
    activations: Numbers | None
    targets: tuple[str, ...]
    format: str


@dataclass(frozen=True)
class Quantization:
    method: str
    format: str
    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    kv_cache: Numbers | None = None
    status: str | None = None

    def group(self, name: str, classes: Collection[str]) -> Group | None:
        """The group that a compressed-tensors reader puts a module into, under this name; None: left dense."""
        if any(_selects(pattern, name, classes) for pattern in self.ignore):
            return None
        matching = (group for group in self.groups if any(_selects(t, name, classes) for t in group.targets))
        return next(matching, None)

    @property
    def scheme(self) -> Scheme | None:
        """As OnPTQ would name it; None for several groups and for formats that OnPTQ does not write."""
        if len(self.groups) != 1 or (weights := self.groups[0].weights) is None:
            return None
        if self.kv_cache is not None:
            linears = replace(self, kv_cache=None).scheme
            cached = None if linears is None else replace(linears, cache_floats=E4M3)
            return cached if cached is not None and self.kv_cache == cache_numbers(cached) else None
        acts = self.groups[0].activations
        for named in NAMED.values():
            if (weights, acts) == (weight_numbers(named), activation_numbers(named)):
                return named
        plain = weights.type == "int" and (acts is None or (acts.type == "int" and acts.dynamic and acts.symmetric))
        if not plain or weights.strategy not in {"channel", "group"}:
            return None
        try:
            return Scheme(weights.bits, acts.bits if acts else UNQUANTIZED_BITS, weights.group_size, weights.symmetric)
        except OnPTQError:
            return None


def compressed_scheme(section: Mapping[str, Any] | None) -> Scheme | None:
    """The scheme of a compressed-tensors checkpoint, as OnPTQ would name it; None where no name fits, and for other formats."""
    try:
        quantization = parse_quantization(section)
    except (TypeError, ValueError, AttributeError):
        return None
    return quantization.scheme if quantization is not None and quantization.method == COMPRESSED else None


def parse_quantization(section: Mapping[str, Any] | None) -> Quantization | None:
    if section is None:
        return None
    method = str(section.get("quant_method") or _guess_method(section))
    if method == COMPRESSED:
        return _compressed(section)
    if method in {"gptq", "auto-round", "intel/auto-round"}:
        return _gptq(method, section)
    if method == "awq":
        bits, size = (
            section.get("bits", section.get("w_bit", 4)),
            section.get("group_size", section.get("q_group_size")),
        )
        weights = _grouped(int(bits), size, symmetric=not section.get("zero_point", True))
        return _weight_only(method, f"awq {section.get('version', 'gemm')}", weights, section)
    if method == "bitsandbytes":
        four = bool(section.get("load_in_4bit") or section.get("_load_in_4bit"))
        kind = str(section.get("bnb_4bit_quant_type", "fp4")) if four else "int"
        return _weight_only(method, f"bitsandbytes {kind}{4 if four else 8}", Numbers(4 if four else 8, kind), section)
    if method == "fp8":
        return _fp8(section)
    return Quantization(method, method, (), _names(section), None, None)


def storage(parameters: Mapping[str, StoredTensor]) -> str | None:
    """How a module's weight is stored; None for a dense one."""
    if "weight_packed" in parameters:
        return "packed"
    if "qweight" in parameters:
        return "qweight"
    if "SCB" in parameters or any(name.startswith("weight.") for name in parameters):
        return "bitsandbytes"
    dtype = parameters["weight"].dtype if "weight" in parameters else ""
    if dtype in {"I8", "U8"}:
        return "int8"
    if dtype.startswith("F8"):
        return "float8"
    return "dense with scales" if dtype and "weight_scale" in parameters else None


def _selects(pattern: str, name: str, classes: Collection[str]) -> bool:
    from compressed_tensors.utils.match import match_name

    return bool(match_name(name, pattern)) or pattern in classes


def _compressed(section: Mapping[str, Any]) -> Quantization:
    groups = tuple(
        Group(
            _numbers(group.get("weights")),
            _numbers(group.get("input_activations")),
            tuple(group.get("targets") or ()),
            str(group.get("format") or section.get("format")),
        )
        for group in (section.get("config_groups") or {}).values()
        if isinstance(group, Mapping)
    )
    return Quantization(
        COMPRESSED,
        str(section.get("format")),
        groups,
        _names(section),
        _numbers(section.get("kv_cache_scheme")),
        section.get("quantization_status"),
    )


def _numbers(args: Any) -> Numbers | None:
    if not isinstance(args, Mapping):
        return None
    size, strategy = args.get("group_size"), args.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    block = args.get("block_structure")
    return Numbers(
        bits=int(args.get("num_bits", 8)),
        type=str(args.get("type", "int")),
        strategy=str(strategy),
        group_size=int(size) if size and size > 0 else None,
        block=(int(block[0]), int(block[1])) if isinstance(block, list) and len(block) == 2 else None,
        symmetric=bool(args.get("symmetric", True)),
        dynamic=bool(args.get("dynamic", False)),
    )


def _gptq(method: str, section: Mapping[str, Any]) -> Quantization:
    weights = _grouped(int(section.get("bits", 4)), section.get("group_size"), symmetric=bool(section.get("sym", True)))
    bits = int(section.get("act_bits") or UNQUANTIZED_BITS)
    dynamic = bool(section.get("act_dynamic", True))
    acts = Numbers(bits, "int", "token", dynamic=dynamic) if bits < UNQUANTIZED_BITS else None
    packing = str(section.get("packing_format") or section.get("checkpoint_format") or "gptq")
    return Quantization(method, packing, (Group(weights, acts, ("Linear",), packing),), _names(section))


def _fp8(section: Mapping[str, Any]) -> Quantization:
    block = section.get("weight_block_size")
    sizes = (int(block[0]), int(block[1])) if isinstance(block, list) and len(block) == 2 else None
    weights = Numbers(8, "float", "block" if sizes else "tensor", block=sizes)
    dynamic = section.get("activation_scheme", "dynamic") == "dynamic"
    acts = Numbers(8, "float", "token" if dynamic else "tensor", dynamic=dynamic)
    return Quantization("fp8", "fp8", (Group(weights, acts, ("Linear",), "fp8"),), _names(section))


def _weight_only(method: str, format: str, weights: Numbers, section: Mapping[str, Any]) -> Quantization:
    return Quantization(method, format, (Group(weights, None, ("Linear",), format),), _names(section))


def _grouped(bits: int, size: Any, *, symmetric: bool) -> Numbers:
    group = int(size) if isinstance(size, int) and size > 0 else None
    return Numbers(bits, "int", "group" if group else "channel", group, None, symmetric)


def _names(section: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that are not quantized, under the names that the makers give to that list."""
    listed: Iterable[Any] = next(
        (section[key] for key in ("ignore", "modules_to_not_convert", "llm_int8_skip_modules") if section.get(key)), ()
    )
    return tuple(map(str, listed))


def _guess_method(section: Mapping[str, Any]) -> str:
    if "config_groups" in section:
        return COMPRESSED
    if "quant_algo" in section or "producer" in section:
        return "modelopt"
    return "bitsandbytes" if any(str(key).startswith(("load_in_", "bnb_")) for key in section) else "unknown"
