"""The branch-aware objective (Eqs. 12-17): an anchor on the prompt's context and a risk-weighted loss on critical states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss
from torch.utils.checkpoint import checkpoint

from onptq.bank import States, Trajectory
from onptq.cycle.compare import head_fits, head_inputs, pair_margin, state_rows
from onptq.cycle.divergence import kl_divergence
from onptq.engine.prefixes import whole_prompts
from onptq.engine.prompts import EncodedPrompts
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.experts import OWN, observing_routes
from onptq.quantizer.policy import Policy
from onptq.ranks import ALONE, Ranks
from onptq.registry import LOSS_TERMS

PAPER_TERMS = ("anchor", "hidden", "pair", "response")
HUBER_DELTA = 1.0  # Eq. 16, in logits
ENERGY_ITEMS = 512  # at most, from which a block's energy is measured
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

    @classmethod
    def zero(cls, added: Iterable[str], policy: Policy) -> Terms:
        dtype = torch.promote_types(policy.dtype, torch.float32)
        return cls.of({name: torch.zeros((), device=policy.device, dtype=dtype) for name in (*PAPER_TERMS, *added)})

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


class UpdateSequences(Sequence[UpdateSequence]):
    """One item per prompt, with its weighted states, made on access; the anchor's weights sum to 1 over all prompts
    (Eq. 14's 1 / |U|).

    With `every_response` the response loss is a mean over all states, critical or not, each with the weight
    1 + `consequence` * A_t.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[EncodedPrompt],
        trajectories: Sequence[Trajectory],
        states: States | None,
        *,
        modality_balanced: bool = False,
        every_response: bool = False,
        consequence: float = 0.0,
    ) -> None:
        self.policy, self.prompts, self.states = policy, EncodedPrompts.of(prompts), states
        self.trajectories = {trajectory.prompt: trajectory for trajectory in trajectories}
        self.every_response = every_response
        self._share = _anchor_share(self.prompts, modality_balanced).to(policy.device)
        if states is not None:
            self._rows = states.rows_by_prompt()
            weights = 1 + consequence * states.consequence.astype(np.float64)
            self._response_weight = weights / weights.sum()

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, place: int) -> UpdateSequence: ...
    @overload
    def __getitem__(self, place: slice) -> list[UpdateSequence]: ...
    def __getitem__(self, place: int | slice) -> UpdateSequence | list[UpdateSequence]:
        if isinstance(place, slice):
            return [self[index] for index in range(len(self))[place]]
        prompt = self.prompts[place]
        if self.states is None:
            return _make_sequence(self.policy, prompt, None, None, np.zeros(0, np.int64), self._share)
        rows = self._rows.get(prompt.ordinal, np.zeros(0, np.int64))
        if not self.every_response:
            rows = rows[self.states.weight[rows] > 0]
        item = _make_sequence(
            self.policy, prompt, self.trajectories.get(prompt.ordinal), self.states, rows, self._share
        )
        if self.every_response:
            shares = torch.from_numpy(self._response_weight[rows])
            item = replace(item, response_weight=shares.to(item.weight))
        return item


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


def _anchor_share(prompts: EncodedPrompts, balanced: bool) -> Tensor:
    """Weight of a prompt token by its modality: equal for all, or such that each modality present weighs the same."""
    counts = prompts.kinds.sum(0)
    if not balanced:
        return torch.full((len(counts),), 1 / float(counts.sum()))
    return torch.where(counts > 0, 1 / (counts.clamp(min=1) * (counts > 0).sum()), 0.0)


