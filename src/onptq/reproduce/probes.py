"""What takes the models at single states: hidden errors, closed-loop divergence, and values of the likeliest actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from onptq.bank import Column, States, Trajectory
from onptq.cycle.branch import branch
from onptq.cycle.compare import padded_responses
from onptq.cycle.divergence import js_divergence
from onptq.engine.prefixes import Prefixes, whole_prompts
from onptq.models.encoding import PromptBatch
from onptq.models.language_model import Side
from onptq.run import Codec

ACTIONS = 4
SIDES: tuple[Side, Side] = ("D", "Q")
Advance = Callable[[int], None]


def _write(columns: Mapping[str, Column], path: Path) -> None:
    pq.write_table(pa.table({name: pa.array(column) for name, column in columns.items()}), path)


def _read(path: Path) -> dict[str, Column]:
    table = pq.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}


COLUMNS: Codec[Mapping[str, Column]] = Codec(_write, _read)


@torch.no_grad()
def hidden_errors(
    prefixes: Prefixes, trajectories: Sequence[Trajectory], states: States, advance: Advance = lambda prompts: None
) -> Column:
    """The hidden loss (Eq. 15) of every state: the mean squared error of the residual stream, averaged over blocks."""
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}
    rows, policy = states.rows_by_prompt(), prefixes.policy
    errors = np.zeros(len(states))
    for prompt in prefixes.prompts:
        mine = rows.get(prompt.ordinal)
        if mine is None:
            continue
        fed = torch.tensor(by_prompt[prompt.ordinal].tokens[:-1], dtype=torch.long, device=policy.device)
        sequence = PromptBatch.of([prompt.extended(fed, policy.embed(fed))])
        at = torch.from_numpy(states.t[mine].astype(np.int64)).to(policy.device) + prompt.length - 2
        blocks: dict[Side, list[Tensor]] = {"D": [], "Q": []}
        for side in SIDES:

            def observe(_: int, hidden: Tensor, seen: list[Tensor] = blocks[side], at: Tensor = at) -> None:
                seen.append(hidden[0, at].float())

            with policy.speaking(side):
                policy.run(whole_prompts(sequence), observe=observe)
        each = [(q - d).square().mean(-1) for d, q in zip(blocks["D"], blocks["Q"], strict=True)]
        errors[mine] = torch.stack(each).mean(0).cpu().numpy()
        advance(1)
    return errors


@torch.no_grad()
def closed_loop(
    prefixes: Prefixes,
    dense: Sequence[Trajectory],
    quantized: Sequence[Trajectory],
    advance: Advance = lambda prompts: None,
) -> dict[str, Column]:
    """JS of D on its own response to Q on its own, at every token that both have: prompt, t, js, and whether it is behind
    the first token in which the responses differ."""
    of_dense, of_quant = ({one.prompt: one for one in each} for each in (dense, quantized))
    policy = prefixes.policy
    rows: list[tuple[int, int, float, bool]] = []

    def read_batch(index: int) -> int:
        batch = prefixes.batches[index]
        hidden = [
            prefixes.teacher_force(index, "D", padded_responses(batch, of_dense))[1],
            prefixes.teacher_force(index, "Q", padded_responses(batch, of_quant))[1],
        ]
        here = []
        for row, prompt in enumerate(batch.prompts):
            tokens = of_dense[prompt.ordinal].tokens, of_quant[prompt.ordinal].tokens
            count = min(map(len, tokens))
            apart = js_divergence(*(policy.logits(each[row, :count]).float() for each in hidden)).tolist()
            fork = first_difference(*tokens)
            here += [(prompt.ordinal, t, js, t > fork) for t, js in enumerate(apart, start=1)]
        rows.extend(here)
        return len(batch.prompts)

    for prompts in prefixes.map_batches(read_batch):
        advance(prompts)
    rows.sort()
    prompt, t, js, behind = zip(*rows, strict=True)
    return {
        "prompt": np.array(prompt, np.int32),
        "t": np.array(t, np.int32),
        "js": np.array(js, np.float64),
        "behind": np.array(behind, np.bool_),
    }


def first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """The first token, from 1, in which two responses differ; one more than the shorter has where none does."""
    pairs = enumerate(zip(first, second, strict=False), start=1)
    return next((t for t, (a, b) in pairs if a != b), min(len(first), len(second)) + 1)


@dataclass(frozen=True)
class Actions:
    """The likeliest actions of both models at every state, their probabilities and their values."""

    dense: Column  # [S, K] probabilities
    quant: Column  # [S, K]
    value: Column  # [S, K] V(s, a) in [0, 1]
    tv: Column  # [S] over the whole vocabulary


@torch.no_grad()
def likely_actions(prefixes: Prefixes, trajectories: Sequence[Trajectory], states: States) -> dict[str, Column]:
    """Reference, competitor and the likeliest others by the mean of both models: tokens and probabilities, [S, K] flat."""
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}
    tokens = np.zeros((len(states), ACTIONS), np.int64)
    dense, quant = np.zeros((len(states), ACTIONS)), np.zeros((len(states), ACTIONS))
    tv = np.zeros(len(states))
    rows = states.rows_by_prompt()

    def read_batch(index: int) -> int:
        batch = prefixes.batches[index]
        response = padded_responses(batch, by_prompt)
        hidden = [prefixes.teacher_force(index, side, response)[1] for side in SIDES]
        for place, prompt in enumerate(batch.prompts):
            mine = rows.get(prompt.ordinal)
            if mine is None:
                continue
            steps = torch.from_numpy(states.t[mine].astype(np.int64) - 1)
            p, q = (prefixes.policy.logits(each[place, steps]).double().softmax(-1) for each in hidden)
            tv[mine] = (0.5 * (p - q).abs().sum(-1)).cpu().numpy()
            pair = torch.from_numpy(np.stack((states.reference[mine], states.competitor[mine]), 1).astype(np.int64))
            pair = pair.to(p.device)
            others = (p + q).scatter(-1, pair, -1.0).topk(ACTIONS - 2, dim=-1).indices
            chosen = torch.cat((pair, others), dim=-1)
            tokens[mine] = chosen.cpu().numpy()
            dense[mine], quant[mine] = p.gather(-1, chosen).cpu().numpy(), q.gather(-1, chosen).cpu().numpy()
        return len(batch.prompts)

    for _ in prefixes.map_batches(read_batch):
        pass
    flat = {"tokens": tokens, "dense": dense, "quant": quant}
    return {name: column.ravel() for name, column in flat.items()} | {"tv": np.repeat(tv, ACTIONS)}


def action_values(
    prefixes: Prefixes,
    trajectories: Sequence[Trajectory],
    states: States,
    tokens: Column,
    horizon: int,
    eos: frozenset[int],
    advance: Advance = lambda states: None,
) -> Column:
    """V(s, a) of each action [S, K]: Q continues it greedily; the utility is `said_of` D's own continuation of its token."""

    def futures(first: Column, second: Column, side: Side) -> list[list[list[int]]]:
        seen: dict[int, list[list[int]]] = {}

        def keep(rows: Column, pairs: Column, apart: Column) -> None:
            seen.update(dict(zip(rows.tolist(), pairs.tolist(), strict=True)))

        forked = states.with_columns(reference=first.astype(np.int32), competitor=second.astype(np.int32))
        branch(prefixes, trajectories, forked, horizon=horizon, side=side, everywhere=True, seen=keep, advance=advance)
        return [seen[row] for row in range(len(states))]

    target = [pair[0] for pair in futures(states.reference, states.competitor, "D")]
    values = np.zeros(tokens.shape)
    for place in range(0, tokens.shape[1], 2):
        for row, pair in enumerate(futures(tokens[:, place], tokens[:, place + 1], "Q")):
            values[row, place : place + 2] = [said_of(target[row], future, eos) for future in pair]
    return values


def said_of(target: Sequence[int], future: Sequence[int], eos: frozenset[int]) -> float:
    """The share of the target's tokens, up to its end, that the future says too, whatever the order."""
    wanted, said = Counter(_ended(target, eos)), Counter(_ended(future, eos))
    return sum((wanted & said).values()) / max(1, sum(wanted.values()))


def _ended(tokens: Sequence[int], eos: frozenset[int]) -> Sequence[int]:
    ends = [place for place, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens
