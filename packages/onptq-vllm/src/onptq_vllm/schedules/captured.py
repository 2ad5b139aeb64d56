"""Seconds that a GPU computes, without the launches of its host."""

from __future__ import annotations

from collections.abc import Callable

import torch

REPLAYS = 3


def captured_seconds(operation: Callable[[int], object], calls: int) -> float:
    """Seconds of one call: the least over replays of a CUDA graph of `calls`. `operation` gets the number of its
    call."""
    torch.cuda.synchronize()
    operation(0)  # compiles, allocates
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            operation(call)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3 / calls)
    return float(min(seconds))
