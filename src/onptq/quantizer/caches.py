"""The KV cache of Q: keys and values rounded on their way into it, as compressed-tensors rounds them.

They are rounded where there is no cache, too: in training and over whole sequences, Q sees what it sees when it decodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onptq.errors import OnPTQError
from onptq.models.caching import Change, change_cached
from onptq.models.structure import Block, Structure
from onptq.quantizer.folded import FoldedCache
from onptq.quantizer.modules import NO_THETA, Keep, Live, Switch
from onptq.quantizer.numerics import FakeQuantize
from onptq.quantizer.theta import Theta, layer_key
from onptq.schemes import Scheme

ROOM = 2.0  # times the largest value that was seen: floats lose nothing by it, and what is larger saturates


class QuantCache:
    """The cached keys and values of one layer: D's as they are, Q's rounded. Before theta has scales, Q's are not."""

    def __init__(self, block: Block, scheme: Scheme, storage: torch.dtype, switch: Switch) -> None:
        assert scheme.cache_floats is not None
        self.block, self.floats, self.storage, self.switch = block, scheme.cache_floats, storage, switch
        self.key = layer_key(block)
        self.state: Live | FoldedCache | None = None
        change_cached(block.owner("o_proj"), self._change)

    @property
    def path(self) -> str:
        return f"{self.key}.self_attn"

    def become(self, state: Live | FoldedCache | None) -> None:
        self.switch.generation += 1
        self.state = state

    def attach(self, theta: Theta) -> None:
        self.become(Live(theta))

    def freeze(self, theta: Theta, keep: Keep = "codes") -> None:
        self.become(self._fold(theta) if self.key in theta.caches else Live(theta))

    def folded(self) -> FoldedCache:
        match self.state:
            case Live(theta):
                return self._fold(theta)
            case FoldedCache() as folded:
                return folded
            case None:
                raise RuntimeError(NO_THETA)

    def _fold(self, theta: Theta) -> FoldedCache:
        scales = theta.caches.get(self.key)
        if scales is None:
            raise OnPTQError(f"{self.path}: the scheme fixes scales of cached keys and values, and theta has none")
        key, value = scales.to(self.storage).split(1)
        return FoldedCache(key, value)

    def _change(self) -> Change | None:
        """How Q rounds keys and values; None for D, and where there are no scales yet."""
        if not self.switch.quantized:
            return None
        if isinstance(self.state, Live) and self.key not in self.state.theta.caches:
            return None
        folded = self.folded()
        return lambda key, value: (self._rounded(key, folded.key), self._rounded(value, folded.value))

    def _rounded(self, x: Tensor, scale: Tensor) -> Tensor:
        args = x, scale.to(x.dtype), None, None, self.floats, x.dtype
        return FakeQuantize.apply(*args)  # type: ignore[no-untyped-call, no-any-return]


def cache_scale(absmax: Tensor, scheme: Scheme, storage: torch.dtype) -> Tensor:
    """The scale for values up to `absmax`, as it is stored; never zero."""
    assert scheme.cache_floats is not None
    scale = (ROOM * absmax.float() / scheme.cache_floats.largest).to(storage)
    return torch.where(scale == 0, torch.finfo(storage).eps, scale).float()


def check_cache(structure: Structure, scheme: Scheme) -> None:
    """Refuse a KV cache that this simulation does not reach."""
    shared = getattr(structure.decoder.config, "num_kv_shared_layers", 0)
    if scheme.quantizes_cache and shared:
        raise OnPTQError(
            f"{scheme}: {shared} layers of {type(structure.decoder).__name__} read keys and values of other layers, which "
            "are not rounded here: expected a scheme without +kv8"
        )
