"""The page of a comparison and of a run is what their files say, and its words are its numbers."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import FAMILIES, Tiny
from PIL import Image

import onptq
from onptq.bank import MISMATCH, States, Trajectory, load_bank, load_trajectories, read_trajectories
from onptq.data.manifest import load_manifest
from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.answers import read_answers
from onptq.evaluate.candidates import folder_name
from onptq.evaluate.comparison import compare_models
from onptq.evaluate.damage import NEAR_TIE
from onptq.evaluate.details import Detail, Future
from onptq.evaluate.previews import PREVIEWS, SIDE
from onptq.evaluate.run_details import weightiest
from onptq.evaluate.statistics import Resampler
from onptq.evaluate.store import TOKENS
from onptq.evaluate.tasks import Item, exact
from onptq.evaluate.token_texts import TokenTexts
from onptq.page.collect import collect
from onptq.page.contract import Answer, Page, Question, Response
from onptq.page.make import gather
from onptq.page.media import Album
from onptq.page.older_runs import prompt_from
from onptq.page.places import Comparison, RunAlone, find
from onptq.page.receipt import receipt
from onptq.page.responses import fork, respond, words
from onptq.page.rounds import collect_run
from onptq.page.stages import Visit, became, dense_answers
from onptq.page.verdict import flips_of, verdict
from onptq.recipe import Recipe
from onptq.registry import FAMILIES as REGISTERED
from onptq.run import run_home

RECIPE = Recipe.preset("light", {"follow.max_tokens": 8, "compute.batch_tokens": 200})
CANDIDATES = ("rtn:W2A8", "rtn:W8A8")


def random() -> Resampler:
    return Resampler(0, replicates=200)


@pytest.fixture(scope="module")
def items(small: Path) -> list[Item]:
    """Items that the dense model answers right, as its own answers are the references."""
    prompts = load_manifest(small / "prompts.jsonl")[:4]
    return [
        Item(f"task/{number}", "task", replace(prompt, ordinal=number), "?", exact("?"), 4)
        for number, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def compared(small: Path, items: list[Item], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "out"
    prompts = load_manifest(small / "prompts.jsonl")
    compare_models(small, CANDIDATES, out, items=items, prompts=prompts, recipe=RECIPE, replicates=50, origin="tests")
    return out


@pytest.fixture(scope="module")
def page(compared: Path) -> Page:
    return collect(compared)


CYCLE = {"scheme": "W3A8", "init": "rtn", "rounds": 2, "calibrate.epochs": 1, "calibrate.batch": 2}


@pytest.fixture(scope="module")
def ran(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ran") / "out"
    recipe = RECIPE.with_overrides({**CYCLE, "data.prompts": 4, "data.holdout": 2, "calibrate.pair": 0.1})
    onptq.quantize(small, out, calibration=known(small), recipe=recipe, verify=False)
    return out


def known(small: Path) -> list[Prompt]:
    """Prompts with a task and, but for the first, with a reference."""
    prompts = load_manifest(small / "prompts.jsonl")
    return [
        replace(one, extra={"task": f"task {place % 2}"} | ({"reference": f"answer {place}"} if place else {}))
        for place, one in enumerate(prompts)
    ]


def home(out: Path, name: str) -> Path:
    return out / "onptq" / "candidates" / folder_name(name)


# --- of a comparison ----------------------------------------------------------------------------------------------------


def test_the_page_has_every_answer_of_both_models_as_text(
    page: Page, compared: Path, small: Path, tiny: Callable[[str], Tiny]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small)
    said = [("dense", [one.dense for one in page.prompts], compared / "onptq" / "dense")]
    said += [(one.name, [r.answer for r in one.responses if r], home(compared, one.name)) for one in page.candidates]
    assert [name for name, _, _ in said] == ["dense", *CANDIDATES]
    for _, answers, folder in said:
        rollouts = read_trajectories(folder / "trajectories.parquet")
        assert [list(one.tokens or ()) for one in answers] == [list(one.tokens) for one in rollouts]
        expected = [tokenizer.decode(list(one.tokens), skip_special_tokens=True) for one in rollouts]
        assert [one.text for one in answers] == expected
        answered = read_answers(folder / "answers.parquet")
        [graded] = answered.values()
        own = [one.dense for one in page.items] if folder.name == "dense" else None
        own = own or next([a for a in c.answers if a] for c in page.candidates if home(compared, c.name) == folder)
        assert [(one.text, one.right) for one in own] == [(one.text, one.points == one.total) for one in graded]


def test_the_page_has_the_questions_with_their_images(page: Page, small: Path) -> None:
    prompts = load_manifest(small / "prompts.jsonl")
    assert [one.id for one in page.prompts] == [one.id for one in prompts]
    for question, prompt in zip(page.prompts, prompts, strict=True):
        texts = [part.text for turn in question.turns for part in turn.parts if part.media is None]
        assert texts == [p["text"] for m in prompt.messages for p in m["content"] if p["type"] == "text"]
        places = [part.media for turn in question.turns for part in turn.parts if part.media is not None]
        assert len(places) == len(prompt.images)
        for place, image in zip(places, prompt.images, strict=True):
            assert place is not None
            kept = page.media[place]
            assert kept.src is not None
            shown, given = Image.open(io.BytesIO(decoded(kept.src))), Image.open(io.BytesIO(image.read()))
            assert shown.size == given.size
    assert any("image" in one.kinds for one in page.prompts)


def decoded(url: str) -> bytes:
    return base64.b64decode(url.partition("base64,")[2])


def test_states_on_the_page_are_those_of_the_file(page: Page, compared: Path) -> None:
    for candidate in page.candidates:
        states = States.read(home(compared, candidate.name) / "states.parquet")
        mismatches = States.read(home(compared, candidate.name) / "mismatches.parquet")
        shown = [one.states for one in candidate.responses if one is not None and one.states is not None]
        for name in ("reference", "competitor", "quantized", "kind", "js", "margin_dense"):
            assert [value for one in shown for value in getattr(one, name)] == getattr(states, name).tolist()
        consequence = [value for one in shown for value in one.consequence if value is not None]
        assert consequence == pytest.approx(mismatches.consequence.tolist())
        futures = [value for one in shown for value in one.futures if value is not None]
        assert len(futures) == len(mismatches)
        for one in shown:
            for place, top in enumerate(one.top):
                assert (top is None) == (one.kind[place] == 0)
                if top is not None:
                    assert (top.dense[0][0], top.quantized[0][0]) == (one.reference[place], one.quantized[place])
            for place, both in enumerate(one.futures):
                if both is not None:
                    assert (both.reference[0], both.competitor[0]) == (one.reference[place], one.competitor[place])
                    assert both.continued_by == "D"


def test_the_text_of_every_token_on_the_page_is_known(page: Page) -> None:
    found = set(page.tokens)
    for candidate in page.candidates:
        for one in candidate.responses:
            assert one is not None
            assert one.states is not None
            assert {*(one.answer.tokens or ()), *one.states.reference, *one.states.competitor} <= found
            assert {token for top in one.states.top if top for token, _ in (*top.dense, *top.quantized)} <= found
            assert {t for both in one.states.futures if both for t in (*both.reference, *both.competitor)} <= found
    assert not any(text.startswith("<") and text[1:-1].isdigit() for text in page.tokens.values())


def test_figures_names_and_sizes_are_those_of_the_report(page: Page, compared: Path) -> None:
    for candidate in page.candidates:
        assert candidate.figures["noise"].value is not None
        assert candidate.size_bytes is not None
        assert page.dense_bytes is not None
        assert candidate.size_bytes < page.dense_bytes
    assert page.measures["kl"].unit == "nats"
    assert page.measures["mismatch"].unit == "%"
    worst, best = page.candidates
    kl = [one.figures["kl"].value or 0.0 for one in (worst, best)]
    assert kl[0] > kl[1]
    assert [one.computes for one in worst.served] == ["rounded values, unpacked", "unknown"]
    assert worst.served[0].note
    assert worst.served[1].note == "no kernel is known to run it: simulation only"
    assert any(one.command == "vllm serve DIR" for one in best.served)


def test_the_verdict_has_the_numbers_and_intervals_of_the_report(page: Page) -> None:
    for candidate in page.candidates:
        figure, total = candidate.figures["reworded"], len(page.prompts)
        counts = [round((value or 0.0) * total / 100) for value in (figure.value, figure.low, figure.high)]
        assert f"Of {total} answers {counts[0]} [{counts[1]}, {counts[2]}] " in candidate.verdict or not counts[0]
    assert page.candidates[0].verdict.startswith("Of 6 answers 6 [6, 6] are worded differently: ")


def test_a_comparison_of_an_earlier_version_is_completed_by_the_same_command(
    compared: Path, small: Path, items: list[Item], tmp_path: Path
) -> None:
    copy = shutil.copytree(compared, tmp_path / "copy")
    for name in ("prompts.parquet", "items.parquet", "tokens.json"):
        (copy / "onptq" / name).unlink()
    (home(copy, CANDIDATES[0]) / "details.parquet").unlink()
    with pytest.raises(OnPTQError, match=r"without prompts\.parquet and items\.parquet"):
        collect(copy)
    prompts = load_manifest(small / "prompts.jsonl")
    compare_models(small, CANDIDATES, copy, items=items, prompts=prompts, recipe=RECIPE, replicates=50, origin="tests")
    assert collect(copy) == collect(compared)


def test_what_is_kept_of_states_is_no_part_of_what_is_compared(
    compared: Path, small: Path, items: list[Item], tmp_path: Path
) -> None:
    copy = shutil.copytree(compared, tmp_path / "copy")
    recipe = RECIPE.with_overrides({"report.detail": "full"})
    prompts = load_manifest(small / "prompts.jsonl")
    compare_models(small, CANDIDATES, copy, items=items, prompts=prompts, recipe=recipe, replicates=50)
    tops = [
        top for c in collect(copy).candidates for one in c.responses if one and one.states for top in one.states.top
    ]
    assert tops
    assert None not in tops


def test_the_receipt_has_the_numbers_of_the_states(compared: Path) -> None:
    found = receipt(find(compared))
    assert [one["name"] for one in found["candidates"]] == list(CANDIDATES)
    for one in found["candidates"]:
        states = States.read(home(compared, one["name"]) / "states.parquet")
        assert one["positions"] == len(states)
        assert one["top_1_agreement"] == pytest.approx(1 - (states.kind == MISMATCH).mean())
        assert one["kl"]["max"] == pytest.approx(max(states.kl.tolist()))
        assert one["kl"]["mean"] == pytest.approx(sum(states.kl.tolist()) / len(states))
        assert one["kl"]["median"] == pytest.approx(float(np.median(states.kl.astype(np.float64))))
        assert len(one["theta_sha256"]) == 64
    assert found["model"]["sha256"]
    assert found["prompts"]["count"] == 6


# --- of a run -----------------------------------------------------------------------------------------------------------


def test_the_page_of_a_run_shows_held_out_prompts_and_rounds(ran: Path, small: Path) -> None:
    place = find(ran)
    assert place == find(run_home(ran)) == RunAlone(run_home(ran), ran)
    page = gather([place])
    manifest = {one.id: one for one in load_manifest(small / "prompts.jsonl")}
    roles = pq.read_table(run_home(ran) / "prompts.parquet").column("role").to_pylist()
    held_out = [one for one, role in zip(page.prompts, roles, strict=True) if role == "holdout"]
    assert (len(page.prompts), len(held_out)) == (6, 2)
    names = [one.name for one in page.candidates]
    assert page.dense_bytes == sum(file.stat().st_size for file in small.glob("*.safetensors"))
    sizes = {one.name: one.size_bytes for one in page.candidates}
    whole = sum(file.stat().st_size for file in ran.glob("*.safetensors"))
    assert {size for name, size in sizes.items() if not name.startswith("round ")} == {whole}
    assert {"seconds", "peak"} <= page.candidates[0].figures.keys()
    assert names[0] == "result"
    assert {"rtn", "round 1", "round 2"} <= set(names)
    answered = {one.name: [r is not None for r in one.responses] for one in page.candidates}
    assert answered["result"] == [role == "holdout" for role in roles]
    assert answered["round 1"] == [role == "calibration" for role in roles]
    dense = read_trajectories(run_home(ran) / "final/dense_trajectories.parquet")
    answers = [one.dense for one in held_out]
    assert sorted(tuple(one.tokens or ()) for one in answers) == sorted(one.tokens for one in dense)
    assert all(one.text for one in answers)
    for question in page.prompts:
        assert question in held_out or question.dense == Answer("")
        [turn] = question.turns
        given = manifest[question.id].messages[-1]["content"]
        assert [("image" if p.media is not None else p.text) for p in turn.parts] == [
            p.get("text", "image") for p in given
        ]
    [first] = [one for one in page.candidates if one.name == "round 1"]
    bank, rollouts = load_bank(run_home(ran)), load_trajectories(run_home(ran))
    shown = [one for one in first.responses if one is not None]
    assert [one.answer.tokens for one in shown] == [one.tokens for one in rollouts]
    critical = [value for one in shown if one.states for value in one.states.critical]
    assert critical == bank.critical.tolist()
    risk = [value for one in shown if one.states for value in one.states.risk]
    assert risk == bank.risk.tolist()
    assert all(one.states and one.states.became and len(one.states.became[0]) == 1 for one in shown)


def test_a_round_shows_weight_likeliest_tokens_and_both_futures_of_its_critical_states(ran: Path) -> None:
    page, bank = gather([find(ran)]), load_bank(run_home(ran))
    [first] = [one for one in page.candidates if one.name == "round 1"]
    places = {one.id: place for place, one in enumerate(page.prompts)}
    rows = pq.read_table(run_home(ran) / "prompts.parquet").to_pylist()
    place_of = {row["ordinal"]: places[row["id"]] for row in rows}
    assert bank.critical.sum() > 3
    for row in range(len(bank)):
        response = first.responses[place_of[int(bank.prompt[row])]]
        assert response is not None
        states, at = response.states, int(bank.t[row]) - 1
        assert states is not None
        assert states.critical[at] == bank.critical[row]
        top, futures = states.top[at], states.futures[at]
        if not bank.critical[row]:
            assert (top, futures) == (None, None)
            continue
        assert top is not None
        assert futures is not None
        assert (top.dense[0][0], top.quantized[0][0]) == (bank.reference[row], bank.quantized[row])
        assert (futures.reference[0], futures.competitor[0]) == (bank.reference[row], bank.competitor[row])
        assert futures.continued_by == "Q"
        reach = int(bank.horizon[row])
        assert sum(futures.apart[:reach]) / max(reach, 1) == pytest.approx(float(bank.consequence[row]), abs=1e-6)
        assert states.weight[at] == bank.weight[row] > 0


def test_futures_are_kept_where_the_update_does_not_depend_on_them(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    few = {"rounds": 1, "data.prompts": 2, "data.holdout": 1, "branch.policy": "dense"}
    recipe = RECIPE.with_overrides({**CYCLE, **few, "calibrate.pair": 0.0, "calibrate.hidden": 0.0})
    assert not recipe.branches
    onptq.quantize(small, out, calibration=small / "prompts.jsonl", recipe=recipe, verify=False)
    [first] = [one for one in gather([find(out)]).candidates if one.name == "round 1"]
    states = [one.states for one in first.responses if one is not None and one.states is not None]
    looked = [
        (one.kind[at], one.futures[at], one.consequence[at])
        for one in states
        for at in range(len(one.kind))
        if one.critical[at]
    ]
    assert any(kind for kind, _, _ in looked)
    for kind, futures, consequence in looked:
        assert (futures is None) == (consequence is None) == (kind == 0)
        assert futures is None or futures.continued_by == "D"


def test_the_critical_states_that_weigh_most_are_kept() -> None:
    weight, risk = np.array([0.2, 0, 0.3, 0.3, 0.2], np.float32), np.array([1, 9, 1, 2, 3], np.float32)
    states = plain_states(5).with_columns(weight=weight, risk=risk, critical=weight > 0)
    kept = [weightiest(states, most).tolist() for most in (0, 1, 2, 3, 9)]
    assert kept == [[], [3], [2, 3], [2, 3, 4], [0, 2, 3, 4]]


def test_the_dense_models_answers_stand_beside_rounds_on_them(ran: Path) -> None:
    recipe = Recipe().with_overrides({"follow.policy": "dense"})
    rollouts = {one.prompt: one for one in load_trajectories(run_home(ran))}
    held_out = dense_answers(run_home(ran), Recipe())
    assert dense_answers(run_home(ran), recipe) == {**held_out, **rollouts}
    assert not held_out.keys() & rollouts.keys()


def test_a_run_keeps_task_question_and_reference_of_its_prompts(ran: Path, small: Path, tmp_path: Path) -> None:
    given = {one.id: one for one in known(small)}
    page = gather([find(ran)])
    assert {one.id: (one.task, one.reference) for one in page.prompts} == {
        name: (one.task, one.reference) for name, one in given.items()
    }
    rows = pq.read_table(run_home(ran) / "prompts.parquet")
    for row in rows.to_pylist():
        assert json.loads(row["messages"]) == given[row["id"]].messages
    older = shutil.copytree(run_home(ran), tmp_path / "older-run")
    pq.write_table(rows.drop_columns(["task", "messages", "reference"]), older / "prompts.parquet")
    before = collect_run(older, ran)
    assert {(one.task, one.reference) for one in before.prompts} == {("", None)}
    for one, other in zip(before.prompts, page.prompts, strict=True):
        shown = [replace(turn, parts=list(turn.parts)) for turn in one.turns if turn.role == "user"]
        assert shown == [turn for turn in other.turns if turn.role == "user"]


def test_pages_need_no_file_outside_the_results(
    ran: Path, compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gather([find(ran)]), collect(compared)
    assert all(any(one.src for one in page.media) for page in before)
    shutil.copytree(run_home(ran), tmp_path / "moved-run")
    shutil.copytree(compared, tmp_path / "compared")
    monkeypatch.setattr(Media, "read", lambda _: pytest.fail("a file of the user is read"))
    assert (collect_run(tmp_path / "moved-run", tmp_path / "gone"), collect(tmp_path / "compared")) == before


def test_a_run_of_an_earlier_version_without_its_tokenizer_shows_the_numbers_of_tokens(
    ran: Path, tmp_path: Path
) -> None:
    older = shutil.copytree(run_home(ran), tmp_path / "older-run")
    for name in (TOKENS, PREVIEWS):
        (older / name).unlink()
    page = collect_run(older, tmp_path)
    assert set(page.tokens.values()) == {f"<{token}>" for token in page.tokens}
    assert any(one.src for one in page.media)


def test_what_became_of_a_state_is_known_where_later_answers_came_to_its_prefix() -> None:
    def visit(tokens: Sequence[int], kinds: Sequence[int]) -> Visit:
        states = plain_states(len(tokens)).with_columns(kind=np.array(kinds, np.int8))
        return Visit({0: Trajectory(0, tuple(tokens), True)}, states, states.rows_by_prompt())

    first = visit([5, 6, 7, 8], [0, 1, 2, 0])
    later = [visit([5, 6, 9, 8, 1], [2, 0, 1, 2, 2]), visit([5, 6], [0, 0]), Visit({}, plain_states(0), {})]
    assert became(first, 0, later) == [[2, 0, None], [0, 0, None], [1, None, None], [None, None, None]]


# --- by hand ------------------------------------------------------------------------------------------------------------


def plain_states(count: int, margin: float = 0.0, kind: int = MISMATCH) -> States:
    """States of prompt 0, all alike."""
    integers = {name: np.zeros(count, np.int32) for name in ("prompt", "token", "reference", "competitor", "quantized")}
    numbers = {name: np.zeros(count, np.float32) for name in ("margin_quant", "erosion", "js", "kl")}
    return States.compared(
        **integers,
        **numbers,
        margin_dense=np.full(count, margin, np.float32),
        t=np.arange(1, count + 1, dtype=np.int32),
        kind=np.full(count, kind, np.int8),
    )


@pytest.mark.parametrize(
    ("dense", "own", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [3, 2], 0), ([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([1, 2], [1], 1)],
)
def test_answers_part_at_the_first_token_that_differs(dense: list[int], own: list[int], place: int | None) -> None:
    assert fork(dense, own) == place


TEXTS = TokenTexts({1: "Red", 2: " cat", 3: " sits", 4: " here", 5: " now", 6: "red", 7: ".", 8: "blue"}, {})


@pytest.mark.parametrize(
    ("dense", "own", "margin", "change"),
    [
        ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5), 9.0, "same"),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4, 4), NEAR_TIE - 0.01, "reworded"),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4, 4), NEAR_TIE, "clear"),
        ((1,), (6, 7), 9.0, "clear"),  # "Red" and "red." say the same
        ((1,), (8,), 0.0, "content"),
    ],
)
def test_how_much_an_answer_changed(dense: tuple[int, ...], own: tuple[int, ...], margin: float, change: str) -> None:
    states = plain_states(len(own), margin)
    found = respond(Trajectory(0, dense, True), Trajectory(0, own, True), states, {}, TEXTS)
    assert found.change == change


def test_an_answer_that_was_cut_off_is_not_judged_by_its_words() -> None:
    states = plain_states(1, 0.0)
    found = respond(Trajectory(0, (1,), False), Trajectory(0, (8,), False), states, {}, TEXTS)
    assert found.change == "reworded"
    assert words("A blue, BLUE\tcat!") == ["a", "blue", "blue", "cat"]


def test_a_state_has_its_details_where_they_are_kept() -> None:
    detail = Detail([(1, 1.0)], [(2, 1.0)], Future([1], [2], [0.5]))
    found = respond(None, Trajectory(0, (1, 2), True), plain_states(2), {(0, 2): detail}, TEXTS).states
    assert found is not None
    assert [one and one.dense for one in found.top] == [None, [(1, 1.0)]]
    assert [one and one.apart for one in found.futures] == [None, [0.5]]
    assert found.consequence == [None, 0.5]
    ended = Detail([(1, 1.0)], [(2, 1.0)], Future([1, 4], [2, 3, 5], [0.5, 0.0, 0.0]))
    found = respond(None, Trajectory(0, (1, 2), True), plain_states(2), {(0, 1): ended}, TEXTS).states
    assert found is not None
    assert found.consequence == [0.5, None]


def responses(*changes: str) -> list[Response]:
    """Responses of one token each, with that change."""
    found = []
    for change in changes:
        own = (1,) if change == "same" else (2,)
        states = plain_states(1, 9.0 if change in ("clear", "sure content") else 0.0)
        one = respond(Trajectory(0, (1,), False), Trajectory(0, own, False), states, {}, TEXTS)
        found.append(replace(one, change="content") if change.endswith("content") else one)
    return found


def test_the_verdict_counts_answers() -> None:
    said = verdict(responses("same", "reworded", "clear", "sure content", "content"), None, random())
    counted = said.replace("[", "(").replace("]", ")")
    assert counted.startswith("Of 5 answers 4 (")
    assert ") are worded differently: 2 (" in counted
    assert ") say something else, 1 (" in counted
    assert ") changes clearly, 1 (" in counted
    assert counted.endswith(") parts at a near tie.")
    assert verdict(responses("reworded", "reworded"), None, random()).endswith(": all part at a near tie.")
    assert verdict(responses("same", "clear"), None, random()).endswith(": it changes clearly.")
    assert verdict(responses("same", "same"), None, random()) == "All 2 answers are worded as before."
    assert verdict([], None, random()) == "Nothing was answered."


def graded(rights: Sequence[bool | None]) -> list[Question]:
    return [Question(str(n), "a", (), (), Answer("", right=right)) for n, right in enumerate(rights)]


def test_flips_are_who_was_right() -> None:
    questions = graded([True, True, True, False, False, None])
    own = [Answer("", right=right) for right in (True, False, True, True, False, None)]
    found = flips_of(questions, own, random())
    assert found is not None
    cells = (found.right_right, found.right_wrong, found.wrong_right, found.wrong_wrong)
    assert [(one.count, list(one.items)) for one in cells] == [(2, [0, 2]), (1, [1]), (1, [3]), (1, [4])]
    assert [one.percent.value for one in cells] == [40, 20, 20, 20]
    for one in cells:
        assert one.percent.low is not None
        assert one.percent.high is not None
        assert one.percent.low <= (one.percent.value or 0) <= one.percent.high
    said = verdict([], found, random())
    assert said.startswith("Of 5 graded answers 1 [0, ")
    assert "] turned wrong and 1 [0, " in said
    assert flips_of(graded([None]), [Answer("")], random()) is None


def test_media_of_the_worst_examples_are_kept_first() -> None:
    def asked(color: str) -> Prompt:
        buffer = io.BytesIO()
        Image.new("RGB", (2 * SIDE, SIDE), color).save(buffer, "png")
        source = Media(None, color, buffer.getvalue())
        return Prompt(0, color, [{"role": "user", "content": [{"type": "image"}]}], (source,))

    whole = Album()
    whole.turns(asked("red"))
    [red] = whole.media()
    assert red.src is not None
    assert red.note == "1024 x 512 pixels"
    assert Image.open(io.BytesIO(decoded(red.src))).size == (SIDE, SIDE // 2)
    tight = Album(budget=len(red.src) + 100)
    turns = [tight.turns(asked(color), badness)[0] for color, badness in (("red", 0.0), ("green", 2.0), ("blue", 1.0))]
    assert [turn.parts[0].media for turn in turns] == [0, 1, 2]
    assert [one.src is not None for one in tight.media()] == [False, True, False]
    assert tight.media()[0].note == "left out, so that the page stays small"


def test_media_that_cannot_be_read_are_named_and_said_to_be_missing(tmp_path: Path) -> None:
    album = Album()
    album.place("image", Media(tmp_path / "gone.png", "a"), 0)
    album.place("image", Media(None, "bbbbbbbbbb", b"no image"), 0)
    album.place("audio", Media(None, "cccccccccc", b"no audio"), 0)
    found = album.media()
    assert [(one.name, one.src) for one in found] == [
        ("gone.png", None), ("image bbbbbbbb", None), ("audio cccccccc", None),
    ]  # fmt: skip
    assert found[0].note == "cannot be shown: No such file or directory"
    assert all(one.note.startswith("cannot be shown: ") for one in found)


# --- text of tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_tokens_together_are_what_the_tokenizer_says(tiny: Callable[[str], Tiny], family: str) -> None:
    tokenizer = tiny(family).processor.tokenizer
    ids = tokenizer("Ein rotes Haus, 日本 ▁ é\n  x <|im_end|> 🙂", add_special_tokens=False)["input_ids"]
    texts = TokenTexts.of(tokenizer, [*range(len(tokenizer)), *ids])
    assert texts.text(ids) == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert texts.parts  # a smiley has no token of its own
    part = next(iter(texts.parts))
    assert texts.shown(part).startswith("\\x")
    assert texts.shown(10**6) == "<1000000>"
    every = list(range(0, len(tokenizer), 7))
    assert texts.text(every) == tokenizer.decode(every, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_texts_of_tokens_are_read_as_they_were_written(tmp_path: Path) -> None:
    from onptq.files import to_json

    texts = TokenTexts({1: " a", 3: "<|end|>"}, {2: b"\xe2\x96"}, frozenset({3}))
    file = tmp_path / "tokens.json"
    file.write_text(to_json(texts.to_dict()), encoding="utf-8")
    assert TokenTexts.read(file) == texts
    assert texts.text([1, 2, 3]) == " a�"
    assert texts.shown(2) == "\\xe2\\x96"


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_are_read_back_from_the_tokens_that_went_into_the_model(
    tiny: Callable[[str], Tiny], family: str
) -> None:
    checkpoint, known = tiny(family), REGISTERED[family]
    placeholders = {one.token: kind for one, kind in ((known.image, "image"), (known.audio, "audio")) if one}
    for prompt in load_manifest(checkpoint.manifest):
        ids = checkpoint.processor(prompt).tensors["input_ids"][0].tolist()
        texts = TokenTexts.of(checkpoint.processor.tokenizer, ids)
        read = prompt_from(ids, "id", 0, (prompt.images, prompt.audios), texts, placeholders)
        given = [[(p["type"], p.get("text")) for p in message["content"]] for message in prompt.messages]
        found = [[(p["type"], p.get("text")) for p in message["content"]] for message in read.messages]
        assert found[-len(given) :] == given
        assert [message["role"] for message in read.messages][-len(given) :] == [m["role"] for m in prompt.messages]


def test_a_comparison_is_found_by_its_folder(compared: Path, tmp_path: Path) -> None:
    assert find(compared) == Comparison(compared)
    with pytest.raises(OnPTQError, match="has no results to show"):
        find(tmp_path)
    with pytest.raises(OnPTQError, match="is no folder"):
        find(tmp_path / "absent")