class Targets:
    """D's residual stream after every block for each item, [L, S, d]: computed alone, so that no batch can change it, and kept
    while the budget lasts. An update has one response to each prompt, so a sequence is known by its prompt and its length."""

    def __init__(self, policy: Policy, budget: int | None) -> None:
        self.policy, self.budget, self.used = policy, budget, 0
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._routes: dict[tuple[int, int], dict[int, Tensor]] = {}

    @torch.no_grad()
    def of(self, sequence: EncodedPrompt) -> Tensor:
        key = sequence.ordinal, sequence.length
        target = self._kept.get(key)
        if target is None:
            blocks: list[Tensor] = []
            routes = self._routes[key] = {}
            layers = [block.module for block in self.policy.structure.blocks]
            follow = partial(_keep_route, routes)
            with self.policy.speaking("D"), observing_routes(layers, follow):
                self.policy.run(
                    whole_prompts(PromptBatch.of([sequence])), observe=lambda _, hidden: blocks.append(hidden[0])
                )
            target = torch.stack(blocks)
            if self.budget is None or self.used + target.nbytes <= self.budget:
                self._kept[key] = target
                self.used += target.nbytes
        return target

    def routes(self, sequence: EncodedPrompt) -> Mapping[int, Tensor]:
        """The experts [S, k] to which D's routers send the tokens of a sequence whose target is known, by block."""
        return self._routes[sequence.ordinal, sequence.length]


def _keep_route(routes: dict[int, Tensor], block: int, index: Tensor) -> None:
    routes[block] = index.short()


def _routes(targets: Targets, items: Sequence[UpdateSequence]) -> dict[int, Tensor]:
    """The experts [B, S, k] of the anchor's tokens, by block, as D chooses them; those of all other tokens are Q's own."""
    each = [targets.routes(item.sequence) for item in items]
    return {
        block: torch.nn.utils.rnn.pad_sequence(
            [
                torch.where(item.anchor[:, None] > 0, routes[block], OWN)
                for item, routes in zip(items, each, strict=True)
            ],
            batch_first=True,
            padding_value=OWN,
        )
        for block in each[0]
    }


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def block_energy(targets: Targets, items: Sequence[UpdateSequence], ranks: Ranks = ALONE) -> Tensor:
    """Mean dense energy per channel after each block over the anchor's tokens, [L], without the few massive ones that would
    drown the rest; of so many items that all of them would say no more, some are taken, spread evenly."""
    count = min(len(items), ENERGY_ITEMS)
    places = torch.linspace(0, len(items) - 1, count).round().int().tolist()
    own = [items[place] for place in ranks.shares(places, 1)]
    energies = [_wide(targets.of(item.sequence)[:, item.anchor > 0]).square().mean(-1) for item in own]
    if ranks.size > 1:
        shared = ranks.gather([energy.cpu().numpy() for energy in energies])
        energies = [torch.tensor(energy, device=targets.policy.device) for each in shared for energy in each]
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
        tokens = replace(whole_prompts(batch), routes=_routes(targets, items))
        final = policy.run(tokens, observe=observe, checkpointed=checkpointed)
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
    if head_fits(policy, dense, quant):
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


def pair_strength(states: States) -> float:
    """The factor with which the pair loss begins as strong as with equal weights for all states: the mean of all
    states' Huber losses over their weighted mean, by the margins in the bank. 1 where nothing is lost."""
    quant, dense = (torch.from_numpy(each.astype(np.float64)) for each in (states.margin_quant, states.margin_dense))
    losses = huber_loss(quant, dense, reduction="none", delta=HUBER_DELTA).numpy()
    if not (losses * states.weight).any():
        return 1.0
    factor = losses.mean() / np.average(losses, weights=states.weight.astype(np.float64))
    return float(np.float32(factor))  # exactly 1 of equal weights


def decision_losses(
    policy: Policy, dense: Tensor, quant: Tensor, reference: Tensor, competitor: Tensor, margin_dense: Tensor
) -> tuple[Tensor, Tensor]:
    """L_pair and L_response of each state, [C] each, from the two models' residual streams [C, d]."""
    if head_fits(policy, dense, quant):
        from onptq.kernels.decisions import kl_of_states, margin_of_states

        rows_dense, rows_quant, head, bias = head_inputs(policy, dense, quant)
        margin = margin_of_states(rows_quant, head, bias, reference, competitor)
        response = kl_of_states(rows_dense, rows_quant, head, bias)
    else:
        z_dense, z_quant = policy.logits(dense).detach(), policy.logits(quant)
        margin, response = pair_margin(z_quant, reference, competitor), kl_divergence(z_dense, z_quant)
    return huber_loss(margin, margin_dense, reduction="none", delta=HUBER_DELTA), response
