"""The page as a file: its data come back as they were, whatever text is in them, and nothing of it is HTML."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onptq.errors import OnPTQError
from onptq.page.contract import Answer, Candidate, Figure, Page, Question
from onptq.page.write import DATA, TITLE, asset, fill, plain, shortened, to_bytes, write_page

SCRIPT = "</script><script>alert(1)</script><!-- \u2028 \x1b[31m &amp; \"'"
DOCUMENT = f"<!doctype html><title>{TITLE}</title><h1>{TITLE}</h1><script type=data>{DATA}</script><p>{TITLE}</p>"


def some_page(text: str = "words", value: float = 1.0) -> Page:
    candidate = Candidate("a", text, "how", "verdict", {"kl": Figure(value, None, math.inf)})
    return Page(text, "dense", "tests", [candidate], [Question(text, "", ["text"], (), Answer(text))], tokens={7: text})


def read(document: str) -> Any:
    packed = re.search(r"<script type=data>([^<]*)</script>", document)
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def test_data_come_back_as_they_were() -> None:
    page = some_page()
    found = read(fill(DOCUMENT, page))
    expected = json.loads(json.dumps(page.to_dict(), default=str).replace("Infinity", "null"))
    assert found == expected
    assert found["tokens"] == {"7": "words"}
    assert found["candidates"][0]["figures"]["kl"] == {"value": 1, "low": None, "high": None}


@given(st.text(st.characters(), max_size=20))
def test_any_text_stays_text(text: str) -> None:
    found = fill(DOCUMENT, some_page(text))
    titles = re.split(f"{re.escape(DOCUMENT.partition(TITLE)[0])}|</title><h1>", found)
    assert html.unescape(titles[1]) == html.unescape(html.escape(text.encode(errors="replace").decode()))
    assert read(found)["prompts"][0]["dense"]["text"] == text.encode(errors="replace").decode()


def test_no_script_of_a_prompt_gets_into_the_document() -> None:
    found = fill(DOCUMENT, some_page(SCRIPT))
    assert found.count("<script") == 1
    assert "alert(1)</script>" not in found
    assert html.escape(SCRIPT) in found
    assert read(found)["title"] == SCRIPT


def test_markers_in_a_prompt_or_a_title_are_text_too() -> None:
    found = fill(DOCUMENT, some_page(f"{DATA} {TITLE}"))
    assert read(found)["title"] == f"{DATA} {TITLE}"
    assert f"<title>{DATA} {TITLE}</title>" in found


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path: Path) -> None:
    assert read(fill(DOCUMENT, some_page("a\ud800b")))["title"] == "a?b"
    assert write_page(some_page("a\ud800b"), tmp_path / "page.html") == (tmp_path / "page.html").stat().st_size


@pytest.mark.parametrize(
    ("value", "short"),
    [
        (1 / 3, 0.33333),
        (123456.7, 123460),
        (2.0, 2),
        (-1.5e-9, -1.5e-9),
        (math.nan, None),
        (-math.inf, None),
        (0.1, 0.1),
    ],
)
def test_numbers_have_five_digits(value: float, short: float | None) -> None:
    assert shortened(value) == short
    assert plain(np.array([value])) == [short]


def test_the_same_data_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    sizes = {write_page(some_page(), path) for path in (first, second)}
    assert first.read_bytes() == second.read_bytes()
    assert sizes == {len(first.read_bytes())}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.html", "b.html"]


def test_the_document_of_the_package_has_a_place_for_everything() -> None:
    document = asset()
    assert document.count(DATA) == 1
    assert TITLE in document
    assert b"some words" not in document.encode()
    with pytest.raises(OnPTQError, match="has no @@PAGE-DATA@@"):
        fill("<title>@@PAGE-TITLE@@</title>", some_page())


def test_whatever_a_page_holds_can_be_written() -> None:
    assert json.loads(to_bytes(some_page(value=math.nan)))["candidates"][0]["figures"]["kl"]["value"] is None
    assert plain({1: (True, None, "a", np.float32(0.1), {2.5})}) == {"1": [True, None, "a", 0.1, [2.5]]}
