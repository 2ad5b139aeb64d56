"""The cycle as its definitions read: every state prefilled alone through transformers' own forward, no cache, no batch.

`Scene` is what a naive and a fast computation share: one policy, a few prompts of different shapes, and the naive answers,
computed once per session because they are slow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import Tiny, encode_one
from torch import Tensor

from onptq.bank import Trajectory
from onptq.methods.rtn import rtn
from onptq.models.encoding import EncodedPrompt
from onptq.models.language_model import Side
from onptq.models.processing import ModelInputs
from onptq.quantizer import numerics
from onptq.quantizer.numerics import FakeQuantize, fake_quantize_activations
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta

WEIGHT_ONLY, WITH_ACTIVATIONS = ("W4A16", torch.float32), ("W4A8", torch.float64)
EXACT = (WEIGHT_ONLY, WITH_ACTIVATIONS)  # schemes with a dtype in which two orders of summation give the same tokens


def scenes(families: Sequence[str]) -> pytest.MarkDecorator:
    """Parameters `family`, `scheme` and `dtype`: the first family in both exact schemes, each further one in one of them."""
    further = [(family, *EXACT[place % 2]) for place, family in enumerate(families[1:])]
    cases = [*((families[0], *exact) for exact in EXACT), *further]
    return pytest.mark.parametrize(("family", "scheme", "dtype"), cases, ids=[f"{one[0]}-{one[1]}" for one in cases])


@contextmanager
def without_ties() -> Iterator[None]:
    """Activation steps that put a token's largest value on a code instead of halfway between two.

    The deployed format divides by 127.5, so a largest value that is negative lands on -127.5, and the last bit of it, which
    depends on the order of summation, decides between -127 and -128: in any dtype two ways to compute Q then differ here and
    there by a whole code. With 127 only accidental ties are left, and float64 has none of those.
    """

    def quantize(x: Tensor, bits: int) -> Tensor:
        step = x.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
        step = torch.where(step == 0, torch.finfo(x.dtype).eps, step)
        return FakeQuantize.apply(x, step, None, None, bits, x.dtype)  # type: ignore[no-untyped-call, no-any-return]

    with patch.object(numerics, "fake_quantize_activations", quantize):
        yield


@contextmanager
def in_double() -> Iterator[None]:
    """theta and whatever else the library computes in float32 in float64: no value comes so near a tie that two ways to
    compute it round it to different codes, and what follows from a code can be compared digit by digit."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(Tensor, "float", Tensor.double):
            yield
    finally:
        torch.set_default_dtype(usual)


@contextmanager
def deployed_rounding() -> Iterator[None]:
    """The real activation steps again, inside `without_ties`: for what must hold bit for bit, ties or not."""
    with patch.object(numerics, "fake_quantize_activations", fake_quantize_activations):
        yield


# --- one state at a time ----------------------------------------------------------------------------------------------


def extended(inputs: ModelInputs, response: Sequence[int]) -> dict[str, Tensor]:
    """The prompt's arguments with a response behind it, as somebody would write them who calls the model by hand."""
    tensors, count = dict(inputs.tensors), len(response)
    tail = {
        "input_ids": torch.tensor([response], dtype=torch.long).view(1, count),
        "attention_mask": torch.ones(1, count, dtype=torch.long),
        "mm_token_type_ids": torch.zeros(1, count, dtype=torch.long),
        "token_type_ids": torch.zeros(1, count, dtype=torch.long),
    }
    return tensors | {name: torch.cat((tensors[name], tail[name]), dim=1) for name in tail.keys() & tensors.keys()}


@torch.no_grad()
def forward(policy: Policy, side: Side, inputs: ModelInputs, response: Sequence[int] = ()) -> Tensor:
    """Logits [1 + T, V] that predict response token 1, ..., T + 1."""
    with policy.speaking(side):
        logits: Tensor = policy.model(**extended(inputs, response), use_cache=False).logits[0]
    return logits[inputs.length - 1 :]


