"""Experts of a mixture as linears of their own, under the names that servers read: `mlp.experts.3.gate_proj`.

transformers keeps the experts of a layer in two 3D tensors. Here each is a gated MLP of three linears, whose weights are
views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # the 3D tensors, [E, 2 I, H] and [E, H, I]
OWN = -1  # in place of an expert: the router decides

Model = TypeVar("Model", bound=nn.Module)


class Expert(nn.Module):
    """One gated MLP."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = _linear(gate), _linear(up), _linear(down)
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Experts(nn.ModuleList):
    """The experts of a layer. They replace the module of a class that computes all of them.

    What they read is one batch: of a matrix, compressed-tensors would give each number a scale of its own."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum [T, H] of what the chosen experts [T, k] make of each token."""
        out = torch.zeros_like(hidden_states)
        if hidden_states.is_meta:  # no values say which expert has tokens
            return out
        for expert, (rows, places) in enumerate(by_expert(top_k_index, len(self))):
            if len(rows):
                made = self[expert](hidden_states[None, rows])[0] * top_k_weights[rows, places, None]
                out.index_add_(0, rows, made.to(out.dtype))
        return out


def by_expert(index: Tensor, experts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each expert the tokens that chose it, and in which place of theirs."""
    order = index.flatten().argsort(stable=True)
    for part in order.split(index.flatten().bincount(minlength=experts).tolist()):
        yield part // index.shape[1], part % index.shape[1]


def linearize(model: Model) -> Model:
    """Give the experts of a model linears of their own, in place."""
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if _is_fused(child):
                setattr(module, name, _unfused(child))
                module._is_hf_initialized = True  # type: ignore[assignment]  # or Qwen3-Omni draws the 3D tensors anew
                for beside in module.children():
                    _take_one_batch(beside)
    return model


def linearized(model_class: type[Model]) -> type[Model]:
    """The class, whose models are made with experts of their own; transformers loads it by these names."""

    class Linearized(model_class):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            linearize(self)

        @staticmethod
        def _load_pretrained_model(
            model: Any, state_dict: Any, files: Any, config: Any, *more: Any, **also: Any
        ) -> Any:
            """Load the tensors of experts as they are: transformers would put those of a layer into one."""
            mapping = [one for one in config.weight_mapping or () if ".experts." not in str(one.target_patterns)]
            config = replace(config, weight_mapping=mapping)
            return model_class._load_pretrained_model(model, state_dict, files, config, *more, **also)  # type: ignore[attr-defined]

    Linearized.__name__ = Linearized.__qualname__ = model_class.__name__
    Linearized.__module__ = model_class.__module__
    return Linearized


def _is_fused(module: Any) -> bool:
    """Whether it holds experts as [E, 2 I, H] and [E, H, I], without biases, gated as an MLP is."""
    gate_up, down = (module._parameters.get(name) for name in (GATE_UP, DOWN))
    if gate_up is None or down is None or set(module._parameters) != {GATE_UP, DOWN} or not hasattr(module, "act_fn"):
        return False
    if gate_up.dim() != 3 or down.dim() != 3 or getattr(module, "is_transposed", False):
        return False
    experts, rows, hidden = gate_up.shape
    return down.shape == (experts, hidden, rows // 2) and _gates_alike(module, rows)


@torch.no_grad()
def _gates_alike(module: Any, rows: int) -> bool:
    """Whether the class's gate, which some clamp or interleave, is act_fn(gate) * up."""
    if not hasattr(module, "_apply_gate") or getattr(module, "has_post_expert_norm", False):
        return False
    both = torch.linspace(-100, 100, 3 * rows, device="cpu")[torch.arange(3 * rows, device="cpu") * 7 % (3 * rows)]
    both = both.view(3, rows)
    gate, up = both.chunk(2, dim=-1)
    return torch.equal(module._apply_gate(both), module.act_fn(gate) * up)


def _unfused(module: Any) -> Experts:
    gates, ups = module.gate_up_proj.data.chunk(2, dim=1)
    return Experts(Expert(*weights, module.act_fn) for weights in zip(gates, ups, module.down_proj.data, strict=True))


def _take_one_batch(module: nn.Module) -> None:
    """Let an MLP that all tokens share read a matrix as one batch, too."""
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
        forward = module.forward
        module.forward = lambda x: forward(x[None])[0] if x.dim() == 2 else forward(x)  # type: ignore[method-assign]


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    return linear


# --- which experts tokens go to ---------------------------------------------------------------------------------------


@contextmanager
def observing_routes(layers: Iterable[nn.Module], observe: Callable[[int, Tensor], None]) -> Iterator[None]:
    """A context in which `observe(layer, index)` gets the experts [T, k] of all tokens, by the layer's place."""

    def hook(place: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, args: observe(place, args[1])

    hooks = [
        experts.register_forward_pre_hook(hook(place))
        for place, layer in enumerate(layers)
        if (experts := experts_of(layer)) is not None
    ]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def experts_of(layer: Any) -> Experts | None:
    """The experts of a decoder layer; None of a dense one."""
    experts = getattr(getattr(layer, "mlp", None), "experts", None)
    return experts if isinstance(experts, Experts) else None


def routed(layer: nn.Module, routes: Tensor | None) -> AbstractContextManager[Any]:
    """A context in which the layer's router takes the experts [B, S, k] of `routes` instead of its own choice, which
    stays wherever they are OWN. Without any it decides alone."""
    experts = experts_of(layer)
    return nullcontext() if routes is None or experts is None else _Chosen(routes.flatten(0, -2), len(experts))


class _Chosen(TorchFunctionMode):
    """Lets the top k among the experts be the given ones [T, k]. Their weights stay what the router gives them."""

    def __init__(self, index: Tensor, experts: int) -> None:
        super().__init__()
        self.index, self.experts = index, experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        scores = args[0]
        if scores.shape != (len(self.index), self.experts) or out[1].shape != self.index.shape:
            return out  # of groups of experts
        index = torch.where(self.index == OWN, out[1], self.index.to(out[1].dtype))
        return torch.return_types.topk((scores.gather(1, index), index))
