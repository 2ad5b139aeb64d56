"""The files of a checkpoint and what goes into each: by sizes alone, so that every process of a job knows it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onptq.checkpoint.exportable import growth
from onptq.checkpoint.shards import MAX_SHARD_BYTES
from onptq.checkpoint.source import Source
from onptq.ranks import Ranks
from onptq.schemes import Scheme

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass
class Unit:
    """What lies in one shard: a layer of the decoder, or one tensor outside of its layers."""

    layer: int | None
    names: list[str]  # of the source's tensors
    bytes: int  # in the output


def plan_shards(source: Source, scheme: Scheme, limit: int | None = None) -> list[list[Unit]]:
    """The units of every shard, which holds at most `limit` bytes or one unit."""
    limit, prefix = MAX_SHARD_BYTES if limit is None else limit, source.decoder.prefix
    layers: dict[int, Unit] = {}
    others = []
    for name, tensor in source.whole.tensors.items():
        layer = layer_of(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if layer is None:
            others.append(Unit(None, [name], tensor.nbytes))
        else:
            unit = layers.setdefault(layer, Unit(layer, [], 0))
            unit.names.append(name)
            unit.bytes += tensor.nbytes
    for name, added in growth(source, scheme):
        layers[layer_of(name) or 0].bytes += added
    shards: list[list[Unit]] = [[]]
    for unit in (*(layers[layer] for layer in sorted(layers)), *others):
        if shards[-1] and sum(one.bytes for one in shards[-1]) + unit.bytes > limit:
            shards.append([])
        shards[-1].append(unit)
    return shards


def own_layers(source: Source, scheme: Scheme, ranks: Ranks, limit: int | None = None) -> list[int]:
    """The layers of the decoder that a rank folds and writes, in their order."""
    shards = plan_shards(source, scheme, limit)[ranks.rank :: ranks.size]
    return sorted(unit.layer for shard in shards for unit in shard if unit.layer is not None)


def layer_of(name: str) -> int | None:
    """The layer of a name that is relative to the decoder."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])
