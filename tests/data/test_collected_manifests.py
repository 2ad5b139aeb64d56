"""Collected prompts as manifests: that they read back, what they replace, and what is held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from collecting import assistant, draw, image_url, said, text_part, user, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_manifest import picture

from onptq.data.chat_logs import chat_prompts
from onptq.data.heldout import divide, linked
from onptq.data.image_folder import image_prompts
from onptq.data.manifest import load_manifest, manifest_digest
from onptq.data.prompts import Media, Prompt
from onptq.data.writing import check_target, media_outside, write_manifest
from onptq.errors import OnPTQError


@pytest.fixture(autouse=True)
def media_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests may name media in any folder."""
    monkeypatch.setenv("ONPTQ_MEDIA_ROOT", "/")


# --- writing --------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(lambda text: text.strip())
TEXT_PARTS = TEXTS.map(text_part)
IMAGES = st.sampled_from([{"type": "image"}])
AUDIOS = st.sampled_from([{"type": "audio"}])


def contents(*kinds: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.one_of(*kinds), min_size=1, max_size=4)


MESSAGES = st.builds(
    lambda first, turns, last: [
        *([{"role": "system", "content": first}] if first else []),
        *(message for ask, answer in turns for message in (user(ask), {"role": "assistant", "content": answer})),
        user(last),
    ],
    st.none() | contents(TEXT_PARTS),
    st.lists(st.tuples(contents(TEXT_PARTS, IMAGES), contents(TEXT_PARTS)), max_size=2),
    contents(TEXT_PARTS, IMAGES, AUDIOS),
)


def filled(folder: Path, messages: list[dict[str, Any]], files: Sequence[bool], extra: dict[str, Any]) -> Prompt:
    """A prompt with these messages; of its media those are files that `files` says, in turn."""
    kinds = [part["type"] for message in messages for part in message["content"]]
    media: dict[str, list[Media]] = {"image": [], "audio": []}
    for number, kind in enumerate(kind for kind in kinds if kind != "text"):
        data = picture(number % 3) if kind == "image" else b"RIFF0000WAVE"
        path = folder / "data:media" / f"{kind} {number % 3}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        is_file = files[number % len(files)]
        digest = Media(None, hashlib.sha256(data).hexdigest(), data)
        media[kind].append(replace(digest, path=path, data=None) if is_file else digest)
    return Prompt(0, "x", messages, tuple(media["image"]), tuple(media["audio"]), extra=extra)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    MESSAGES,
    st.lists(st.booleans(), min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(["task", "other"]), TEXTS | st.integers()),
    st.sampled_from(["a.jsonl", "data:media/a.jsonl", "below/there/a.jsonl"]),
)
def test_every_written_prompt_reads_back_as_the_same_content(
    tmp_path: Path, messages: list[dict[str, Any]], files: list[bool], extra: dict[str, Any], name: str
) -> None:
    prompt = filled(tmp_path, messages, files, extra)
    write_manifest([prompt], tmp_path / name)
    [again] = load_manifest(tmp_path / name)
    assert manifest_digest([again]) == manifest_digest([prompt])
    assert [one.read() for one in (*again.images, *again.audios)] == [
        one.read() for one in (*prompt.images, *prompt.audios)
    ]


def test_one_question_is_written_briefly_and_media_by_paths_from_the_manifest(tmp_path: Path) -> None:
    draw(tmp_path, "images/a.png")
    prompts = image_prompts(tmp_path / "images", ["What?"]).prompts
    linked_folder = tmp_path / "elsewhere" / "deep"
    linked_folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(linked_folder)
    for out, expected in (("p.jsonl", "images/a.png"), ("link/p.jsonl", "../../images/a.png")):
        write_manifest(prompts, tmp_path / out)
        record = {"id": "a.png", "text": "What?", "image": expected}
        assert json.loads((tmp_path / out).read_text()) == record
        assert manifest_digest(load_manifest(tmp_path / out)) == manifest_digest(prompts)


def test_media_that_a_reader_would_refuse_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(tmp_path, "images/a.png", "images/below/b.png")
    prompts = image_prompts(tmp_path / "images", ["What?"]).prompts
    out = tmp_path / "there" / "p.jsonl"
    assert media_outside(prompts, out) is None
    monkeypatch.delenv("ONPTQ_MEDIA_ROOT")
    assert media_outside(prompts, out) == tmp_path / "images"
    assert media_outside(prompts, tmp_path / "p.jsonl") is None


