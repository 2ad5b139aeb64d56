"""`search`, then a rounding method on its grid: smoothing and ratios place the grid, the rounding method chooses the codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onptq.bank import Trajectory
from onptq.methods.gptq import gptq_on
from onptq.methods.layerwise import answered_sequences
from onptq.methods.resume import BlockStore
from onptq.methods.search import search_on
from onptq.methods.signround import STEPS, signround_on
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta

STAGE = "search"  # of the store: blocks whose search is finished

Advance = Callable[[int], None]


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
