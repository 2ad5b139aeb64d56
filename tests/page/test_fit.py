"""A page is under 10 MB: details of rounds give way first, then those of other states, and media take what is left."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onptq.page.contract import (
    Answer,
    Candidate,
    Futures,
    Media,
    MessagePart,
    Page,
    Question,
    Response,
    States,
    Top,
    Turn,
)
from onptq.page.fit import fitted
from onptq.page.write import LIMIT, packed, write_page

PROMPTS, LENGTH, VOCABULARY = 128, 48, 30_000


def tops(rng: np.random.Generator, length: int) -> list[Top]:
    """Ten random tokens of both models in every state."""
    shares = np.sort(rng.dirichlet(np.full(10, 0.3), (length, 2)))[..., ::-1].tolist()
    tokens = rng.integers(0, VOCABULARY, (length, 2, 10)).tolist()
    pairs = (
        [list(zip(*both, strict=True)) for both in zip(*state, strict=True)]
        for state in zip(tokens, shares, strict=True)
    )
    return [Top(*both) for both in pairs]


def states(rng: np.random.Generator, length: int, critical: bool) -> States:
    """Random states with full detail, which no compression makes small."""
    numbers = {
        name: np.abs(rng.normal(size=length)).tolist()
        for name in ("margin_dense", "margin_quant", "erosion", "js", "kl", "risk", "weight")
    }
    tokens = {name: rng.integers(0, VOCABULARY, length).tolist() for name in ("reference", "competitor", "quantized")}
    kind = rng.choice([0, 1, 2], length, p=[0.7, 0.2, 0.1]).tolist()
    futures = [
        Futures(
            rng.integers(0, VOCABULARY, 16).tolist(),
            rng.integers(0, VOCABULARY, 16).tolist(),
            rng.random(16).tolist(),
            "D",
        )
        if one == 2
        else None
        for one in kind
    ]
    return States(
        **tokens,
        **numbers,
        kind=kind,
        consequence=[None] * length,
        critical=[critical] * length,
        top=tops(rng, length),
        futures=futures,
    )


def candidate(rng: np.random.Generator, name: str, prompts: int, length: int, aside: bool = False) -> Candidate:
    responses = [
        Response(
            Answer("word " * length, rng.integers(0, VOCABULARY, length).tolist()),
            "content" if place % 2 else "same",
            0,
            states(rng, length, aside),
        )
        for place in range(prompts)
    ]
    return Candidate(name, name, "how", "verdict", {}, responses=responses, aside=aside)


def large_page(prompts: int, length: int, candidates: int, rounds: int, media_bytes: int) -> Page:
    rng = np.random.default_rng(0)
    media = [
        Media("image", f"{place}.jpg", f"data:image/jpeg;base64,{base64.b64encode(rng.bytes(media_bytes)).decode()}")
        for place in range(prompts)
    ]
    asked = [
        Question(f"p{place}", "", ["image"], [Turn("user", [MessagePart(media=place)])], Answer("said " * length))
        for place in range(prompts)
    ]
    every = [candidate(rng, f"c{number}", prompts, length) for number in range(candidates)]
    every += [candidate(rng, f"round {number + 1}", prompts, length, aside=True) for number in range(rounds)]
    return Page("title", "dense", "tests", every, asked, media=media)


def read(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def details(data: Any, name: str) -> int:
    [one] = [one for one in data["candidates"] if one["name"] == name]
    return sum(top is not None for r in one["responses"] if r is not None for top in r["states"]["top"])


@pytest.mark.slow
def test_a_page_of_128_prompts_three_candidates_and_full_detail_is_under_10_mb(tmp_path: Path) -> None:
    page = large_page(PROMPTS, LENGTH, candidates=3, rounds=0, media_bytes=36_000)
    assert sum(len(one.src or "") for one in page.media) > 6_000_000
    size = write_page(page, tmp_path / "page.html")
    assert size == (tmp_path / "page.html").stat().st_size <= LIMIT < 10_000_000
    found = read(max(re.findall(r"[A-Za-z0-9+/=]{200,}", (tmp_path / "page.html").read_text()), key=len))
    assert [details(found, one.name) for one in page.candidates] == [PROMPTS * LENGTH] * 3
    shown = [one["src"] is not None for one in found["media"]]
    assert 20 < sum(shown) < PROMPTS
    assert all(shown[1::2]) or not any(shown[::2]), "those of the worst answers are kept first"
    left_out = [one["note"] for one, there in zip(found["media"], shown, strict=True) if not there]
    assert set(left_out) == {"left out, so that the page stays small"}


@pytest.fixture(scope="module")
def page() -> Page:
    return large_page(4, 160, candidates=1, rounds=1, media_bytes=1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "kept", "round_kept"),
    [(1.0, 640, 640), (0.95, 640, 512), (0.8, 640, 0), (0.5, None, 0)],
)
def test_details_of_rounds_give_way_first(page: Page, share: float, kept: int | None, round_kept: int) -> None:
    whole = len(packed(page))
    found = read(text := fitted(page, int(share * whole), packed))
    assert len(text) <= share * whole
    mine = details(found, "c0")
    assert mine == kept or (kept is None and 0 < mine < 640)
    assert details(found, "round 1") == round_kept
    assert len(found["candidates"][0]["responses"][0]["states"]["risk"]) == 160


def test_what_fits_is_left_as_it_is_and_what_cannot_is_left_without_details(page: Page) -> None:
    assert fitted(page, 10**9, packed) == packed(page)
    least = read(fitted(page, 1, packed))
    assert (details(least, "c0"), details(least, "round 1")) == (0, 0)
    assert all(one["src"] is None for one in least["media"])
