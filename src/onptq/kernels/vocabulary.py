"""The Triton side of `kernels.decisions`: each program takes some tiles of the vocabulary for some states."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def _logits(
    dense_ptr,
    quant_ptr,
    head_ptr,
    bias_ptr,
    state,
    column,
    states,
    vocabulary,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    STATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of both models' logits in fp32, [STATES, COLUMNS], -inf beyond the vocabulary.

    Rows beyond the last repeat the first, which spares every load a mask."""
    state = tl.where(state < states, state, 0).to(tl.int64)[:, None] * WIDTH
    column_in = column < vocabulary
    column = tl.where(column_in, column, 0).to(tl.int64)
    start = column[None, :] * WIDTH
    depth = tl.arange(0, DEPTH)
    dense = tl.zeros([STATES, COLUMNS], tl.float32)
    quant = tl.zeros([STATES, COLUMNS], tl.float32)
    for first in range(0, WIDTH, DEPTH):
        at = first + depth
        if WIDTH % DEPTH == 0:
            head = tl.load(head_ptr + start + at[:, None])
            d = tl.load(dense_ptr + state + at[None, :])
            q = tl.load(quant_ptr + state + at[None, :])
        else:
            head = tl.load(head_ptr + start + at[:, None], mask=at[:, None] < WIDTH, other=0.0)
            d = tl.load(dense_ptr + state + at[None, :], mask=at[None, :] < WIDTH, other=0.0)
            q = tl.load(quant_ptr + state + at[None, :], mask=at[None, :] < WIDTH, other=0.0)
        dense = tl.dot(d, head, dense, input_precision="ieee")
        quant = tl.dot(q, head, quant, input_precision="ieee")
    if BIAS:
        bias = tl.load(bias_ptr + column).to(tl.float32)[None, :]
        dense += bias
        quant += bias
    return tl.where(column_in[None, :], dense, -float("inf")), tl.where(column_in[None, :], quant, -float("inf"))


@triton.jit
def _log_softmax(z, log_total, column_in):
    """Beyond the vocabulary 0, which no sum may count."""
    return tl.where(column_in[None, :], z - log_total[:, None], 0.0)


@triton.jit
def _best(z, column, vocabulary):
    """Largest logit of each row and the lowest id that has it."""
    top = tl.max(z, 1)
    return top, tl.min(tl.where(z == top[:, None], column[None, :], vocabulary), 1)


@triton.jit
def _kl_terms(p, q, column_in):
    return tl.where(column_in[None, :], tl.exp(p) * (p - q), 0.0)


