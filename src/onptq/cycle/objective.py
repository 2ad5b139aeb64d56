"""The branch-aware objective (Eqs. 12-17): an anchor on the prompt's context and a risk-weighted loss on critical states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss
from torch.utils.checkpoint import checkpoint

from onptq import kernels
from onptq.bank import States, Trajectory
from onptq.cycle.compare import head_inputs, pair_margin, state_rows
from onptq.cycle.divergence import kl_divergence
from onptq.engine.prefixes import whole_prompts
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.quantizer.policy import Policy
from onptq.registry import LOSS_TERMS

PAPER_TERMS = ("anchor", "hidden", "pair", "response")
MASSIVE_SHARE = 0.001  # tokens of largest norm that do not count in a block's energy


@dataclass(frozen=True)
class UpdateSequence:
    """One prompt of an update: its tokens up to the last critical state's prefix, and what is frozen about those states."""

    sequence: EncodedPrompt
    anchor: Tensor  # [S] weight of each token in the anchor; 0 on response tokens
    at: Tensor  # [C] where in the sequence each critical state's prediction is made
    weight: Tensor  # [C] in the hidden and the pair loss
    response_weight: Tensor  # [C] in the response loss
    reference: Tensor  # [C]
    competitor: Tensor  # [C]
    margin_dense: Tensor  # [C]


@dataclass(frozen=True)
class Terms:
    """The sums of the objective, each a scalar: the paper's four, and by name those that a recipe adds."""

    anchor: Tensor
    hidden: Tensor
    pair: Tensor
    response: Tensor
    added: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: Terms) -> Terms:
        theirs = other.named()
        return Terms.of({name: mine + theirs[name] for name, mine in self.named().items()})

    def scaled(self, scale: float) -> Terms:
        """Without gradients, times `scale`."""
        return Terms.of({name: scale * value.detach() for name, value in self.named().items()})

    def named(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in PAPER_TERMS} | dict(self.added)

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Terms:
        added = {name: value for name, value in named.items() if name not in PAPER_TERMS}
        return cls(named["anchor"], named["hidden"], named["pair"], named["response"], added)

    def floats(self) -> dict[str, float]:
        named = self.named()
        return dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True))


def make_sequences(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    trajectories: Sequence[Trajectory],
    states: States | None,
    *,
    modality_balanced: bool = False,
    every_response: bool = False,
    consequence: float = 0.0,
) -> list[UpdateSequence]:
    """One item per prompt, with its weighted states; the anchor's weights sum to 1 over all prompts (Eq. 14's 1 / |U|).

    With `every_response` the response loss is a mean over all states, critical or not, each with the weight
    1 + `consequence` * A_t.
    """
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}
    share = _anchor_share(prompts, modality_balanced)
    items = []
    weights = None if states is None else 1 + consequence * states.consequence.astype(np.float64)
    for prompt in prompts:
        rows = np.zeros(0, np.int64)
        if states is not None:
            rows = np.flatnonzero((states.prompt == prompt.ordinal) & (every_response | (states.weight > 0)))
        item = _make_sequence(policy, prompt, by_prompt.get(prompt.ordinal), states, rows, share)
        if every_response and weights is not None:
            shares = torch.from_numpy(weights[rows] / weights.sum())
            item = replace(item, response_weight=shares.to(item.weight))
        items.append(item)
    return items


