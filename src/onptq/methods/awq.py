"""AWQ: smoothing from mean |x| with a searched exponent, then a searched clip of every weight group.

As its authors' code: 20 exponents per pair, judged by the output of the attention, the MLP or the linear itself with everything
else dense, on the dense model's inputs; 10 clips per row and group, judged by their partial outputs, for all linears but q and k,
whose product is hard to clip for. Beyond it: v -> o is scaled under GQA too, with one scale per KV channel, and in schemes that
quantize activations a candidate is judged with its activations quantized. All experts share the scales of what a norm feeds,
judged by their sum; each has scales between up and down, judged on its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from onptq.bank import Trajectory
from onptq.methods.experts import inputs_of, is_cold, read_by
from onptq.methods.guards import require_finite_error
from onptq.methods.layerwise import Stream, answered_sequences, open_streams
from onptq.methods.linears import (
    by_query_head,
    dense_weight,
    divided,
    quantized_input,
    quantized_linears,
    replaced,
    tensor_scale,
)
from onptq.methods.resume import BlockStore, fitted_blocks
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Free, Theta, log_scales_in, log_scales_out, pair_key
from onptq.quantizer.weights import fake_quantize_weight, smoothed, to_groups
from onptq.schemes import Scheme

EXPONENTS = tuple(n / 20 for n in range(20))  # s = mean|x|^exponent; the first leaves everything as it is
CLIPS = tuple(1 - n / 20 for n in range(10))  # 1 down to 0.55 of the range
CLIPPED = ("v_proj", "o_proj", "in_proj_z", "out_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
CLIP_TOKENS = 512
FLOOR = 1e-4
ROWS = 256  # rows clipped at a time: their partial outputs are [rows, groups, tokens]


@torch.no_grad()
def awq(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    store: BlockStore | None = None,
) -> Theta:
    """AWQ's theta on the prompts and responses, the dense model's own greedy ones by default."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    streams = open_streams(policy, answered_sequences(policy, prompts, responses))
    with policy.speaking("D"):
        for block in fitted_blocks(policy, theta, streams, store, advance):
            _fit(policy, theta, block, streams)
    return theta


def _fit(policy: Policy, theta: Theta, block: Block, streams: Sequence[Stream]) -> None:
    """Search one block's smoothing and clips, in place."""
    inputs = [inputs_of(stream, block) for stream in streams]
    for pair in block.producers:
        cases = [(stream, x[pair]) for stream, x in zip(streams, inputs, strict=True) if pair in x]
        if cases and not is_cold(pair, sum(len(stream.tokens(x)) for stream, x in cases)):
            theta.smoothing[pair_key(block, pair)] = _best_scales(policy, theta, block, pair, cases)
    clipped = [name for name in block.linears if name.rpartition(".")[2] in CLIPPED]
    for name in clipped:
        if not policy.scheme.of(block.path(name)).quantizes_weights:
            continue
        read = ((stream, read_by(block, name, x)) for x, stream in zip(inputs, streams, strict=True))
        tokens = [stream.tokens(x) for stream, x in read if x is not None]
        if tokens and not is_cold(name, sum(map(len, tokens))):
            theta.linears[block.path(name)] = Free(_best_clips(policy, theta, block, name, torch.cat(tokens)))


def scale_grid(magnitude: Tensor) -> Iterator[Tensor]:
    """log s for every exponent, from mean |x| per scale; the gauge is the authors': sqrt(max s * min s) = 1."""
    for exponent in EXPONENTS:
        u = magnitude.pow(exponent).clamp(min=FLOOR).log()
        yield u - (u.max() + u.min()) / 2


def _best_scales(
    policy: Policy, theta: Theta, block: Block, pair: str, inputs: Sequence[tuple[Stream, Tensor]]
) -> Tensor:
    """log s with the least squared error of the attention's, the MLP's or the linear's own output."""
    key = pair_key(block, pair)
    cases = [(stream, x, stream.unit(block, pair, x)) for stream, x in inputs]
    magnitude = torch.cat([stream.tokens(x).abs().float() for stream, x, _ in cases]).mean(0)
    best, least = theta.smoothing[key], torch.inf
    for u in scale_grid(by_query_head(magnitude, block, pair).mean(0)):
        theta.smoothing[key] = u
        with replaced(block, quantized_linears(policy, theta, block, [pair])):
            errors = [stream.tokens(stream.unit(block, pair, x) - dense) for stream, x, dense in cases]
        error = sum(float(each.float().square().sum()) for each in errors)
        if error < least:
            best, least = u, error
    require_finite_error(least, key)
    return best


def _best_clips(policy: Policy, theta: Theta, block: Block, name: str, x: Tensor) -> Tensor:
    """Log of the share of its range that every row and group keeps, by the squared error of their partial outputs."""
    x = x[:: max(1, len(x) // CLIP_TOKENS)]  # [tokens, I]
    log_in = log_scales_in(theta, block, name)
    weight = smoothed(dense_weight(block, name), log_in, log_scales_out(theta, block, name))
    scheme = policy.scheme.of(block.path(name))
    rounded, dense = quantized_input(scheme, log_in, x), divided(x.float(), log_in)
    ratios = theta.linears[block.path(name)].ratio.split(ROWS // scheme.block_rows)
    rows = zip(weight.split(ROWS), ratios, strict=True)
    common = tensor_scale(block, name)
    return torch.cat(
        [_clip_rows(policy, scheme, part, full, rounded, dense, common, block.path(name)) for part, full in rows]
    )


def _clip_rows(
    policy: Policy,
    scheme: Scheme,
    weight: Tensor,
    full: Tensor,
    rounded: Tensor,
    dense: Tensor,
    common: Tensor | None,
    what: str,
) -> Tensor:
    """The best log clip of each row and group of the linear `what`, on dense and on rounded inputs [tokens, I]; `full` is the
    one of no clip."""

    def partial(x: Tensor, weight: Tensor) -> Tensor:  # [O, G, tokens]
        groups = full.shape[1]
        return torch.einsum(
            "tgi,ogi->ogt", x.float().view(len(x), groups, -1), weight.float().view(len(weight), groups, -1)
        )

    target = partial(dense, weight)
    best, least = full, torch.full_like(full, torch.inf)
    for clip in CLIPS:
        ratio = torch.full_like(full, clip).log()
        grid = scheme, policy.storage, policy.dtype, common
        clipped = fake_quantize_weight(weight, None, None, ratio, None, *grid)
        error = (partial(rounded, clipped) - target).square().sum(-1)
        error = to_groups(error, full, scheme.block_rows).sum(-1)
        better = error < least
        best, least = torch.where(better, ratio, best), torch.where(better, error, least)
    require_finite_error(least, what)
    return best
