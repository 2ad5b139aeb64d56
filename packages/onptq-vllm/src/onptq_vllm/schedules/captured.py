"""How long a GPU computes, whatever its host takes to launch it."""

from __future__ import annotations

from collections.abc import Callable

import torch

REPLAYS = 3


def captured_seconds(operation: Callable[[int], object], calls: int) -> float:
    """Of one call, the least over replays of a CUDA graph of `calls`; each is told its number."""
    torch.cuda.synchronize()
    operation(0)  # compiles, allocates
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            operation(call)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seen = []
    for _ in range(REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seen.append(begin.elapsed_time(end) * 1e-3 / calls)
    return float(min(seen))