@triton.jit
def _log_mean(x):
    """log((1 + e^x) / 2)."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))) - 0.6931471805599453


@triton.jit(do_not_specialize=["states"])
def normalizers_kernel(
    dense_ptr,
    quant_ptr,
    head_ptr,
    bias_ptr,
    part_ptr,
    states,
    vocabulary,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    STATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    state = tl.program_id(0) * STATES + tl.arange(0, STATES)
    split = tl.program_id(1)
    top_d = tl.full([STATES], -float("inf"), tl.float32)
    top_q = tl.full([STATES], -float("inf"), tl.float32)
    total_d = tl.zeros([STATES], tl.float32)
    total_q = tl.zeros([STATES], tl.float32)
    id_d = tl.zeros([STATES], tl.int32)
    id_q = tl.zeros([STATES], tl.int32)
    for tile in range(SPLIT):  # of the last split, some tiles may lie beyond the vocabulary, where nothing counts
        column = (split * SPLIT + tile) * COLUMNS + tl.arange(0, COLUMNS)
        z_d, z_q = _logits(
            dense_ptr, quant_ptr, head_ptr, bias_ptr, state, column, states, vocabulary,
            WIDTH, BIAS, STATES, COLUMNS, DEPTH,
        )  # fmt: skip
        best, where = _best(z_d, column, vocabulary)
        id_d = tl.where(best > top_d, where, id_d)
        larger = tl.maximum(best, top_d)
        total_d = total_d * tl.exp(top_d - larger) + tl.sum(tl.exp(z_d - larger[:, None]), 1)
        top_d = larger
        best, where = _best(z_q, column, vocabulary)
        id_q = tl.where(best > top_q, where, id_q)
        larger = tl.maximum(best, top_q)
        total_q = total_q * tl.exp(top_q - larger) + tl.sum(tl.exp(z_q - larger[:, None]), 1)
        top_q = larger
    # Six columns [splits, states]; ids are exact in fp32 up to 2^24.
    size = tl.num_programs(1) * states
    part_ptr += split * states + state
    state_in = state < states
    tl.store(part_ptr, top_d + tl.log(total_d), mask=state_in)
    tl.store(part_ptr + size, top_d, mask=state_in)
    tl.store(part_ptr + 2 * size, id_d.to(tl.float32), mask=state_in)
    tl.store(part_ptr + 3 * size, top_q + tl.log(total_q), mask=state_in)
    tl.store(part_ptr + 4 * size, top_q, mask=state_in)
    tl.store(part_ptr + 5 * size, id_q.to(tl.float32), mask=state_in)


@triton.jit(do_not_specialize=["states"])
def decisions_kernel(
    dense_ptr,
    quant_ptr,
    head_ptr,
    bias_ptr,
    log_dense_ptr,
    log_quant_ptr,
    reference_ptr,
    part_ptr,
    states,
    vocabulary,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    STATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    state = tl.program_id(0) * STATES + tl.arange(0, STATES)
    state_in = state < states
    split = tl.program_id(1)
    log_d = tl.load(log_dense_ptr + state, mask=state_in, other=0.0)
    log_q = tl.load(log_quant_ptr + state, mask=state_in, other=0.0)
    reference = tl.load(reference_ptr + state, mask=state_in, other=0).to(tl.int32)
    js = tl.zeros([STATES], tl.float32)
    kl = tl.zeros([STATES], tl.float32)
    reference_d = tl.zeros([STATES], tl.float32)
    reference_q = tl.zeros([STATES], tl.float32)
    rival = tl.zeros([STATES], tl.int32)
    rival_d = tl.zeros([STATES], tl.float32)
    rival_q = tl.full([STATES], -float("inf"), tl.float32)
    for tile in range(SPLIT):
        column = (split * SPLIT + tile) * COLUMNS + tl.arange(0, COLUMNS)
        z_d, z_q = _logits(
            dense_ptr, quant_ptr, head_ptr, bias_ptr, state, column, states, vocabulary,
            WIDTH, BIAS, STATES, COLUMNS, DEPTH,
        )  # fmt: skip
        column_in = column < vocabulary
        p, q = _log_softmax(z_d, log_d, column_in), _log_softmax(z_q, log_q, column_in)
        kl += tl.sum(_kl_terms(p, q, column_in), 1)
        terms = -tl.exp(p) * _log_mean(q - p) - tl.exp(q) * _log_mean(p - q)
        js += tl.sum(tl.where(column_in[None, :], terms, 0.0), 1)
        is_reference = column[None, :] == reference[:, None]
        reference_d += tl.sum(tl.where(is_reference, z_d, 0.0), 1)
        reference_q += tl.sum(tl.where(is_reference, z_q, 0.0), 1)
        best, where = _best(tl.where(is_reference, -float("inf"), z_q), column, vocabulary)
        better = best > rival_q
        rival = tl.where(better, where, rival)
        rival_d = tl.where(better, tl.sum(tl.where(column[None, :] == where[:, None], z_d, 0.0), 1), rival_d)
        rival_q = tl.where(better, best, rival_q)
    size = tl.num_programs(1) * states
    part_ptr += split * states + state
    tl.store(part_ptr, js, mask=state_in)
    tl.store(part_ptr + size, kl, mask=state_in)
    tl.store(part_ptr + 2 * size, rival.to(tl.float32), mask=state_in)
    tl.store(part_ptr + 3 * size, reference_d, mask=state_in)
    tl.store(part_ptr + 4 * size, reference_q, mask=state_in)
    tl.store(part_ptr + 5 * size, rival_d, mask=state_in)
    tl.store(part_ptr + 6 * size, rival_q, mask=state_in)


@triton.jit(do_not_specialize=["states"])
def kl_kernel(
    dense_ptr,
    quant_ptr,
    head_ptr,
    bias_ptr,
    log_dense_ptr,
    log_quant_ptr,
    part_ptr,
    states,
    vocabulary,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    STATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    state = tl.program_id(0) * STATES + tl.arange(0, STATES)
    state_in = state < states
    split = tl.program_id(1)
    log_d = tl.load(log_dense_ptr + state, mask=state_in, other=0.0)
    log_q = tl.load(log_quant_ptr + state, mask=state_in, other=0.0)
    kl = tl.zeros([STATES], tl.float32)
    for tile in range(SPLIT):
        column = (split * SPLIT + tile) * COLUMNS + tl.arange(0, COLUMNS)
        z_d, z_q = _logits(
            dense_ptr, quant_ptr, head_ptr, bias_ptr, state, column, states, vocabulary,
            WIDTH, BIAS, STATES, COLUMNS, DEPTH,
        )  # fmt: skip
        column_in = column < vocabulary
        kl += tl.sum(_kl_terms(_log_softmax(z_d, log_d, column_in), _log_softmax(z_q, log_q, column_in), column_in), 1)
    tl.store(part_ptr + split * states + state, kl, mask=state_in)


@triton.jit(do_not_specialize=["states"])
def kl_slope_kernel(
    dense_ptr,
    quant_ptr,
    head_ptr,
    bias_ptr,
    log_dense_ptr,
    log_quant_ptr,
    grad_ptr,
    slope_ptr,
    first,
    width,
    states,
    vocabulary,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    STATES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """d KL / d z_Q times what flows in, [states, width], for the vocabulary from `first` on."""
    state = tl.program_id(0) * STATES + tl.arange(0, STATES)
    state_in = state < states
    local = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z_d, z_q = _logits(
        dense_ptr, quant_ptr, head_ptr, bias_ptr, state, first + local, states, vocabulary,
        WIDTH, BIAS, STATES, COLUMNS, DEPTH,
    )  # fmt: skip
    log_d = tl.load(log_dense_ptr + state, mask=state_in, other=0.0)
    log_q = tl.load(log_quant_ptr + state, mask=state_in, other=0.0)
    grad = tl.load(grad_ptr + state, mask=state_in, other=0.0)
    slope = (tl.exp(z_q - log_q[:, None]) - tl.exp(z_d - log_d[:, None])) * grad[:, None]
    inside = state_in[:, None] & (local < width)[None, :]
    at = slope_ptr + state.to(tl.int64)[:, None] * width + local[None, :]
    tl.store(at, slope.to(slope_ptr.dtype.element_ty), mask=inside)
