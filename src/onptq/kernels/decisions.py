"""Decisions of D and Q at each state, from final hidden states and the head, a tile of the vocabulary at a time.

The plain twins are `cycle.compare.decide` and `cycle.divergence.kl_divergence` on whole rows of logits. Here no row of
logits exists: one pass computes normalizers and argmaxes, a second the divergences, the competitor and the margins.
Rows are split along the vocabulary and the parts are put together in a fixed order, so that two runs agree.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from torch.autograd.function import once_differentiable

from onptq.kernels import launching_on
from onptq.kernels.vocabulary import decisions_kernel, kl_kernel, kl_slope_kernel, normalizers_kernel

SPLIT = 8  # vocabulary tiles that one program walks
GRADIENT_COLUMNS = 16384  # of the vocabulary whose gradient lives at a time, in the head's dtype


class DecisionColumns(NamedTuple):
    """The columns of `cycle.compare.Decisions`, each [C]."""

    reference: Tensor
    competitor: Tensor
    quantized: Tensor
    margin_dense: Tensor
    margin_quant: Tensor
    js: Tensor
    kl: Tensor


class _Tile(NamedTuple):
    states: int
    columns: int
    depth: int
    warps: int
    stages: int


# fp32 is multiplied as fp32, without tensor cores, and takes twice the bytes of shared memory.
NARROW, WIDE = _Tile(64, 128, 64, 8, 3), _Tile(32, 64, 32, 4, 2)


@torch.no_grad()
def decide_states(dense: Tensor, quant: Tensor, head: Tensor, bias: Tensor | None) -> DecisionColumns:
    """Eqs. 3-5 and 7 from normed hidden states [C, d] of both models and the head [V, d]; ties go to the lowest id."""
    states = _States(dense, quant, head, bias)
    reference, quantized = states.normalize()
    part = states.partials(7)
    states.launch(decisions_kernel, reference, part)
    js, kl, rival, at_reference_dense, at_reference_quant, at_rival_dense, at_rival_quant = part
    competitor, chosen = _first_best(at_rival_quant, rival, states.vocabulary)
    at_rival_dense, at_rival_quant = (logit.gather(0, chosen)[0] for logit in (at_rival_dense, at_rival_quant))
    return DecisionColumns(
        reference,
        competitor,
        quantized,
        at_reference_dense.sum(0) - at_rival_dense,
        at_reference_quant.sum(0) - at_rival_quant,
        (js.sum(0) / 2).clamp(0, math.log(2)),
        kl.sum(0).clamp(min=0),
    )


def kl_of_states(dense: Tensor, quant: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
    """KL(D || Q) of each state, [C], differentiable in Q's hidden states [C, d]; D and the head are constants."""
    return _KL.apply(dense, quant, head, bias)  # type: ignore[no-any-return]


def margin_of_states(quant: Tensor, head: Tensor, bias: Tensor | None, reference: Tensor, competitor: Tensor) -> Tensor:
    """m = z(a^R) - z(a^C) (Eq. 5) of each state, [C]: two rows of the head are all it takes."""
    margin = (quant.float() * (head[reference].float() - head[competitor].float())).sum(-1)
    return margin if bias is None else margin + (bias[reference].float() - bias[competitor].float())


class _KL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor, quant: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
        states = _States(dense, quant, head, bias)
        states.normalize()
        part = states.partials(1)
        states.launch(kl_kernel, part)
        kl = part[0].sum(0)
        ctx.states, ctx.positive = states, kl >= 0
        return kl.clamp(min=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        states = ctx.states
        return None, states.kl_gradient(torch.where(ctx.positive, grad.float(), 0.0)), None, None


class _States:
    """Hidden states of both models, the head, the tiles, and, after `normalize`, the log-normalizers [C]."""

    def __init__(self, dense: Tensor, quant: Tensor, head: Tensor, bias: Tensor | None) -> None:
        self.dense, self.quant, self.head = dense.detach().contiguous(), quant.detach().contiguous(), head.contiguous()
        self.bias = bias
        self.count, self.width = dense.shape
        self.vocabulary = len(head)
        self.tile = WIDE if head.dtype == torch.float32 else NARROW
        self.splits = triton.cdiv(self.vocabulary, SPLIT * self.tile.columns)
        self.log_dense, self.log_quant = (torch.empty(0, device=dense.device) for _ in range(2))

    def partials(self, columns: int) -> Tensor:
        return torch.empty(columns, self.splits, self.count, device=self.dense.device)

    def normalize(self) -> tuple[Tensor, Tensor]:
        """The normalizers, and the argmax of both models on the way."""
        part = self.partials(6)
        self._launch(normalizers_kernel, (part,), self.splits)
        log_dense, top_dense, id_dense, log_quant, top_quant, id_quant = part
        self.log_dense, self.log_quant = log_dense.logsumexp(0), log_quant.logsumexp(0)
        reference, _ = _first_best(top_dense, id_dense, self.vocabulary)
        quantized, _ = _first_best(top_quant, id_quant, self.vocabulary)
        return reference, quantized

    def launch(self, kernel: Any, *extra: Tensor) -> None:
        self._launch(kernel, (self.log_dense, self.log_quant, *extra), self.splits)

    def kl_gradient(self, grad: Tensor) -> Tensor:
        """d sum(grad * KL) / d quant = (softmax(z_Q) - softmax(z_D)) grad @ head, by pieces of the vocabulary."""
        total = torch.zeros(self.count, self.width, device=self.dense.device)
        for first in range(0, self.vocabulary, GRADIENT_COLUMNS):
            piece = self.head[first : first + GRADIENT_COLUMNS]
            slope = self.dense.new_empty(self.count, len(piece))
            extra = (self.log_dense, self.log_quant, grad, slope, first, len(piece))
            self._launch(kl_slope_kernel, extra, triton.cdiv(len(piece), self.tile.columns))
            if slope.is_cuda and slope.dtype != torch.float32:
                total += torch.mm(slope, piece, out_dtype=torch.float32)
            else:
                total += slope.float() @ piece.float()
        return total.to(self.quant.dtype)

    def _launch(self, kernel: Any, extra: tuple[Any, ...], columns: int) -> None:
        tile = self.tile
        # States first: programs that run side by side then share their piece of the head in the cache.
        grid = (triton.cdiv(self.count, tile.states), columns)
        with launching_on(self.dense):
            kernel[grid](
                self.dense,
                self.quant,
                self.head,
                self.bias,
                *extra,
                self.count,
                self.vocabulary,
                WIDTH=self.width,
                BIAS=self.bias is not None,
                SPLIT=SPLIT,
                STATES=tile.states,
                COLUMNS=tile.columns,
                DEPTH=tile.depth,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )


def _first_best(value: Tensor, index: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Lowest index [C] among the parts [P, C] of largest value, and the part [1, C] it came from.

    NaN has no largest value: its index is in range, and its divergences are NaN."""
    first, part = torch.where(value == value.amax(0), index, vocabulary).min(0, keepdim=True)
    return first[0].long().clamp(max=vocabulary - 1), part
