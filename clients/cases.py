"""The checkpoints to serve: data type, switches of the server, and the largest difference that its kernel explains."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from onptq.checkpoint.source import Source, find_source
from onptq.errors import OnPTQError
from onptq.schemes import Scheme
from onptq.serving.vllm import cpu_dtype, has_4_bits

DENSE = "dense"
RANDOM = "random:"
SCHEMES = (DENSE, "W8A8", "W4A16", "W4A8")
FAMILIES = ("qwen2.5-vl", "qwen3-vl", "qwen2.5-omni")
MODELS = (*(f"zoo:{family}" for family in FAMILIES), *(f"{RANDOM}{family}" for family in FAMILIES))
ONCE = tuple(  # with one model
    ("zoo:qwen2.5-vl", scheme) for scheme in ("W4A16+mlp.down_proj~W8A8", "W8A8+kv8", "FP8", "W4A8-g128", "NVFP4")
)
QUICK = (
    ("zoo:qwen2.5-vl", DENSE),
    ("zoo:qwen2.5-vl", "W4A8"),
    *ONCE[:3],
    ("zoo:qwen3-vl", "W4A16"),
    ("zoo:qwen2.5-omni", "W8A8"),
    ("random:qwen2.5-vl", "W4A8"),
)
# Limits of the difference of a log-probability from transformers', for tokens of the model's own answer.
EXACT, CLOSE = 0.06, 0.25
EMULATED = Path(__file__).parent / "emulated"


@dataclass(frozen=True)
class Case:
    """One checkpoint."""

    model: str  # zoo:NAME, random:FAMILY, or a folder
    scheme: Scheme | None  # None: not quantized

    @property
    def scheme_name(self) -> str:
        return DENSE if self.scheme is None else str(self.scheme)

    @property
    def label(self) -> str:
        return f"{Path(self.model).name.replace(':', '-')}-{self.scheme_name}"

    def dtype(self, flags: Set[str]) -> str:
        """The most exact type that vLLM's kernel takes on a CPU with these flags."""
        return "float32" if self.emulated else cpu_dtype(self.scheme, flags)

    @property
    def emulated(self) -> bool:
        """Whether vLLM's emulation computes it, in any type."""
        return self.scheme is not None and self.scheme.kind == "NVFP4"

    def limit(self, flags: Set[str]) -> float:
        """In bfloat16 even a dense model differs from float32 by up to 0.08. Servers round activations with other
        scales than ours: in W8A8 absmax / 127 instead of absmax / 127.5."""
        if self.scheme is None or self.emulated:
            return EXACT
        rounded = self.scheme.quantizes_cache or any(part.quantizes_activations for part in self.scheme.parts)
        return CLOSE if rounded or self.dtype(flags) == "bfloat16" else EXACT

    @property
    def environment(self) -> Mapping[str, str]:
        """The switch for int8 activations, which vLLM uses with all 4-bit weights on CPUs with AMX by default; for NVFP4 the
        one that takes its emulation."""
        if self.scheme is None or not has_4_bits(self.scheme):
            return {}
        if self.emulated:
            return {"PYTHONPATH": str(EMULATED)}
        return {"VLLM_CPU_INT4_W4A8": "1" if self.scheme.activation_bits == 8 else "0"}

    def runs_on(self, flags: Set[str]) -> bool:
        """Whether the CPU has AVX-512, which vLLM's CPU kernel for 4-bit weights needs; without it the first request
        fails."""
        return self.scheme is None or not has_4_bits(self.scheme) or "avx512f" in flags

    def source(self, models: Path) -> Source:
        """The model itself; a random one is written into `models` first."""
        if not self.model.startswith(RANDOM):
            return find_source(self.model)
        from onptq.zoo.random import write_random

        family = self.model.removeprefix(RANDOM)
        folder = models / f"random-{family}"
        return find_source(folder if folder.is_dir() else write_random(family, folder))


def choose_cases(models: str | None, schemes: str | None, quick: bool) -> list[Case]:
    """Every model with every scheme, and some with further ones; with `quick` a selection."""
    if quick and (models or schemes):
        raise OnPTQError("expected --quick or names of --models and --schemes, got both")
    pairs = QUICK
    if not quick:
        named = [_split(models, MODELS), _split(schemes, SCHEMES)]
        pairs = tuple((model, scheme) for model in named[0] for scheme in named[1])
        pairs += () if models or schemes else ONCE
    return [Case(model, None if scheme == DENSE else _served(scheme)) for model, scheme in pairs]


def _split(names: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return default if names is None else tuple(dict.fromkeys(name.strip() for name in names.split(",")))


def _served(name: str) -> Scheme:
    scheme = Scheme.parse(name)
    if scheme.simulated:
        raise OnPTQError(
            f"--schemes: {scheme} is for simulation, no server runs it; expected some of {', '.join(SCHEMES)}"
        )
    return scheme
