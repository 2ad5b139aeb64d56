"""Greedy answers of D or Q to items that are encoded once for every model with the same towers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from onptq.cycle.compare import state_rows
from onptq.engine.budget import BatchBudget
from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import cut_responses, rollout
from onptq.evaluate.tasks import Item, check_items
from onptq.models.encoding import EncodedPrompt, encode
from onptq.models.language_model import LanguageModel, Side
from onptq.models.processing import PromptProcessor

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Answer:
    """The answer to an item, and the points it earned."""

    item: str  # the item's id
    task: str
    text: str
    points: float
    total: float
    disagrees: bool | None = None  # whether one forward over all of it chooses another token; None where not measured


class EncodedItems:
    """Encoded items in batches of like answer lengths. Towers run here, once; a prefix is cached until its batch is answered."""

    def __init__(
        self,
        policy: LanguageModel,
        processor: PromptProcessor,
        items: Sequence[Item],
        *,
        batch_tokens: int | BatchBudget = 16384,
        advance: Advance = lambda items: None,
    ) -> None:
        check_items(items)
        self.items, self.tokenizer, self.batch_tokens = items, processor.tokenizer, batch_tokens
        self.encoded: dict[int, list[EncodedPrompt]] = {}
        prompts, most = [item.prompt for item in items], [item.max_tokens for item in items]
        encoded = encode(policy, processor.ahead(prompts, most), advance=advance)
        for prompt, tokens in zip(encoded, most, strict=True):
            self.encoded.setdefault(tokens, []).append(prompt)
        self.groups = self._groups(policy)

    def with_model(self, policy: LanguageModel) -> EncodedItems:
        """The same items for another model over the same embeddings and towers, which do not run again."""
        other = copy.copy(self)
        other.groups = self._groups(policy)
        return other

    def _groups(self, policy: LanguageModel) -> list[Prefixes]:
        return [
            Prefixes(policy, prompts, max_tokens=most, batch_tokens=self.batch_tokens)
            for most, prompts in self.encoded.items()
        ]


def answer(encoded: EncodedItems, side: Side, advance: Advance = lambda items: None) -> list[Answer]:
    """Greedy answers to every item, graded, in the order of the items."""
    responses: dict[int, tuple[list[int], bool]] = {}
    for group in encoded.groups:
        for batch in group.map_batches(partial(_answer_batch, group, side)):
            responses.update({number: (tokens, disagrees) for number, tokens, disagrees in batch})
            advance(len(batch))
    every = [responses[number] for number in range(len(encoded.items))]
    texts = encoded.tokenizer.batch_decode([tokens for tokens, _ in every], skip_special_tokens=True)
    return [
        replace(grade(item, text), disagrees=disagrees)
        for item, text, (_, disagrees) in zip(encoded.items, texts, every, strict=True)
    ]


@torch.no_grad()
def _answer_batch(group: Prefixes, side: Side, index: int) -> list[tuple[int, list[int], bool]]:
    """Of every prompt its number, the response, and whether one forward over all of that chooses another token somewhere."""
    policy, batch = group.policy, group.batches[index]
    written = rollout(group, index, side)
    hidden = group.teacher_force(index, side, written)[1]
    chosen = [policy.logits(part).argmax(-1) for part in hidden.flatten(0, 1).split(state_rows(policy.vocabulary, 1))]
    differs = torch.cat(chosen).view_as(written) != written
    group.forget(side)
    cut = cut_responses(batch, written, policy.eos)
    return [
        (number, tokens, bool(row[: len(tokens)].any()))
        for row, (number, tokens, _) in zip(differs.cpu(), cut, strict=True)
    ]


def grade(item: Item, text: str) -> Answer:
    earned = item.grade(text)
    return Answer(item.id, item.task, text, earned.points, earned.total)


def write_answers(answers: Mapping[str, Sequence[Answer]], path: Path) -> None:
    """Write one row per model and item."""
    rows = [(name, one) for name, each in answers.items() for one in each]
    columns = {
        "arm": pa.array([name for name, _ in rows], pa.string()),
        "item": pa.array([one.item for _, one in rows], pa.string()),
        "task": pa.array([one.task for _, one in rows], pa.string()),
        "answer": pa.array([one.text for _, one in rows], pa.string()),
        "points": pa.array([one.points for _, one in rows], pa.float64()),
        "total": pa.array([one.total for _, one in rows], pa.float64()),
        "disagrees": pa.array([one.disagrees for _, one in rows], pa.bool_()),
    }
    pq.write_table(pa.table(columns), path)


def read_answers(path: Path) -> dict[str, list[Answer]]:
    answers: dict[str, list[Answer]] = {}
    for row in pq.read_table(path).to_pylist():
        known = row["item"], row["task"], row["answer"], row["points"], row["total"]
        answers.setdefault(row["arm"], []).append(Answer(*known, row.get("disagrees")))
    return answers
