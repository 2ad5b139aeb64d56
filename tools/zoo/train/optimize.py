"""AdamW that skips a step if a gradient is not finite, without a synchronization with the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onptq.errors import OnPTQError

PATIENCE = 20  # steps in a row without an update before training is given up
NAMED = 8  # parameters of an update that was left out


class Optimizer:
    """A step with clipped gradients. With one inf or NaN among them neither weights nor moments change; clipping alone
    would carry it into every parameter."""

    def __init__(
        self, modules: Sequence[nn.Module], lr: float, decay: float, clip: float, late: Sequence[nn.Module] = ()
    ) -> None:
        """`late`: modules, or parts of them, whose learning rate has a warm-up of its own."""
        named = {one: name for module in modules for name, one in module.named_parameters()}
        self._weights, self._names = list(named), list(named.values())
        self._clip = clip
        self._adamw = torch.optim.AdamW(_groups(named, decay, late), lr=lr, betas=(0.9, 0.98), fused=True)
        self._places: dict[tuple[int, ...], Tensor] = {}
        device = self._weights[0].device
        self._in_a_row, self._longest = torch.zeros(2, device=device).unbind()
        self._sums = torch.zeros(3, device=device)  # norm of the steps taken, their number, steps left out
        self._wrong = torch.zeros(len(self._weights), device=device)  # steps left out in which it was not finite

    def set_rate(self, lr: float, late_lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = late_lr if group["late"] else lr

    @property
    def lr(self) -> float:
        rate: float = self._adamw.param_groups[0]["lr"]
        return rate

    @torch.no_grad()
    def step(self) -> None:
        gradients = {index: weight.grad for index, weight in enumerate(self._weights) if weight.grad is not None}
        norms = torch.stack(torch._foreach_norm(list(gradients.values())))
        norm = norms.norm()
        left_out = (~norm.isfinite()).float()
        # What gradient scaling tells fused optimizers: divide by this, and do nothing at all where that is 1.
        self._adamw.grad_scale = (norm / self._clip).clamp(min=1)  # type: ignore[attr-defined]
        self._adamw.found_inf = left_out  # type: ignore[attr-defined]
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._count(tuple(gradients), norms, norm, left_out)

    def _count(self, present: tuple[int, ...], norms: Tensor, norm: Tensor, left_out: Tensor) -> None:
        self._in_a_row.add_(1).mul_(left_out)
        torch.maximum(self._longest, self._in_a_row, out=self._longest)
        self._sums.add_(torch.stack([torch.where(left_out > 0, 0, norm), 1 - left_out, left_out]))
        if present not in self._places:
            self._places[present] = torch.tensor(present, device=norms.device)
        self._wrong.index_add_(0, self._places[present], (~norms.isfinite()).float())

    def report(self) -> dict[str, Any]:
        """The mean norm of the gradients since the last report and the steps left out; waits for the device."""
        total, taken, skipped = self._sums.tolist()
        names = [self._names[index] for index in self._wrong.nonzero()[:, 0].tolist()]
        if (longest := int(self._longest)) >= PATIENCE:
            raise OnPTQError(
                f"{longest} steps in a row had gradients that are not finite, in {len(names)} parameters up to "
                f"{names[-1]}; expected finite ones: a lower --lr may help"
            )
        for counts in (self._sums, self._wrong, self._longest):
            counts.zero_()
        record = {"norm": round(total / max(taken, 1), 4), "skipped": int(skipped)}
        return record | ({"not_finite": names[-NAMED:]} if names else {})


def _groups(named: dict[nn.Parameter, str], decay: float, late: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Parameter groups: weight decay only for the matrices of linears and convolutions."""
    behind = {one for module in late for one in module.parameters()}
    groups = []
    for is_late in (False, True):
        own = {one: name for one, name in named.items() if (one in behind) == is_late}
        pulled = [one for one, name in own.items() if one.ndim > 1 and "embed" not in name]
        others = [one for one, name in own.items() if not (one.ndim > 1 and "embed" not in name)]
        groups += [
            {"params": pulled, "weight_decay": decay, "late": is_late},
            {"params": others, "weight_decay": 0.0, "late": is_late},
        ]
    return [group for group in groups if group["params"]]