def test_media_that_share_only_the_root_are_named_absolutely(tmp_path: Path) -> None:
    prompt = Prompt(0, "x", [user([{"type": "audio"}])], audios=(Media(Path("/nowhere/a.wav"), "1"),))
    write_manifest([prompt], tmp_path / "p.jsonl")
    assert '"audio": "/nowhere/a.wav"' in (tmp_path / "p.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("there.jsonl", "there.jsonl exists: expected another --out, or --overwrite"),
        ("new.json", "new.json: expected a file that ends in .jsonl or .json-lines"),
        ("folder.jsonl", "folder.jsonl: is a folder, expected a file"),
    ],
)
def test_what_is_there_is_not_replaced(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "there.jsonl").touch()
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(OnPTQError) as caught:
        check_target(tmp_path / name, False)
    assert expected in str(caught.value)
    check_target(tmp_path / "there.jsonl", True)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", "old")
    prompts = [Prompt(0, "x", [user([text_part("fine")])]), Prompt(1, "y", [user([text_part("\ud800")])])]
    with pytest.raises(UnicodeEncodeError):
        write_manifest(prompts, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.jsonl"]
    assert path.read_text() == "old\n"


# --- held out -------------------------------------------------------------------------------------------------------


def pictured(ordinal: int, *shas: str, text: str = "What?") -> Prompt:
    content = [*({"type": "image"} for _ in shas), text_part(text)]
    return Prompt(ordinal, str(ordinal), [user(content)], tuple(Media(None, sha, b"") for sha in shas))


PROMPTS = st.lists(
    st.builds(
        lambda shas, text: pictured(0, *shas, text=text),
        st.lists(st.sampled_from("abcdefghijklmnop"), max_size=2),
        st.sampled_from([f"text {number}" for number in range(20)]),
    ),
    min_size=2,
    max_size=40,
).map(lambda prompts: [replace(prompt, ordinal=place, id=str(place)) for place, prompt in enumerate(prompts)])


def overlap(first: Sequence[Prompt], second: Sequence[Prompt]) -> set[str]:
    def held(prompts: Sequence[Prompt]) -> set[str]:
        images = {image.sha256 for prompt in prompts for image in prompt.images}
        return images | {said(prompt)[0][1] for prompt in prompts if not prompt.images}

    return held(first) & held(second)


@given(PROMPTS, st.integers(1, 10), st.integers(0, 3))
def test_no_held_out_prompt_shares_an_image_or_a_text_with_the_others(
    prompts: list[Prompt], wanted: int, seed: int
) -> None:
    groups = linked(prompts)
    assert sorted(prompt.ordinal for group in groups for prompt in group) == list(range(len(prompts)))
    try:
        remaining, held = divide(prompts, holdout=wanted, seed=seed)
    except OnPTQError:
        assert wanted >= len(prompts) or min(map(len, groups)) > wanted
        return
    assert 0 < len(held) <= wanted
    assert sorted([*remaining, *held], key=lambda prompt: prompt.ordinal) == prompts
    assert not overlap(remaining, held)
    assert divide(prompts, holdout=wanted, seed=seed) == (remaining, held)
    assert len(held) == wanted or min(map(len, groups)) > 1 or len(groups) < len(prompts)


def test_different_prompts_are_held_out_exactly_and_of_each_kind_in_its_share() -> None:
    prompts = [pictured(place, *([str(place)] if place < 60 else []), text=f"text {place}") for place in range(80)]
    remaining, held = divide(prompts, share=0.25, seed=3)
    assert (len(remaining), len(held)) == (60, 20)
    assert sum(bool(prompt.images) for prompt in held) == 15
    assert divide(prompts, seed=3) == (prompts, [])


def test_the_same_question_about_other_images_is_no_overlap_and_turns_of_a_chat_stay_together(tmp_path: Path) -> None:
    assert len(linked([pictured(place, str(place)) for place in range(5)])) == 5
    draw(tmp_path, "a.png")
    chat = [user("Hi"), assistant("Hello."), user(image_url("a.png"), text_part("What?"))]
    turns = chat_prompts([write_lines(tmp_path / "c.jsonl", {"messages": chat}, {"text": "What?"})], True).prompts
    assert [[one.id for one in group] for group in linked(turns)] == [["c-1/1", "c-1/2"], ["c-2"]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"holdout": 4}, "--holdout 4: 4 of 4 prompts would be held out"),
        ({"share": 0.1}, "--holdout-share 0.1: 0 of 4 prompts would be held out; expected at least 1"),
        ({"holdout": 1, "share": 0.5}, "expected one of --holdout and --holdout-share, got both"),
        ({"holdout": 1}, "no 1 prompts can be held out, as at least 2 share an image"),
    ],
)
def test_what_cannot_be_held_out_is_refused(options: dict[str, Any], expected: str) -> None:
    prompts = [pictured(place, str(place // 2), text=str(place)) for place in range(4)]
    with pytest.raises(OnPTQError) as caught:
        divide(prompts, **options)
    assert expected in str(caught.value)
