"""The changed answers: which come first, what is said of them, and that no text of users can be more than text."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from onptq.page.contract import Answer, Candidate, Media, MessagePart, Page, Question, Response, States, Turn
from onptq.page.differences import (
    Differences,
    differences,
    parting,
    print_differences,
    to_json,
    to_markdown,
)
from onptq.page.text import in_markdown, one_line, visible

MarkdownIt: Any = pytest.importorskip("markdown_it").MarkdownIt

TOKENS = {1: " yes", 2: " no", 3: "\n", 4: " maybe"}
HOSTILE = "<script>alert(1)</script> **b** [x](http://a.b) `c` | d \x1b[31mred\x07 \u202egnp.exe\nnext # line"


def question(name: str, dense: Answer, text: str = "Is it?", **more: Any) -> Question:
    return Question(name, "vqa", ("text",), [Turn("user", [MessagePart(media=0), MessagePart(text)])], dense, **more)


def forked(consequence: float | None, risk: float, margin: float = 1.5) -> Response:
    """An answer that leaves [1, 1] at its second token."""
    columns: dict[str, Any] = {name: [0.0, 0.0] for name in ("margin_quant", "erosion", "js", "kl", "weight")}
    states = States(
        reference=[1, 1],
        competitor=[2, 2],
        quantized=[1, 2],
        margin_dense=[9.0, margin],
        kind=[0, 2],
        consequence=[None, consequence],
        risk=[0.0, risk],
        critical=[False, False],
        top=[None, None],
        futures=[None, None],
        **columns,
    )
    return Response(Answer(" yes no", [1, 2]), "clear", 1, states)


def page_of(
    prompts: Sequence[Question],
    responses: Sequence[Response | None],
    items: Sequence[Question] = (),
    answers: Sequence[Answer] = (),
) -> Page:
    one = Candidate(
        "rtn:W4A8", "RTN", "", "Of 3 answers 2 are worded differently.", {}, responses=responses, answers=answers
    )
    return Page("dense and RTN", "dense", "mine.jsonl", [one], prompts, items, [Media("image", "a.png")], TOKENS)


def changes(page: Page) -> list[tuple[str, str]]:
    return [(one.id, one.change) for one in differences(page, page.candidates[0]).changed]


SAME = Response(Answer(" yes yes", [1, 1]), "same")
DENSE = Answer(" yes yes", [1, 1])


# --- order ------------------------------------------------------------------------------------------------------------


def test_the_worst_changes_come_first() -> None:
    reworded = Response(Answer(" yes\n", [1, 3]), "reworded", 1)
    content = Response(Answer(" no", [2]), "content", 0)
    prompts = [question(name, DENSE) for name in ("same", "reworded", "mild", "grave", "content")]
    responses = [SAME, reworded, forked(0.1, 2.0), forked(0.5, 3.0), content]
    right, wrong = Answer("4", right=True, score=1.0), Answer("5", right=False, score=0.0)
    items = [question("lost", right), question("won", wrong), question("kept", right), question("still", wrong)]
    page = page_of(prompts, responses, items, [wrong, right, right, Answer("6", right=False, score=0.0)])
    assert changes(page) == [
        ("lost", "turned wrong"),
        ("content", "content"),
        ("won", "turned right"),
        ("grave", "clear"),
        ("mild", "clear"),
        ("reworded", "reworded"),
        ("still", "reworded"),
    ]


def test_clear_changes_are_counted_among_all_answers() -> None:
    page = page_of([question(name, DENSE) for name in "abcd"], [SAME, forked(0.1, 1.0), None, SAME])
    found = differences(page, page.candidates[0])
    assert (found.answers, found.clear) == (3, 1)
    assert found.clear_percent == pytest.approx(100 / 3)
    assert Differences("a", "a", "", 0, []).clear_percent == 0.0


def test_a_prompt_and_a_graded_item_of_one_id_are_one_example_with_its_fork() -> None:
    right, wrong = Answer("yes", right=True, score=1.0), Answer("no", right=False, score=0.0)
    page = page_of([question("a", DENSE)], [forked(0.2, 1.0)], [question("a", right)], [wrong])
    found = differences(page, page.candidates[0])
    assert found.answers == 1
    assert [(one.id, one.change, one.fork, one.margin) for one in found.changed] == [("a", "turned wrong", 1, 1.5)]


def test_a_graded_item_that_scores_otherwise_has_other_content() -> None:
    was, now = Answer("a b", score=1.0), Answer("a c", score=0.5)
    assert changes(page_of([], [], [question("a", was)], [now])) == [("a", "content")]


# --- what is said -----------------------------------------------------------------------------------------------------


def test_a_difference_names_both_tokens_the_margin_and_the_consequence() -> None:
    page = page_of([question("a", DENSE, reference="yes")], [forked(0.25, 1.0)])
    (one,) = differences(page, page.candidates[0]).changed
    assert (one.question, one.dense, one.quantized, one.reference) == ("[image] Is it?", " yes yes", " yes no", "yes")
    assert (one.dense_token, one.quantized_token) == (" yes", " no")
    assert (one.fork, one.margin, one.consequence, one.risk) == (1, 1.5, 0.25, 1.0)


def test_an_answer_that_ends_where_the_other_goes_on_has_no_token_there() -> None:
    longer = Response(Answer(" yes yes no", [1, 1, 2]), "reworded", 2)
    page = page_of([question("a", DENSE)], [longer])
    (one,) = differences(page, page.candidates[0]).changed
    assert (one.dense_token, one.quantized_token, one.margin) == (None, " no", None)
    assert r'\(end\) became " no"' in to_markdown(page)


def test_markdown_begins_with_the_verdict_and_has_every_change() -> None:
    page = page_of([question(name, DENSE) for name in ("a", "b")], [forked(0.25, 1.0), SAME])
    text = to_markdown(page)
    assert text.index("Of 3 answers") < text.index("### 1. a (vqa): clear change")
    assert "### 2." not in text
    assert r'part at token 2: " yes" became " no", margin 1.50 logits, consequence 0.250' in text


def test_markdown_of_the_worst_says_how_many_are_left_out() -> None:
    page = page_of([question(name, DENSE) for name in "abc"], [forked(0.25, 1.0)] * 3)
    assert "2 more changed answers are not shown." in to_markdown(page, top=1)


def test_json_has_the_same_records_and_their_counts() -> None:
    page = page_of([question(name, DENSE) for name in "ab"], [forked(None, 1.0), SAME])
    (candidate,) = json.loads(to_json(page))["candidates"]
    assert [candidate[key] for key in ("name", "answers", "changed", "clear")] == ["rtn:W4A8", 2, 1, 1]
    assert candidate["verdict"].startswith("Of 3")
    assert candidate["differences"][0]["dense_token"] == " yes"
    assert candidate["differences"][0]["consequence"] is None


def test_long_answers_are_shown_where_they_part() -> None:
    one, other = "a " * 300 + "left behind", "a " * 300 + "right behind"
    assert "left" in parting(one, other, 80)
    assert len(parting(one, other, 80)) <= 80
    assert parting(one, other, 80).startswith("…")
    assert parting("short left", "short right", 80) == "short left"


# --- hostile text -----------------------------------------------------------------------------------------------------


def hostile_page() -> Page:
    mine = Response(Answer(HOSTILE + " too", [1, 2]), "clear", 1)
    page = page_of([question(HOSTILE, Answer(HOSTILE, [1, 5]), HOSTILE, reference=HOSTILE)], [mine])
    return Page(HOSTILE, "dense", "", page.candidates, page.prompts, (), page.media, {2: "\x1b[2J", 5: "<b>"})


def test_markdown_shows_hostile_text_as_text() -> None:
    text = to_markdown(hostile_page())
    html = MarkdownIt("commonmark", {"html": True}).render(text)
    assert "<script" not in html
    assert "<a " not in html
    assert "<code>" not in html
    assert "<strong>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; **b** [x](http://a.b) `c` | d" in html
    assert html.count("<h3>") == 1
    assert not any(ord(letter) < 32 and letter != "\n" for letter in text)
    assert "\u202e" not in text


@pytest.mark.parametrize("width", [20, 40, 76, 80, 200])
def test_the_terminal_gets_no_control_character_and_no_line_too_long(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    print_differences(console, hostile_page())
    text = file.getvalue()
    assert not any(ord(letter) < 32 and letter != "\n" for letter in text.replace("\x1b[1m", "").replace("\x1b[0m", ""))
    assert "\u202e" not in text
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "[31mred" in text.replace("\n", "").replace(" ", "") or width < 80


def test_the_table_has_the_worst_ten_and_says_how_many_more_there_are() -> None:
    page = page_of([question(f"p{n}", DENSE) for n in range(13)], [forked(0.1, float(n)) for n in range(13)])
    file = io.StringIO()
    print_differences(Console(file=file, width=100), page)
    text = file.getvalue()
    assert text.startswith("RTN: Of 3 answers")
    assert "p12" in text
    assert "p3 " in text
    assert "p2 " not in text
    assert "3 more changed answers" in text


def test_text_is_made_visible_without_hurting_scripts_that_need_joiners() -> None:
    assert visible("a\u00a0b\tc\x00\x9b\ud800") == "a b c\\x00\\x9b\\ud800"
    assert visible("क्‍ष 👩‍🔬") == "क्‍ष 👩‍🔬"
    assert one_line(" a\n\n b ") == "a b"
    assert one_line("abcdef", 4) == "abc…"
    assert in_markdown("<a> & *b*") == r"&lt;a&gt; &amp; \*b\*"
