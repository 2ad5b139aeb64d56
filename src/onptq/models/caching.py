"""What attention gives to its cache, seen and changed on the way: in every cache of ours and of transformers, and without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

CACHE = "past_key_values"
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class ChangedCache:
    """A cache that gets keys and values [B, kv_heads, S, head_dim] changed; without one, attention gets them back."""

    def __init__(self, cache: Any, change: Change) -> None:
        self._cache, self._change = cache, change

    def update(self, key: Tensor, value: Tensor, *place: Any, **more: Any) -> tuple[Tensor, Tensor]:
        key, value = self._change(key, value)
        if self._cache is None:
            return key, value
        kept: tuple[Tensor, Tensor] = self._cache.update(key, value, *place, **more)
        return kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def change_cached(attention: nn.Module, change: Callable[[], Change | None]) -> RemovableHandle:
    """Let what `change()` returns, if anything, change the keys and values of an attention in every forward."""

    def hook(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        now = change()
        return None if now is None else (args, given | {CACHE: ChangedCache(given.get(CACHE), now)})

    return attention.register_forward_pre_hook(hook, with_kwargs=True)