def _make_sequence(
    policy: Policy,
    prompt: EncodedPrompt,
    trajectory: Trajectory | None,
    states: States | None,
    rows: np.ndarray,
    share: Tensor,
) -> UpdateSequence:
    device = policy.device
    sequence, steps = prompt, torch.zeros(0, dtype=torch.long, device=device)
    columns = [torch.zeros(0, device=device)] * 4
    if states is not None and trajectory is not None and len(rows):
        steps = torch.from_numpy(states.t[rows]).long().to(device) - 1
        fed = torch.tensor(trajectory.tokens[: int(steps.max())], dtype=torch.long, device=device)
        sequence = prompt.extended(fed, policy.embed(fed))
        names = ("weight", "reference", "competitor", "margin_dense")
        columns = [torch.from_numpy(getattr(states, name)[rows]).to(device) for name in names]
    anchor = torch.zeros(sequence.length, device=device)
    anchor[: prompt.length] = share[prompt.modality.long()]
    weight, reference, competitor, margin_dense = columns
    at = steps + prompt.length - 1
    return UpdateSequence(sequence, anchor, at, weight, weight, reference.long(), competitor.long(), margin_dense)


def _anchor_share(prompts: Sequence[EncodedPrompt], balanced: bool) -> Tensor:
    """Weight of a prompt token by its modality: equal for all, or such that each modality present weighs the same."""
    counts = torch.stack([torch.bincount(prompt.modality.long(), minlength=3) for prompt in prompts]).sum(0)
    if not balanced:
        return torch.full((3,), 1 / float(counts.sum()), device=counts.device)
    return torch.where(counts > 0, 1 / (counts.clamp(min=1) * (counts > 0).sum()), 0.0)


class Targets:
    """D's residual stream after every block for each item, [L, S, d]: computed alone, so that no batch can change it, and kept
    while the budget lasts."""

    def __init__(self, policy: Policy, budget: int | None) -> None:
        self.policy, self.budget, self.used = policy, budget, 0
        # By identity: the sequence is held beside its target, so that no other can take its place.
        self._kept: dict[int, tuple[EncodedPrompt, Tensor]] = {}

    @torch.no_grad()
    def of(self, sequence: EncodedPrompt) -> Tensor:
        kept = self._kept.get(id(sequence))
        if kept is None:
            blocks: list[Tensor] = []
            with self.policy.speaking("D"):
                self.policy.run(
                    whole_prompts(PromptBatch.of([sequence])), observe=lambda _, hidden: blocks.append(hidden[0])
                )
            target = torch.stack(blocks)
            if self.budget is None or self.used + target.nbytes <= self.budget:
                self._kept[id(sequence)] = sequence, target
                self.used += target.nbytes
            return target
        return kept[1]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def block_energy(targets: Targets, items: Iterable[UpdateSequence]) -> Tensor:
    """Mean dense energy per channel after each block over the anchor's tokens, [L], without the few massive ones that would
    drown the rest."""
    energies = [_wide(targets.of(item.sequence)[:, item.anchor > 0]).square().mean(-1) for item in items]
    per_token = torch.cat(energies, dim=1).sort(dim=1).values  # [L, U]
    count = per_token.shape[1]
    massive = max(1, round(MASSIVE_SHARE * count))
    return per_token[:, : max(1, count - massive)].mean(1)


def measure(
    policy: Policy,
    items: Sequence[UpdateSequence],
    targets: Targets,
    energy: Tensor | None = None,
    *,
    added: Iterable[str] = (),
    checkpointed: bool = False,
) -> Terms:
    """The terms of all items, by one causal forward of Q: every anchor position and every critical state.

    `energy` [L] divides each block's error; without it the loss is the paper's, literally. `added` names loss terms of the
    registry.
    """
    batch = PromptBatch.of([item.sequence for item in items])
    dense = [targets.of(item.sequence) for item in items]
    rows = torch.cat([torch.full_like(item.at, row) for row, item in enumerate(items)])
    at, weight = (torch.cat([getattr(item, name) for item in items]) for name in ("at", "weight"))
    anchor_weight = torch.nn.utils.rnn.pad_sequence([item.anchor for item in items], batch_first=True)
    anchor = hidden = torch.zeros((), device=policy.device)

    def observe(block: int, quant: Tensor) -> None:
        nonlocal anchor, hidden
        target = torch.nn.utils.rnn.pad_sequence([blocks[block] for blocks in dense], batch_first=True)
        error = (_wide(quant) - _wide(target)).square().mean(-1)  # [B, S] MSE at every token
        if energy is not None:
            error = error / energy[block]
        anchor = anchor + (error * anchor_weight).sum() / policy.blocks
        hidden = hidden + (error[rows, at] * weight).sum() / policy.blocks

    with policy.speaking("Q"):
        final = policy.run(whole_prompts(batch), observe=observe, checkpointed=checkpointed)
    final_dense = torch.cat([blocks[-1][item.at] for blocks, item in zip(dense, items, strict=True)])
    pair, response = _decision_terms(policy, items, final_dense, final[rows, at])
    sums = {name: _added_term(policy, items, final_dense, final[rows, at], LOSS_TERMS[name]) for name in added}
    return Terms(anchor, hidden, pair, response, sums)


