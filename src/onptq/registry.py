"""Names that recipes and commands accept: base methods, selection rules, loss terms, tasks and model families.

Each list is open. A package adds names by entry points of the list's group, a program by `register`. Nothing is imported
before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from onptq.errors import OnPTQError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects by name: the built-in ones, those of installed packages, and those of the running program."""

    def __init__(self, kind: str, group: str, built_in: Mapping[str, str], labels: Mapping[str, str] = {}) -> None:
        self.kind, self.group, self._labels = kind, group, labels
        self._built_in = {name: EntryPoint(name, path, group) for name, path in built_in.items()}
        self._registered: dict[str, T] = {}

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self.group) if entry.name not in self._built_in}

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._built_in, *self._installed, *self._registered)))

    def __contains__(self, name: object) -> bool:
        return name in self._registered or name in self._built_in or name in self._installed

    def __getitem__(self, name: str) -> T:
        self.check(name)
        if name in self._registered:
            return self._registered[name]
        entry = self._built_in.get(name) or self._installed[name]
        try:
            return cast(T, entry.load())
        except Exception as error:  # whatever another package stumbles over
            if name in self._built_in:
                raise
            raise OnPTQError(
                f"the {self.kind} {name!r} of the package {self.origin(name)} cannot be loaded ({entry.value}): {error!r}"
            ) from error

    def check(self, name: str) -> None:
        """Refuse a name that is not in the list."""
        if name not in self:
            hint = did_you_mean(name, self)
            raise OnPTQError(f"unknown {self.kind} {name!r}{hint}; expected one of {', '.join(self) or 'none'}")

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that adds an object under `name`. A program may register its own name again, as notebooks do."""
        if name in self._built_in or name in self._installed:
            raise OnPTQError(f"the {self.kind} {name!r} exists already, from {self.origin(name)}; choose another name")

        def add(value: T) -> T:
            self._registered[name] = value
            return value

        return add

    @contextmanager
    def lending(self, values: Mapping[str, T]) -> Iterator[None]:
        """A block in which there are more names."""
        for name, value in values.items():
            self.register(name)(value)
        try:
            yield
        finally:
            for name in values:
                del self._registered[name]

    def label(self, name: str) -> str:
        """The name in tables: itself, unless it promises more than it is."""
        return self._labels.get(name, name)

    def origin(self, name: str) -> str:
        """The package that brings a name."""
        if name in self._registered:
            return "this program"
        distribution = self._installed[name].dist if name in self._installed else None
        return distribution.name if distribution is not None else "onptq"


# f(policy, prompts, advance, *, steps, settled, store) -> Theta; keywords that a method does not name are not passed
METHODS: Registry[Callable[..., Any]] = Registry(
    "base method",
    "onptq.methods",
    {
        "rtn": "onptq.methods.rtn:rtn",
        "search": "onptq.methods.search:search",
        "smoothquant": "onptq.methods.smoothquant:smoothquant",
        "awq": "onptq.methods.awq:awq",
        "mbq": "onptq.methods.mbq:mbq",
        "qig": "onptq.methods.qig:qig",
        "masquant": "onptq.methods.masquant:masquant",
        "blockwise": "onptq.methods.blockwise:blockwise",
        "gptq": "onptq.methods.gptq:gptq",
        "signround": "onptq.methods.signround:signround",
        "smoothquant+gptq": "onptq.methods.composed:smoothquant_gptq",
        "search+gptq": "onptq.methods.composed:search_gptq",
        "search+signround": "onptq.methods.composed:search_signround",
    },
    {"masquant": "masquant (merged)"},  # one scale for all modalities, no low-rank branch: what folds
)
# f(states, risk, rng) -> Ranking
SELECTION_RULES: Registry[Callable[..., Any]] = Registry(
    "selection rule",
    "onptq.selection_rules",
    {
        "risk": "onptq.cycle.risk:by_risk",
        "all": "onptq.cycle.risk:every_state",
        "mismatch": "onptq.cycle.risk:mismatches_by_risk",
        "mismatch_near_miss": "onptq.cycle.risk:by_erosion_and_divergence",
        "consequence": "onptq.cycle.risk:by_consequence",
        "random": "onptq.cycle.risk:at_random",
    },
)
# f(z_dense, z_quant, reference, competitor) -> [C]
LOSS_TERMS: Registry[Callable[..., Any]] = Registry("loss term", "onptq.loss_terms", {})
# f(family, split, count) -> items
TASKS: Registry[Callable[..., Any]] = Registry("task", "onptq.tasks", {})
# a Family
FAMILIES: Registry[Any] = Registry(
    "model family",
    "onptq.families",
    {
        "qwen2.5-vl": "onptq.models.qwen2_5_vl:QWEN2_5_VL",
        "qwen3-vl": "onptq.models.qwen3_vl:QWEN3_VL",
        "qwen3-vl-moe": "onptq.models.qwen3_vl:QWEN3_VL_MOE",
        "qwen2.5-omni": "onptq.models.qwen_omni:QWEN2_5_OMNI",
        "qwen3-omni": "onptq.models.qwen_omni:QWEN3_OMNI",
        "llama": "onptq.models.text:LLAMA",
        "qwen2": "onptq.models.text:QWEN2",
        "qwen3": "onptq.models.text:QWEN3",
        "qwen3-moe": "onptq.models.text:QWEN3_MOE",
    },
)
