"""A proof of every foldable pair on the block itself: with random scales and nothing rounded, its output stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onptq.models.attention import trusted_attention
from onptq.models.structure import EXPERTS, Block, Lent, Structure, place
from onptq.quantizer.norms import divided_gain, gain_offset
from onptq.quantizer.theta import Theta, log_scales_in, log_scales_out, pair_key, pair_width
from onptq.quantizer.weights import smoothed

TOKENS = 8
SIZE = 1e-2  # of the residual stream, lest it hide what the block adds: norms undo it there
REACH = 1.0  # largest |log s|
SHARE = 1e-2  # of the change that the consumers' scales alone make
NOISE = 1e-5  # of the output's largest entry, in float32


def prove(structure: Structure) -> tuple[Structure, tuple[str, ...]]:
    """The structure with those pairs alone that fold, and a sentence on every pair that does not.

    Blocks of the same classes, with parameters of the same shapes, share their code: the first of them is tried for all."""
    failed: dict[object, list[str]] = {}
    where: dict[str, list[str]] = {}
    blocks = []
    for block in structure.blocks:
        kind = _kind(block)
        if kind not in failed:
            failed[kind] = list(_failing(structure, block))
        for pair in failed[kind]:
            pair_of = f"{block.producers[pair]} -> {', '.join(block.consumers(pair))}"
            where.setdefault(pair_of, []).append(f"layers.{block.index} ({type(block.module).__name__})")
        blocks.append(without(block, failed[kind]))
    sentences = (
        f"{pair} does not fold in {len(found)} of {len(blocks)} layers, e.g. {found[0]}: it is not smoothed there"
        for pair, found in where.items()
    )
    return replace(structure, blocks=tuple(blocks)), tuple(sentences)


def without(block: Block, pairs: Sequence[str]) -> Block:
    """The block without these foldable pairs."""
    kept = {pair: producer for pair, producer in block.producers.items() if pair not in pairs}
    return block if len(kept) == len(block.producers) else replace(block, producers=kept)


def _kind(block: Block) -> object:
    classes = tuple(type(module) for module in block.module.modules())
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.module.named_parameters())
    return classes, shapes, block.layer_type, block.lends, tuple(block.producers.items())


@torch.no_grad()
def _failing(structure: Structure, block: Block) -> Iterator[str]:
    """The pairs whose scales change what the block computes, in float32."""
    device, module = structure.embedding.weight.device, block.module
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    hidden, own = structure.parted(
        torch.randn(1, TOKENS, structure.width + structure.beside, generator=draw).to(device)
    )
    hidden = SIZE * hidden
    positions = torch.arange(TOKENS, device=device).expand(structure.axes, 1, -1)
    rotary = structure.rotary(hidden, positions)
    states = torch.randn(2, 1, block.kv_heads, TOKENS, block.head_dim, generator=draw).to(device).unbind()

    def output(changed: Mapping[str, Tensor]) -> Tensor:
        """What the block adds up to, and what it lends: other layers read it as it is."""
        lent: Lent = {block.layer_type: states} if block.borrows else {}
        arguments = structure.arguments(block, positions, None, rotary, None, lent) | own[block.index]
        with trusted_attention():
            out: Tensor = functional_call(module, tensors | dict(changed), (hidden,), arguments)
        lending = lent[block.layer_type] if block.lends else ()
        return torch.cat([tensor.flatten() for tensor in (out, *lending)])

    dense = output({})
    noise = NOISE * float(dense.abs().max())
    for pairs in _tried_at_once(block):
        consumed, produced = dict[str, Tensor](), dict[str, Tensor]()
        unknown = []
        for pair in pairs:
            u = REACH * (2 * torch.rand(pair_width(block, pair), generator=draw) - 1)
            theta, alone = (
                Theta({pair_key(block, pair): u.to(device)}),
                without(block, [other for other in block.producers if other != pair]),
            )
            consumed |= {
                f"{place(name)}.weight": smoothed(tensors[f"{place(name)}.weight"], log_in, None)
                for name in (*block.consumers(pair), *block.followers(pair))
                if (log_in := log_scales_in(theta, alone, name)) is not None
            }
            divided = _divided(module, tensors, theta, alone, block.producers[pair])
            produced |= divided or {}
            unknown += [pair] if divided is None else []
        if unknown:
            yield from unknown
            continue
        change = float((output(consumed) - dense).abs().max())
        error = float((output(consumed | produced) - dense).abs().max())
        if not error <= SHARE * change + noise:
            yield from pairs


def _tried_at_once(block: Block) -> Iterator[list[str]]:
    """The foldable pairs one by one, but those of all experts together: they share their code."""
    yield from ([pair] for pair in block.producers if not pair.startswith(EXPERTS))
    experts = [pair for pair in block.producers if pair.startswith(EXPERTS)]
    yield from [experts] if experts else []


def _divided(
    module: nn.Module, tensors: Mapping[str, Tensor], theta: Theta, block: Block, producer: str
) -> dict[str, Tensor] | None:
    """The producer's tensors, by name, over its scales; None for a norm that multiplies with neither w nor 1 + w."""
    log_out = log_scales_out(theta, block, producer)
    assert log_out is not None
    name = place(producer)
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    if producer in block.linears:
        divided = {f"{name}.weight": smoothed(weight, None, log_out)}
        return divided if bias is None else divided | {f"{name}.bias": bias / log_out.exp()}
    offset = gain_offset(module.get_submodule(name))
    return None if offset is None else {f"{name}.weight": divided_gain(weight, log_out, offset)}
