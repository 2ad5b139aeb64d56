"""Base methods: data to theta. Each is one file; its result can be shipped as it is, or be what calibration starts from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onptq.engine.prompts import EncodedPrompts
from onptq.methods.guards import require_finite_theta
from onptq.methods.inputs import fit_scales
from onptq.models.encoding import EncodedPrompt
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.registry import METHODS

if TYPE_CHECKING:
    from onptq.methods.resume import BlockStore

Advance = Callable[[int], None]


def initialize(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    recipe: Recipe,
    advance: Advance,
    *,
    settled: bool = False,
    store: BlockStore | None = None,
) -> Theta:
    """theta^(0) of a recipe; `settled` where its codes will not change any more, `store` has the blocks that are done."""
    options = {"steps": recipe.init_steps, "settled": settled, "store": store}
    given = {name: value for name, value in options.items() if value is not None and accepts(recipe.init, name)}
    used = EncodedPrompts.of(prompts).spread(recipe.data.init_prompts)
    theta = run(recipe.init, policy, used, advance, **given)
    fit_scales(policy, theta, used)
    require_finite_theta(theta)
    return theta


def run(name: str, policy: Policy, prompts: Sequence[EncodedPrompt], advance: Advance, **options: Any) -> Theta:
    """The theta of the base method `name`, with its own defaults for what `options` leave out."""
    theta: Theta = METHODS[name](policy, prompts, advance, **options)
    return theta


def accepts(name: str, option: str) -> bool:
    """Whether a base method has a keyword: `steps` to learn step by step, `settled` to choose a code for every weight."""
    return option in inspect.signature(METHODS[name]).parameters


def default_steps(name: str) -> int | None:
    """The steps that a base method takes for each block if a recipe says nothing; None where it takes no steps."""
    steps = inspect.signature(METHODS[name]).parameters.get("steps")
    return None if steps is None else int(steps.default)
