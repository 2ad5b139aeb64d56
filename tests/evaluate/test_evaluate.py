"""Answers of D and Q to items, their grades, and how two models' answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny
from naive import next_logits, without_ties

from onptq.data.manifest import load_manifest
from onptq.engine.prefixes import Prefixes
from onptq.engine.rollout import rollout
from onptq.errors import OnPTQError
from onptq.evaluate.answers import Answer, EncodedItems, answer, read_answers, write_answers
from onptq.evaluate.metrics import labels, noise_of_answers
from onptq.evaluate.scores import Flips, compare_answers, score
from onptq.evaluate.statistics import Resampler
from onptq.evaluate.tasks import Grade, Item, check_items, exact, items_digest
from onptq.methods.rtn import rtn
from onptq.models.language_model import Side
from onptq.models.processing import PromptProcessor
from onptq.quantizer.policy import Policy


@pytest.fixture(autouse=True)
def _without_ties() -> Iterator[None]:
    with without_ties():
        yield


def item(name: str, task: str = "choice", measure: Any = "accuracy", **fields: Any) -> Item:
    return Item(name, task, fields.pop("prompt", None), "yes", exact("yes"), 4, measure, **fields)


def given(name: str, text: str = "yes", points: float = 1, total: float = 1, task: str = "choice") -> Answer:
    return Answer(name, task, text, points, total)


# --- answers --------------------------------------------------------------------------------------------------------


def items_of(model: Tiny, limits: list[int]) -> list[Item]:
    prompts = load_manifest(model.manifest)
    return [
        Item(f"item {n}", "task", prompts[n], "", lambda text: Grade(len(text)), limit)
        for n, limit in enumerate(limits)
    ]


def quantized(model: Tiny) -> Policy:
    policy = model.policy("W4A8", torch.float64)
    policy.freeze(rtn(policy))
    return policy


def naive_answer(policy: Policy, side: Side, processor: PromptProcessor, one: Item) -> str:
    inputs, tokens = processor(one.prompt), list[int]()
    while len(tokens) < one.max_tokens and not (tokens and tokens[-1] in policy.eos):
        tokens.append(int(next_logits(policy, side, inputs, tokens).argmax()))
    text: str = processor.tokenizer.decode(tokens, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "qwen2.5-omni", "llama"])
def test_both_models_answer_as_one_who_prefills_every_token_anew(tiny: Callable[[str], Tiny], family: str) -> None:
    model = tiny(family)
    policy, items = quantized(model), items_of(model, [3, 5, 3, 5, 1])
    questions = EncodedItems(policy, model.processor, items, batch_tokens=200)
    sides: tuple[Side, Side] = ("D", "Q")
    answered = {side: answer(questions, side) for side in sides}
    for side, answers in answered.items():
        expected = [naive_answer(policy, side, model.processor, one) for one in items]
        assert [one.text for one in answers] == expected
        assert [one.item for one in answers] == [one.id for one in items]
        assert [one.points for one in answers] == [len(text) for text in expected]
    assert answered["D"] != answered["Q"]


def test_an_answer_ends_where_the_model_ends_it(tiny: Callable[[str], Tiny]) -> None:
    model = tiny("qwen2.5-vl")
    policy, items = quantized(model), items_of(model, [6, 6, 6])
    free = [naive_answer(policy, "D", model.processor, one) for one in items]
    inputs, tokens = model.processor(items[1].prompt), list[int]()
    for _ in range(3):
        tokens.append(int(next_logits(policy, "D", inputs, tokens).argmax()))
    policy.eos = frozenset({tokens[-1]})
    ended = answer(EncodedItems(policy, model.processor, items), "D")[1].text
    assert free[1].startswith(ended)
    assert len(ended) < len(free[1])


def test_towers_run_once_for_many_items_and_prompts_once_per_model(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen2.5-vl")
    policy, items = quantized(model), items_of(model, [2, 4, 4])
    towers, steps = list[int](), list[int]()
    loaded: Any = policy.model
    loaded.model.visual.register_forward_hook(lambda *_: towers.append(1))
    run = policy.run

    def counted(tokens: Any, *rest: Any) -> Any:
        steps.append(tokens.embeds.shape[1])
        return run(tokens, *rest)

    monkeypatch.setattr(policy, "run", counted)
    advanced = list[int]()
    questions = EncodedItems(policy, model.processor, items, advance=advanced.append)
    assert sum(advanced) == len(items)
    assert all(one.prompt.images for one in items)
    for side in ("D", "Q"):
        advanced.clear()
        steps.clear()
        answer(questions, side, advanced.append)
        assert sorted(advanced) == [1, 2]
        assert sum(width > 4 for width in steps) == 2  # one prefill for each answer length
        assert len(steps) == 2 + (2 - 1) + (4 - 1) + 2  # and one forward over the answers
    assert towers == [1]


def test_an_answer_disagrees_where_one_forward_over_it_chooses_another_token(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    questions = EncodedItems(quantized(model), model.processor, items_of(model, [4, 4, 4]))
    assert [one.disagrees for one in answer(questions, "Q")] == [False, False, False]

    def with_another_token(group: Prefixes, index: int, side: Side) -> torch.Tensor:
        written = rollout(group, index, side)
        row = next(row for row, prompt in enumerate(group.batches[index].prompts) if prompt.ordinal == 1)
        written[row, 3] = (written[row, 3] + 1) % 50
        return written

    monkeypatch.setattr("onptq.evaluate.answers.rollout", with_another_token)
    assert [one.disagrees for one in answer(questions, "Q")] == [False, True, False]


def test_the_noise_floor_of_answers_is_the_share_that_another_computation_words_differently() -> None:
    items = [item("a"), item("b"), item("c", "say", "facts"), item("d", "hear", "word errors")]
    answers = [
        replace(given(one.id, task=one.task), disagrees=disagrees)
        for one, disagrees in zip(items, (True, False, False, True), strict=True)
    ]
    found = {
        name: Resampler(replicates=5).estimate(one).value for name, one in noise_of_answers(items, answers).items()
    }
    assert found == {"noise_answers": 50, "noise_graded": 50, "noise:choice": 50, "noise:say": 0, "noise:average": 25}
    assert {label.noise for label in labels(items).values()} >= set(found)
    assert noise_of_answers(items, [*answers[:3], given("d", task="hear")]) == {}


def test_items_need_unique_ids_one_measure_per_task_and_room_in_the_context(tiny: Callable[[str], Tiny]) -> None:
    with pytest.raises(OnPTQError, match="no items"):
        check_items([])
    with pytest.raises(OnPTQError, match=r"more than once, e\.g\. 'a'"):
        check_items([item("a"), item("b"), item("a")])
    with pytest.raises(OnPTQError, match="'b' of task 'choice' is measured by facts"):
        check_items([item("a"), item("b", measure="facts")])
    model = tiny("llama")
    [one] = items_of(model, [10**6])
    with pytest.raises(OnPTQError, match="more than the model's context"):
        EncodedItems(quantized(model), model.processor, [one])


def test_answers_read_back_as_they_were_written(tmp_path: Path) -> None:
    answers = {
        "dense": [given("a", "ja, grün\n"), replace(given("b", "", 0, 3), disagrees=True)],
        "rtn": [given("b", points=0.5), given("a")],
    }
    write_answers(answers, tmp_path / "answers.parquet")
    assert read_answers(tmp_path / "answers.parquet") == answers


@pytest.mark.parametrize(
    "change", [{"id": "b"}, {"task": "read"}, {"reference": "no"}, {"max_tokens": 5}, {"measure": "facts"}]
)
def test_the_digest_of_items_sees_questions_and_references(tiny: Callable[[str], Tiny], change: dict[str, Any]) -> None:
    prompts = load_manifest(tiny("qwen2.5-vl").manifest)
    one = item("a", prompt=prompts[0])
    assert items_digest([one]) == items_digest([replace(one, grade=lambda text: Grade(0))])
    assert items_digest([one]) != items_digest([replace(one, **change)])
    assert items_digest([one]) != items_digest([replace(one, prompt=prompts[1])])


# --- scores ---------------------------------------------------------------------------------------------------------


def test_a_score_is_points_over_totals_and_the_average_leaves_word_errors_out() -> None:
    items = [
        *(item(f"c{n}") for n in range(4)),
        *(item(f"f{n}", "caption", "facts") for n in range(2)),
        item("w", "speech", "word errors"),
    ]
    answers = [
        *(given(f"c{n}", points=n == 0) for n in range(4)),
        given("f0", points=1, total=1, task="caption"),
        given("f1", points=1, total=7, task="caption"),
        given("w", points=3, total=2, task="speech"),
    ]
    scores = score(items, answers)
    assert {task: one.percent for task, one in scores.tasks.items()} == {"choice": 25, "caption": 25, "speech": 150}
    assert scores.average == 25
    assert scores.to_dict()["tasks"]["caption"] == {
        "percent": 25, "measure": "facts", "items": 2, "points": 2, "total": 8,
    }  # fmt: skip
    better = score(items, [replace(one, points=one.total) for one in answers])
    assert (better.average, better.tasks["speech"].percent) == (100, 100)


def test_a_task_in_which_nothing_was_claimed_has_no_score_and_does_not_count() -> None:
    items = [item("c"), item("f", "caption", "facts")]
    scores = score(items, [given("c"), given("f", "", 0, 0, "caption")])
    assert scores.tasks["caption"].percent is None
    assert scores.average == 100
    assert score(items[1:], [given("f", "", 0, 0, "caption")]).average is None


def test_flips_in_opposite_directions_do_not_cancel() -> None:
    """c_D = 1100, c_Q = 1010: the same accuracy, half of the items flipped."""
    items = [item(str(n)) for n in range(4)]
    dense = [given(str(n), points=n < 2) for n in range(4)]
    other = [given(str(n), points=n in (0, 2)) for n in range(4)]
    change = compare_answers(items, dense, list(reversed(other)))  # paired by identity, not by place
    assert change.total == Flips(4, right_to_wrong=1, wrong_to_right=1)
    assert change.total.percent == 50
    assert compare_answers(items, dense, dense).total.percent == 0


def test_only_answers_that_are_right_or_wrong_flip_but_every_text_can_change() -> None:
    items = [item("c"), item("r", "read"), item("f", "caption", "facts"), item("w", "speech", "word errors")]
    dense = [given("c"), given("r", task="read"), given("f", task="caption"), given("w", task="speech")]
    other = [given("c", "Yes."), given("r", "no", 0, task="read"), given("f", "no", 0, task="caption"), dense[3]]
    change = compare_answers(items, dense, other).to_dict()
    assert change["flips"] == {
        "percent": 50, "items": 2, "right_to_wrong": 1, "wrong_to_right": 0,
        "tasks": {
            "choice": {"percent": 0, "items": 1, "right_to_wrong": 0, "wrong_to_right": 0},
            "read": {"percent": 100, "items": 1, "right_to_wrong": 1, "wrong_to_right": 0},
        },
    }  # fmt: skip
    assert change["changed_percent"] == 75
    assert change["changed_percent_tasks"] == {"choice": 100, "read": 100, "caption": 100, "speech": 0}
    assert compare_answers(items[2:], dense[2:], other[2:]).total.percent is None


def test_answers_to_other_items_are_refused() -> None:
    with pytest.raises(OnPTQError, match=r"1 answers to 2 items, e\.g\. none to 'b'"):
        score([item("a"), item("b")], [given("a")])
    with pytest.raises(OnPTQError, match="2 answers to 1 items"):
        score([item("a")], [given("a"), given("b")])
