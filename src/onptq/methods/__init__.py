"""Base methods: data to theta. Each is one file and can start the calibration (`init`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onptq.methods.awq import awq
from onptq.methods.blockwise import blockwise
from onptq.methods.gptq import gptq
from onptq.methods.masquant import masquant
from onptq.methods.mbq import mbq
from onptq.methods.qig import qig
from onptq.methods.rtn import rtn
from onptq.methods.search import search
from onptq.methods.searched import searched
from onptq.methods.signround import signround
from onptq.methods.smoothquant import smoothquant
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe

Method = Callable[..., Theta]

METHODS: dict[str, Method] = {
    "rtn": rtn,
    "search": search,
    "smoothquant": smoothquant,
    "awq": awq,
    "mbq": mbq,
    "qig": qig,
    "masquant": masquant,
    "blockwise": blockwise,
    "gptq": gptq,
    "signround": signround,
    "search+gptq": searched(gptq),
    "search+signround": searched(signround),
}
STEPWISE = ("blockwise", "signround", "search+signround")  # learn step by step, block by block
ROUNDING = ("gptq", "signround", "search+gptq", "search+signround")  # choose a code for every weight


def initialize(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    recipe: Recipe,
    advance: Callable[[int], None],
    *,
    settled: bool = False,
) -> Theta:
    """theta^(0) of a recipe; `settled` where its codes will not change any more."""
    options: dict[str, Any] = {}
    if recipe.init in STEPWISE and recipe.init_steps is not None:
        options["steps"] = recipe.init_steps
    if recipe.init in ROUNDING:
        options["settled"] = settled
    return METHODS[recipe.init](policy, prompts, advance, **options)