def _added_term(
    policy: Policy, items: Sequence[UpdateSequence], dense: Tensor, quant: Tensor, term: Callable[..., Tensor]
) -> Tensor:
    """The weighted sum of a registered term over the critical states, a chunk of logits at a time."""
    weight, reference, competitor = (
        torch.cat([getattr(item, name) for item in items]) for name in ("weight", "reference", "competitor")
    )

    def losses(dense: Tensor, quant: Tensor, reference: Tensor, competitor: Tensor) -> Tensor:
        return term(policy.logits(dense).detach(), policy.logits(quant), reference, competitor)

    total = torch.zeros((), device=policy.device)
    size = state_rows(policy.vocabulary, models=4)
    for start in range(0, len(weight), size):
        rows = slice(start, start + size)
        chunk = dense[rows], quant[rows], reference[rows], competitor[rows]
        total = total + (checkpoint(losses, *chunk, use_reentrant=False, preserve_rng_state=False) * weight[rows]).sum()
    return total


def _decision_terms(
    policy: Policy, items: Sequence[UpdateSequence], dense: Tensor, quant: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted sums of the pair loss (Eq. 16) and the response loss (Eq. 17), a chunk of states at a time."""
    names = ("weight", "response_weight", "reference", "competitor", "margin_dense")
    weight, response_weight, reference, competitor, margin_dense = (
        torch.cat([getattr(item, name) for item in items]) for name in names
    )
    if kernels.fit(dense, quant, policy.structure.head.weight):
        losses = decision_losses(policy, dense, quant, reference, competitor, margin_dense)
        return (losses[0] * weight).sum(), (losses[1] * response_weight).sum()
    pair = response = torch.zeros((), device=policy.device)
    size = state_rows(policy.vocabulary, models=4)
    for start in range(0, len(weight), size):
        rows = slice(start, start + size)
        losses = checkpoint(
            decision_losses,
            policy,
            dense[rows],
            quant[rows],
            reference[rows],
            competitor[rows],
            margin_dense[rows],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        pair = pair + (losses[0] * weight[rows]).sum()
        response = response + (losses[1] * response_weight[rows]).sum()
    return pair, response


def decision_losses(
    policy: Policy, dense: Tensor, quant: Tensor, reference: Tensor, competitor: Tensor, margin_dense: Tensor
) -> tuple[Tensor, Tensor]:
    """L_pair and L_response of each state, [C] each, from the two models' residual streams [C, d]."""
    if kernels.fit(dense, quant, policy.structure.head.weight):
        from onptq.kernels.decisions import kl_of_states, margin_of_states

        rows_dense, rows_quant, head, bias = head_inputs(policy, dense, quant)
        margin = margin_of_states(rows_quant, head, bias, reference, competitor)
        response = kl_of_states(rows_dense, rows_quant, head, bias)
    else:
        z_dense, z_quant = policy.logits(dense).detach(), policy.logits(quant)
        margin, response = pair_margin(z_quant, reference, competitor), kl_divergence(z_dense, z_quant)
    return huber_loss(margin, margin_dense, reduction="none", delta=1.0), response
