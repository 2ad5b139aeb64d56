"""The grid search of MBQ and QIG as one would write it by hand: transformers' own modules, one sequence at a time, float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import naive
import numpy as np
import oracles
import torch
from conftest import Tiny
from torch import nn

from onptq.bank import Trajectory
from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import rollouts
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import PAIRS, Block, find_structure
from onptq.quantizer.policy import Policy
from onptq.schemes import Scheme

RATIOS = [n / 20 for n in range(20)]


def make_policy(tiny: Tiny, scheme: str, dtype: torch.dtype = torch.float32) -> Policy:
    """Scales are stored in float32, so that rounding them is no part of what is compared."""
    model = tiny.model(dtype)
    return Policy(model, Scheme.parse(scheme), storage=torch.float32, eos=tiny.source.eos())


def short_answers(policy: Policy, prompts: Sequence[EncodedPrompt], tokens: int = 6) -> list[Trajectory]:
    return rollouts(Prefixes(policy, prompts, max_tokens=tokens), side="D")


@dataclass
class Unit:
    """The module whose output error judges a pair, and every call that the plain model made to it."""

    block: Block
    pair: str
    module: nn.Module
    calls: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        x = args[0] if args else kwargs.pop("hidden_states")
        self.calls.append((x.detach(), kwargs))

    @torch.no_grad()
    def emit(self, x: torch.Tensor, kwargs: dict[str, Any]) -> np.ndarray:
        out = self.module(x, **kwargs)
        return (out[0] if isinstance(out, tuple) else out)[0].numpy()

    def inputs(self) -> list[np.ndarray]:
        return [x[0].numpy() for x, _ in self.calls]

    def candidates(self) -> list[np.ndarray]:
        """log s of mean|x|^r for each r of the grid, mean 0; under GQA the mean goes over the group's query heads too."""
        magnitude = np.abs(np.concatenate(self.inputs())).mean(0)
        if self.pair == "v_o":
            magnitude = magnitude.reshape(self.block.kv_heads, -1, self.block.head_dim).mean(1).ravel()
        logs = [np.log(np.maximum(magnitude**ratio, 1e-4)) for ratio in RATIOS]
        return [u - u.mean() for u in logs]

    def error(self, u: np.ndarray, scheme: Scheme, weights: Sequence[np.ndarray], power: int = 1) -> float:
        """Sum over tokens of weight times mean |d|^power over channels; weights and inputs are rounded after smoothing."""
        if self.pair == "v_o":
            shared = u.reshape(self.block.kv_heads, 1, self.block.head_dim)
            u = np.repeat(shared, self.block.heads // self.block.kv_heads, axis=1).ravel()
        dense = [self.emit(*call) for call in self.calls]
        linears = [self.block.child(name) for name in PAIRS[self.pair][1]]
        before = [linear.weight.data.clone() for linear in linears]  # type: ignore[operator, union-attr]
        for linear, weight in zip(linears, before, strict=True):
            scaled = weight.numpy() * np.exp(u)
            scale = oracles.row_scale(scaled, np.ones(1), scheme.weight_bits)
            linear.weight.data = torch.from_numpy(oracles.rounding(scaled, scale, scheme.weight_bits)(scaled, scale))  # type: ignore[union-attr]
        total = 0.0
        for (x, kwargs), out, weight in zip(self.calls, dense, weights, strict=True):
            x_q = x.numpy() / np.exp(u)
            if scheme.quantizes_activations:
                scale = oracles.token_scale(x_q, scheme.activation_bits)
                x_q = oracles.rounding(x_q, scale, scheme.activation_bits)(x_q, scale)
            actual = self.emit(torch.from_numpy(x_q), kwargs)
            total += float((weight * (np.abs(actual - out) ** power).mean(-1)).sum())
        for linear, weight in zip(linears, before, strict=True):
            linear.weight.data = weight  # type: ignore[union-attr, assignment]
        return total


def plain_units(tiny: Tiny, responses: Sequence[Trajectory]) -> dict[tuple[int, str], Unit]:
    """Every unit of the plain checkpoint with its calls, sequence by sequence."""
    model = tiny.model(torch.float64).eval().requires_grad_(False)
    units: dict[tuple[int, str], Unit] = {}
    for block in find_structure(model).blocks:
        for pair, (_, consumers) in PAIRS.items():
            module = block.owner(consumers[0]) if len(consumers) > 1 else block.child(consumers[0])
            units[block.index, pair] = Unit(block, pair, module)
    hooks = [unit.module.register_forward_pre_hook(unit.record, with_kwargs=True) for unit in units.values()]
    for response in responses:
        inputs = tiny.inputs(response.prompt)
        for module in model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None  # type: ignore[assignment]
        model(**naive.extended(inputs, response.tokens), use_cache=False)
    for hook in hooks:
        hook.remove()
    return units
