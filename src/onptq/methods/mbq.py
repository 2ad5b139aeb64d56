"""MBQ: smoothing by grid search, with an error that weights each modality by the sensitivity of the loss to it.

Sensitivity is the mean absolute gradient of the response's cross-entropy at the output of o_proj (for the attention's pairs)
and down_proj, the MLP's (for its pairs and those of experts). A layer's ratio of a modality to the response is floored at its
median over the layers. The error of a candidate is (sum over response |d| + sum_m rho_m sum over m |d|) / tokens; the
prompt's own text counts nothing. The original has vision and captions; here audio has a ratio of its own, computed the same
way. Candidates are AWQ's: mean|x|^r for r = 0, 1/20, ..., 19/20. Rows have their full range.

Positions are the model's own (the original feeds plain ones), and v -> o is searched under GQA too, with one scale per KV channel
(the original leaves it out).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onptq.bank import Trajectory
from onptq.engine.prefixes import whole_prompts
from onptq.errors import OnPTQError
from onptq.methods.experts import BESIDE, inputs_of, is_cold
from onptq.methods.guards import not_finite, require_finite_error
from onptq.methods.layerwise import INSTRUCTION, Answered, Stream, answer_prompts, open_streams
from onptq.methods.linears import by_query_head, quantized_linears, replaced
from onptq.methods.resume import BlockStore, fitted_blocks
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.family import AUDIO, IMAGE, TEXT
from onptq.models.structure import UP_DOWN, Block
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta, pair_key

GRID = tuple(n / 20 for n in range(20))
FLOOR = 1e-4
KINDS = (TEXT, IMAGE, AUDIO)
GRADIENTS_AT = {"norm_qkv": "o_proj", "v_o": "o_proj", "norm_gate_up": "down_proj", "up_down": "down_proj"}


def mbq(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    responses: Sequence[Trajectory] | None = None,
    store: BlockStore | None = None,
) -> Theta:
    """MBQ's theta on the prompts and responses, the dense model's own greedy ones by default."""
    answered = answer_prompts(policy, prompts, responses)
    ratios = modality_ratios(policy, answered)
    return balanced_search(policy, answered, ratios, advance, store=store)


def modality_ratios(policy: Policy, answered: Sequence[Answered]) -> dict[str, Tensor]:
    """rho of TEXT (1), IMAGE and AUDIO in every layer, floored at its median: "o_proj" and "down_proj" -> [L, 3]."""
    total = {name: torch.zeros(policy.blocks, len(KINDS), device=policy.device) for name in ("o_proj", "down_proj")}
    samples = torch.zeros(len(KINDS), device=policy.device)
    for one in answered:
        gradients = output_gradients(policy, one)
        for kind in KINDS:
            here = one.kinds == kind
            if not bool(here.any()):
                continue
            samples[kind] += 1
            for name, layers in gradients.items():
                total[name][:, kind] += torch.stack([layer[here].abs().mean() for layer in layers])
    ratios = {}
    for name, sums in total.items():
        mean = sums / samples.clamp(min=1)
        if not bool((mean[:, TEXT] > 0).all()):
            raise OnPTQError("no gradient reaches the responses; expected responses of two or more tokens")
        ratio = mean / mean[:, TEXT : TEXT + 1]
        ratios[name] = torch.maximum(ratio, ratio.quantile(0.5, dim=0))
        ratios[name][:, TEXT] = 1
    return ratios


def output_gradients(policy: Policy, one: Answered) -> dict[str, list[Tensor]]:
    """d(cross-entropy of the response) / d(output of the linear), one [S, d] per layer."""
    batch = PromptBatch.of([one.sequence])
    outputs: dict[str, list[Tensor]] = {"o_proj": [], "down_proj": []}

    def hook(into: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, args, out: into.append(out)

    hooks = []
    for block in policy.structure.blocks:
        places = {"o_proj": block.child(block.consumers("v_o")[0]), "down_proj": block.module.get_submodule("mlp")}
        hooks += [module.register_forward_hook(hook(outputs[name])) for name, module in places.items()]
    embeds = batch.embeds.detach().clone().requires_grad_()  # the weights are frozen, so the graph begins here
    try:
        with torch.enable_grad(), policy.speaking("D"):
            hidden = policy.run(replace(whole_prompts(batch), embeds=embeds))
            logits = policy.logits(hidden[0, -one.response - 1 : -1])
            loss = cross_entropy(logits, one.sequence.ids[-one.response :])
            gradients = torch.autograd.grad(loss, [*outputs["o_proj"], *outputs["down_proj"]])
    finally:
        for one_hook in hooks:
            one_hook.remove()
    wide = [gradient[0].float() for gradient in gradients]
    if not torch.stack([gradient.isfinite().all() for gradient in wide]).all():
        raise not_finite("gradients of the response's cross-entropy", [one.sequence])
    return {"o_proj": wide[: policy.blocks], "down_proj": wide[policy.blocks :]}


@dataclass(frozen=True)
class Case:
    """One stream's inputs of a pair, the target outputs, and the weight of every token's error."""

    stream: Stream
    x: Tensor  # [B, S, I], of an expert [1, n, I]
    target: Tensor  # [B, S, O]
    weight: Tensor  # [B, S]


@torch.no_grad()
def balanced_search(
    policy: Policy,
    answered: Sequence[Answered],
    ratios: dict[str, Tensor],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    store: BlockStore | None = None,
) -> Theta:
    """The theta of the grid search under given ratios, block by block."""
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    sequences = [one.sequence for one in answered]
    dense = open_streams(policy, sequences)
    kinds = {one.sequence.ordinal: one.kinds for one in answered}
    with policy.speaking("D"):
        for block in fitted_blocks(policy, theta, dense, store, advance):
            _fit(policy, theta, block, ratios, kinds, dense)
    return theta


def _fit(
    policy: Policy,
    theta: Theta,
    block: Block,
    ratios: dict[str, Tensor],
    kinds: dict[int, Tensor],
    streams: Sequence[Stream],
) -> None:
    """Search one block's smoothing, in place."""
    counted = sum(int((kind != INSTRUCTION).sum()) for kind in kinds.values())
    weights = [
        {
            name: _token_weights(stream.pad(kinds, INSTRUCTION), ratios[name][block.index]) / counted
            for name in ("o_proj", "down_proj")
        }
        for stream in streams
    ]
    inputs = [inputs_of(stream, block, weight["down_proj"]) for stream, weight in zip(streams, weights, strict=True)]
    for pair in (pair for pair in block.pairs if pair in block.producers):
        cases = [
            Case(
                stream,
                x[pair],
                stream.unit(block, pair, x[pair]),
                x.get(BESIDE + pair.removesuffix(f".{UP_DOWN}"), weight[GRADIENTS_AT.get(pair, "down_proj")]),
            )
            for stream, x, weight in zip(streams, inputs, weights, strict=True)
            if pair in x
        ]
        if cases and not is_cold(pair, sum(len(case.stream.tokens(case.x)) for case in cases)):
            theta.smoothing[pair_key(block, pair)] = best_smoothing(policy, theta, block, pair, cases)