def next_logits(policy: Policy, side: Side, inputs: ModelInputs, response: Sequence[int]) -> np.ndarray:
    return forward(policy, side, inputs, response)[-1].double().numpy()


def naive_rollout(policy: Policy, inputs: ModelInputs, limit: int, eos: Collection[int] = ()) -> Trajectory:
    """Greedy tokens of Q, the first end-of-sequence token included; `prompt` is left at 0."""
    response: list[int] = []
    while len(response) < limit and not (response and response[-1] in eos):
        response.append(int(next_logits(policy, "Q", inputs, response).argmax()))
    return Trajectory(0, tuple(response), finished=response[-1] in eos)


def probabilities(logits: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)  # type: ignore[no-any-return]


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def js(p: np.ndarray, q: np.ndarray) -> float:
    return 0.5 * kl(p, (p + q) / 2) + 0.5 * kl(q, (p + q) / 2)


@dataclass(frozen=True)
class NaiveState:
    reference: int
    competitor: int
    quantized: int
    margin_dense: float
    margin_quant: float
    js: float
    kl: float


def naive_compare(policy: Policy, inputs: ModelInputs, prefix: Sequence[int]) -> NaiveState:
    """Eqs. 3-7 at the state after `prefix`."""
    dense, quant = (next_logits(policy, side, inputs, prefix) for side in ("D", "Q"))
    reference = int(dense.argmax())
    competitor = max((a for a in range(len(quant)) if a != reference), key=lambda a: (quant[a], -a))
    p, q = probabilities(dense), probabilities(quant)
    return NaiveState(
        reference,
        competitor,
        int(quant.argmax()),
        float(dense[reference] - dense[competitor]),
        float(quant[reference] - quant[competitor]),
        js(p, q),
        kl(p, q),
    )


@dataclass(frozen=True)
class NaiveFork:
    """Both branches followed for `depth` tokens, whatever they are; `js[h - 1]` separates the states at offset h."""

    reference: tuple[int, ...]
    competitor: tuple[int, ...]
    js: tuple[float, ...]
    kl: tuple[float, ...]

    def horizon(self, limit: int, eos: Collection[int]) -> int:
        """s_{t+h} is a state of both branches iff none of the h tokens before it ends either."""
        valid = 0
        while valid < limit and self.reference[valid] not in eos and self.competitor[valid] not in eos:
            valid += 1
        return valid

    def consequence(self, limit: int, eos: Collection[int], divergence: str = "js") -> float:
        """Eq. 8."""
        valid = self.horizon(limit, eos)
        return math.fsum(getattr(self, divergence)[:valid]) / valid if valid else 0.0


def naive_branch(
    policy: Policy,
    inputs: ModelInputs,
    prefix: Sequence[int],
    reference: int,
    competitor: int,
    depth: int,
    side: Side = "Q",
) -> NaiveFork:
    """Force each token, let one side continue greedily by prefilling everything again, ask D at every state of the branch."""
    branches, dense = [], []
    for forced in (reference, competitor):
        tokens = [forced]
        while len(tokens) < depth:
            tokens.append(int(next_logits(policy, side, inputs, [*prefix, *tokens]).argmax()))
        branches.append(tuple(tokens))
        dense.append(probabilities(forward(policy, "D", inputs, [*prefix, *tokens])[-depth:].double().numpy()))
    pairs = list(zip(*dense, strict=True))
    reference_tokens, competitor_tokens = branches
    separations = tuple(js(p, q) for p, q in pairs), tuple(kl(p, q) for p, q in pairs)
    return NaiveFork(reference_tokens, competitor_tokens, *separations)


