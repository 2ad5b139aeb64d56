"""Two methods in a row: smoothing and ratios of the first place the grid, the second chooses the codes on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onptq.bank import Trajectory
from onptq.methods.gptq import gptq_on
from onptq.methods.layerwise import answered_sequences
from onptq.methods.resume import BlockStore
from onptq.methods.search import search_on
from onptq.methods.signround import STEPS, signround_on
from onptq.methods.smoothquant import smoothquant
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta

STAGE = "search"  # of the store: blocks whose search is finished

Advance = Callable[[int], None]


def smoothquant_gptq(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Advance = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    settled: bool = False,
    store: BlockStore | None = None,
) -> Theta:
    """GPTQ's codes behind SmoothQuant's smoothing, which sees the prompts alone; rows have their full range."""
    sequences = answered_sequences(policy, prompts, responses)
    grid = smoothquant(policy, prompts)
    return gptq_on(policy, sequences, advance, init=grid, settled=settled, store=store)


def search_gptq(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Advance = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    settled: bool = False,
    store: BlockStore | None = None,
) -> Theta:
    """GPTQ's codes on the searched grid."""
    sequences = answered_sequences(policy, prompts, responses)
    grid = search_on(policy, sequences, store=store and store.within(STAGE))
    return gptq_on(policy, sequences, advance, init=grid, settled=settled, store=store)


def search_signround(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Advance = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    steps: int = STEPS,
    settled: bool = False,
    store: BlockStore | None = None,
) -> Theta:
    """SignRound's codes on the searched grid."""
    sequences = answered_sequences(policy, prompts, responses)
    grid = search_on(policy, sequences, store=store and store.within(STAGE))
    return signround_on(policy, sequences, advance, init=grid, steps=steps, settled=settled, store=store)