def _token_weights(kinds: Tensor, rho: Tensor) -> Tensor:
    return torch.where(kinds == INSTRUCTION, 0.0, rho[kinds.clamp(min=0)])


def best_smoothing(policy: Policy, theta: Theta, block: Block, pair: str, cases: Sequence[Case]) -> Tensor:
    """The candidate of least weighted absolute error; the first of equals, so plain rounding where nothing helps."""
    key = pair_key(block, pair)
    before, best, least = theta.smoothing[key], theta.smoothing[key], torch.inf
    magnitude = torch.cat([case.stream.tokens(case.x).abs().float() for case in cases]).mean(0)
    for u in smoothing_grid(magnitude, block, pair):
        theta.smoothing[key] = u
        error = 0.0
        with replaced(block, quantized_linears(policy, theta, block, [pair])):
            for case in cases:
                output = case.stream.unit(block, pair, case.x)
                error += float((case.weight * (output - case.target).float().abs().mean(-1)).sum())
        if error < least:
            best, least = u, error
    theta.smoothing[key] = before
    require_finite_error(least, key)
    return best


def smoothing_grid(magnitude: Tensor, block: Block, pair: str) -> list[Tensor]:
    """AWQ's candidates from mean|x| [I]: log of max(mean|x|^r, 1e-4), in the gauge of mean 0.

    Under GQA the query heads of a group share a KV channel's scale, so the mean is taken over them too.
    """
    magnitude = by_query_head(magnitude, block, pair).mean(0)
    candidates = [magnitude.pow(ratio).clamp(min=FLOOR).log() for ratio in GRID]
    return [u - u.mean() for u in candidates]
