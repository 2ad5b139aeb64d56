"""A short measurement of the device that the run will use: two decoder blocks of the model's shapes, run for real."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import lcm, sqrt

import torch
from torch import Tensor

from onptq.engine.budget import Held
from onptq.models.decoder import Tokens
from onptq.plan.parts import Shapes
from onptq.plan.seconds import Pace, Rates
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.schemes import Scheme

BLOCKS = 2
FEW, MANY = 8, 256  # tokens of the two forwards that a pace is made of
LARGEST = {"cpu": 2**21, "cuda": 2**28}  # parameters of a block; of a larger one all widths are divided alike
VOCABULARY = 2**12
REPETITIONS, SECONDS = 5, 0.2  # of each measurement: as often as the time allows, and once at least


def probe_rates(
    shapes: Shapes, scheme: Scheme, keep: Held, settled: bool, device: torch.device, dtype: torch.dtype
) -> Rates:
    """Rates of blocks like the model's. `keep` and `settled` say what is held of Q's weights and of theta's codes.

    Threads that wait for a busy core can take fifty times as long as one alone, and the next minute they do not. So the
    run's threads count only where they are faster than a single one, a single one counts by the time it computes, and
    each time is the shortest of several.
    """
    sizes = _shrunk(shapes, scheme, LARGEST[device.type])
    policy = _policy(sizes, scheme, device, dtype)
    with _fastest_threads(policy) as slowdown:
        paces = list(_paces(policy, keep, settled))
        states = torch.randn(MANY, sizes.hidden, dtype=dtype, device=device)
        state = _shortest(lambda: _decide(policy, states), device) / MANY
    measured = sum(parameter.numel() for parameter in policy.structure.blocks[0].module.parameters())
    larger = shapes.block / measured, shapes.active / measured  # what a forward reads, and what each token meets
    state *= shapes.vocabulary * shapes.hidden / (VOCABULARY * sizes.hidden)
    dense, quantized, decoding, rounding, learning = (pace.scaled(*larger) for pace in paces)
    return Rates(dense, quantized, decoding, rounding, learning, state, slowdown)


def _paces(policy: Policy, keep: Held, settled: bool) -> Iterator[Pace]:
    """The paces of `Rates`, in its order."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    with policy.speaking("D"):
        yield _pace(policy, _forward)
    with policy.speaking("Q"):
        if keep == "nothing":
            policy.attach(theta)
        else:
            policy.freeze(theta, keep=keep)
        quantized = _pace(policy, _forward)
        yield quantized
        yield Pace(_replayed(policy), quantized.token) if policy.device.type == "cuda" else quantized
        policy.attach(_learnable(theta))
        rounding = _pace(policy, _learn)
        yield rounding
        if settled:
            policy.attach(_learnable(policy.settle(theta)))
        yield _pace(policy, _learn) if settled else rounding


@contextmanager
def _fastest_threads(policy: Policy) -> Iterator[float]:
    """A context with the threads that the run will have, or with one where that is faster. Gives `Rates.slowdown`."""
    if policy.device.type != "cpu":
        yield 1.0
        return
    threads, run = torch.get_num_threads(), partial(_forward, policy, _tokens(policy, MANY))
    times = _times(run, policy.device, time.perf_counter)
    try:
        torch.set_num_threads(1)
        slowdown = sum(times) / len(times) / _shortest(run, policy.device)
        if slowdown <= 1:
            torch.set_num_threads(threads)
        yield max(1.0, slowdown)
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class _Sizes:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int


def _shrunk(shapes: Shapes, scheme: Scheme, largest: int) -> _Sizes:
    """The model's own sizes; those of a block with more parameters than `largest` all divided by one number."""
    factor = min(1.0, sqrt(largest / shapes.active))
    kv_heads = max(1, round(shapes.kv // shapes.head_dim * factor))
    heads = shapes.query // shapes.kv * kv_heads

    def width(full: int) -> int:
        multiple = lcm(heads, scheme.group_size or 1)
        return max(1, round(full * factor / multiple)) * multiple

    return _Sizes(width(shapes.hidden), width(shapes.ffn), heads, kv_heads, shapes.head_dim)


def _policy(sizes: _Sizes, scheme: Scheme, device: torch.device, dtype: torch.dtype) -> Policy:
    """Blocks of Llama, which have the seven linears, norms, rotary embedding and attention of every family."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=BLOCKS,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=VOCABULARY,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return Policy(model.to(dtype), scheme)


def _learnable(theta: Theta) -> Theta:
    for tensor in (*theta.smoothing.values(), *theta.ratio.values()):
        tensor.requires_grad_()
    return theta


def _tokens(policy: Policy, count: int) -> Tokens:
    ids = torch.arange(count, device=policy.device)[None] % VOCABULARY
    slots = torch.arange(count, device=policy.device)
    mask = None if policy.device.type == "cuda" else (slots[:, None] >= slots)[None, None]
    return Tokens(policy.embed(ids), slots[None, None], mask)


@torch.no_grad()
def _forward(policy: Policy, tokens: Tokens) -> Tensor:
    return policy.run(tokens)


def _learn(policy: Policy, tokens: Tokens) -> None:
    with torch.enable_grad():
        policy.run(tokens).square().mean().backward()


@torch.no_grad()
def _decide(policy: Policy, states: Tensor) -> Tensor:
    """Logits and a divergence of them, as a loss or a comparison reads them."""
    logs = policy.logits(states).log_softmax(-1)
    return (logs.exp() * logs).sum(-1)


def _pace(policy: Policy, run: Callable[[Policy, Tokens], object]) -> Pace:
    few, many = (
        _shortest(partial(run, policy, _tokens(policy, count)), policy.device) / BLOCKS for count in (FEW, MANY)
    )
    token = max(0.0, many - few) / (MANY - FEW)
    return Pace(max(0.0, few - FEW * token), token)


def _replayed(policy: Policy) -> float:
    """Seconds of one block over few tokens as a rollout on a GPU replays it, or runs it where it cannot be recorded."""
    run = partial(_forward, policy, _tokens(policy, FEW))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        return _shortest(run, policy.device) / BLOCKS
    return _shortest(graph.replay, policy.device) / BLOCKS


def _shortest(operation: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several calls; of a single thread those in which it computes."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return min(_times(operation, device, time.thread_time if alone else time.perf_counter))


def _times(operation: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> list[float]:
    """Seconds of several calls, after one that compiles and warms up."""

    def call() -> float:
        start = clock()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - start

    call()
    times = [call()]
    while len(times) < REPETITIONS and sum(times) < SECONDS:
        times.append(call())
    return times