@contextmanager
def decoder_forwards(policy: Policy) -> Iterator[list[tuple[Side, int]]]:
    """Side and token slots of every forward through the decoder's first block while the block lasts."""
    seen: list[tuple[Side, int]] = []

    def count(_: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(("Q" if policy.switch.quantized else "D", args[0].shape[1]))

    hook = policy.structure.blocks[0].module.register_forward_pre_hook(count)
    try:
        yield seen
    finally:
        hook.remove()


# --- what naive and fast are compared on --------------------------------------------------------------------------------


def make_policy(tiny: Tiny, scheme: str, dtype: torch.dtype, eos: Collection[int] = ()) -> Policy:
    return tiny.policy(scheme, dtype, eos)


def random_theta(policy: Policy, seed: int = 0) -> Theta:
    """Smoothing and step ratios as a calibration might leave them."""
    random, theta = torch.Generator().manual_seed(seed), rtn(policy)
    for u in theta.smoothing.values():
        u.normal_(0, 0.3, generator=random)
    for ratio in theta.ratio.values():
        ratio.uniform_(0.6, 1.0, generator=random).log_()
    return theta


@dataclass
class Scene:
    """A frozen policy without end-of-sequence tokens, and prompts with pictures of several sizes, sounds, or neither."""

    tiny: Tiny
    scheme: str
    dtype: torch.dtype
    ordinals: tuple[int, ...] = (0, 1, 2, 4, 7)
    _rollouts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _states: dict[tuple[int, int], NaiveState] = field(default_factory=dict)
    _forks: dict[tuple[int, int, Side], NaiveFork] = field(default_factory=dict)

    @cached_property
    def policy(self) -> Policy:
        return self.policy_with(())

    @cached_property
    def theta(self) -> Theta:
        return random_theta(self.policy)

    def policy_with(self, eos: Collection[int]) -> Policy:
        policy = make_policy(self.tiny, self.scheme, self.dtype, eos)
        policy.freeze(random_theta(policy), keep="floats")
        return policy

    @cached_property
    def inputs(self) -> Mapping[int, ModelInputs]:
        return {ordinal: self.tiny.inputs(ordinal) for ordinal in self.ordinals}

    def encoded(self, policy: Policy) -> list[EncodedPrompt]:
        return [encode_one(policy, one, ordinal) for ordinal, one in self.inputs.items()]

    def batch_tokens(self, batches: str, limit: int) -> int:
        """Slots per batch that put all prompts into "one", or two or three at a time into "several"."""
        longest = limit + max(one.length for one in self.inputs.values())
        return longest * {"one": len(self.ordinals), "several": 2}[batches]

    def rollout(self, ordinal: int, limit: int, eos: Collection[int] = ()) -> Trajectory:
        """What does not end is the same whatever would have ended it, so the longest rollout is computed once."""
        known = self._rollouts.get(ordinal, ())
        if len(known) < limit:
            known = self._rollouts[ordinal] = naive_rollout(self.policy, self.inputs[ordinal], limit).tokens
        end = next((t for t, token in enumerate(known[:limit], start=1) if token in eos), None)
        return Trajectory(ordinal, known[: end or limit], finished=end is not None)

    def state(self, ordinal: int, t: int) -> NaiveState:
        if (ordinal, t) not in self._states:
            prefix = self.rollout(ordinal, t).tokens[: t - 1]
            self._states[ordinal, t] = naive_compare(self.policy, self.inputs[ordinal], prefix)
        return self._states[ordinal, t]

    def fork(self, ordinal: int, t: int, depth: int, side: Side = "Q") -> NaiveFork:
        key = ordinal, t, side
        if key not in self._forks or len(self._forks[key].js) < depth:
            state, prefix = self.state(ordinal, t), self.rollout(ordinal, t).tokens[: t - 1]
            self._forks[key] = naive_branch(
                self.policy, self.inputs[ordinal], prefix, state.reference, state.competitor, depth, side
            )
        return self._forks[key]


_scenes: dict[tuple[str, str, torch.dtype], Scene] = {}


def scene(tiny: Tiny, scheme: str, dtype: torch.dtype) -> Scene:
    """The same scene for the whole session."""
    key = str(tiny.folder), scheme, dtype
    return _scenes.setdefault(key, Scene(tiny, scheme, dtype))
