"""Prompts from folders of images and from chats, and more from few."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from collecting import assistant, data_url, draw, image_url, said, text_part, user, write_lines
from hypothesis import given
from hypothesis import strategies as st
from test_manifest import picture

from onptq.data.calibration import gather_prompts
from onptq.data.chat_logs import chat_prompts
from onptq.data.collected import REMOTE, REPEATED, UNUSABLE, Collected
from onptq.data.expand import expand, expanded, image_prompt
from onptq.data.image_folder import COPIED, LINKED, OTHER, image_prompts
from onptq.data.manifest import load_manifest, manifest_digest, repeated
from onptq.data.prompts import Media, Prompt
from onptq.data.questions import QUESTIONS, pair_with_questions, read_questions
from onptq.errors import OnPTQError
from onptq.recipe import DataConfig


def reasons(collected: Collected) -> dict[str, int]:
    return dict(Counter(one.reason for one in collected.left_out))


def names(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


# --- images ---------------------------------------------------------------------------------------------------------


def test_every_image_below_the_folder_is_asked_about_once_with_different_questions(tmp_path: Path) -> None:
    draw(tmp_path, "b.png", "a.jpg", "below/c.webp", "below/further/d")
    collected = image_prompts(tmp_path, per_image=3)
    files = [prompt.images[0].path for prompt in collected.prompts]
    assert files[::3] == [tmp_path / name for name in ("a.jpg", "b.png", "below/c.webp", "below/further/d")]
    asked_of = [said(prompt)[0][1].removeprefix("<image>") for prompt in collected.prompts]
    assert all(len(set(asked_of[first : first + 3])) == 3 for first in range(0, 12, 3))
    assert set(asked_of) <= set(QUESTIONS)
    assert names(collected.prompts)[:3] == ["a.jpg", "a.jpg-2", "a.jpg-3"]
    assert [prompt.ordinal for prompt in collected.prompts] == list(range(12))
    assert collected.read == f"4 images below {tmp_path}"


def test_the_seed_draws_the_questions(tmp_path: Path) -> None:
    draw(tmp_path, *(f"{place}.png" for place in range(8)))
    first, again, other = (manifest_digest(image_prompts(tmp_path, seed=seed).prompts) for seed in (0, 0, 1))
    assert first == again != other


def test_files_that_are_no_usable_images_are_left_out_with_their_reason(tmp_path: Path) -> None:
    folder = draw(tmp_path / "images", "a.png", "b.png")
    outside = draw(tmp_path / "outside", "x.png", "y.png", "z.png").resolve()
    (folder / "cut.png").write_bytes(picture()[:60])
    (folder / "empty.jpg").touch()
    (folder / "notes.txt").write_text("no image")
    (folder / "copy").write_bytes((folder / "a.png").read_bytes())
    (folder / "inside.png").symlink_to("a.png")
    (folder / "file.png").symlink_to(outside / "x.png")
    (folder / "folder").symlink_to(outside)
    (folder / "round").symlink_to(folder)
    os.mkfifo(folder / "pipe.png")
    collected = image_prompts(folder)
    assert names(collected.prompts) == ["a.png", "b.png"]
    assert reasons(collected) == {UNUSABLE: 2, OTHER: 2, COPIED: 1, LINKED: 2}
    shown = "\n".join(collected.describe_left_out())
    assert "left out 7:" in shown
    assert f"{folder / 'cut.png'}: image 'cut.png' cannot be decoded" in shown
    assert f"{folder / 'empty.jpg'}: image 'empty.jpg' is empty" in shown


@pytest.mark.skipif(os.name != "posix", reason="names of files are text there")
def test_a_name_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    draw(tmp_path, "a.png", os.fsdecode(b"b\xff.png"))
    collected = image_prompts(tmp_path)
    assert names(collected.prompts) == ["a.png"]
    assert "not valid Unicode" in "".join(collected.describe_left_out()).encode().decode()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: folder / "missing", "missing is not there: expected a folder of images"),
        (lambda folder: draw(folder, "a.png") / "a.png", "a.png is not a folder: expected a folder of images"),
        (lambda folder: folder, "has no usable images: expected PNG, JPEG, WEBP"),
        (lambda folder: write_lines(folder / "a.png", "text").parent, "1  cannot be used"),
    ],
)
def test_a_folder_without_images_is_refused(tmp_path: Path, make: Any, expected: str) -> None:
    with pytest.raises(OnPTQError) as caught:
        image_prompts(make(tmp_path))
    assert expected in str(caught.value)


def test_more_questions_than_there_are_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match=r"--per-image 3: expected 1 to 2, the number of questions"):
        image_prompts(draw(tmp_path, "a.png"), ["One?", "Two?"], per_image=3)


# --- questions ------------------------------------------------------------------------------------------------------


def test_a_file_of_questions_has_one_per_line(tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("\ufeffWhat is this?\n\n  Où est-ce ? \nWhat is this?\n", encoding="utf-8")
    assert read_questions(path) == ["What is this?", "Où est-ce ?"]
    assert read_questions(None) == QUESTIONS
    assert len(set(QUESTIONS)) == 16


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot read the questions"),
        (b"", "has no questions; expected a text file with one question per line"),
        (b" \n\n", "has no questions"),
        (b"What\xff", "are not UTF-8 text (byte 5)"),
        (b"\0\0", "are not text"),
    ],
)
def test_files_without_questions_are_refused(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "questions.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OnPTQError) as caught:
        read_questions(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


@given(st.integers(0, 12), st.integers(1, 9), st.integers(0, 5))
def test_every_pair_of_image_and_question_comes_once_and_questions_are_shared_out(
    images: int, count: int, seed: int
) -> None:
    questions = [f"question {number}" for number in range(count)]
    pairs = list(pair_with_questions(images, questions, seed))
    assert len(pairs) == len(set(pairs)) == images * count
    for turn in range(count):
        part = pairs[turn * images : (turn + 1) * images]
        assert [image for image, _ in part] == list(range(images))
        times = Counter(question for _, question in part)
        assert max(times.values(), default=0) - min((times[one] for one in questions), default=0) <= 1


# --- chats ----------------------------------------------------------------------------------------------------------

CHATS: list[Any] = [
    {"messages": [user("Hi"), assistant("Hello."), user("And now?"), assistant("Now.")]},
    {"id": 7, "messages": [user(image_url("a.png"), text_part("What?")), assistant("A cup."), user("More?")]},
    {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": "m", "audio": {"voice": "alloy"}, "messages": [user(image_url(data_url(5)), text_part("Why?"))]}},
    {"id": 7, "image": "b.png", "conversations": [{"from": "human", "value": "<image>\nWho?"}]},
    {"prompt": "Plain", "task": "talk"},
    {"custom_id": "two", "body": {"prompt": "Complete this"}},
]  # fmt: skip


def test_chats_of_every_format_become_prompts_up_to_the_last_turn_of_the_user(tmp_path: Path) -> None:
    draw(tmp_path, "a.png", "b.png")
    collected = chat_prompts([write_lines(tmp_path / "log.jsonl", *CHATS)])
    assert [(prompt.id, said(prompt)) for prompt in collected.prompts] == [
        ("log-1", [("user", "Hi"), ("assistant", "Hello."), ("user", "And now?")]),
        ("7", [("user", "<image>What?"), ("assistant", "A cup."), ("user", "More?")]),
        ("one", [("user", "<image>Why?")]),
        ("7-2", [("user", "<image>Who?")]),
        ("log-5", [("user", "Plain")]),
        ("two", [("user", "Complete this")]),
    ]
    assert not collected.left_out


def test_with_every_turn_each_answered_turn_is_a_prompt_with_its_history_and_media(tmp_path: Path) -> None:
    draw(tmp_path, "a.png", "b.png")
    chat = [
        {"role": "system", "content": "Be brief."},
        *(user("One"), assistant("1"), user(image_url("a.png")), user("Two"), assistant("2")),
        *(user(image_url("b.png"), text_part("Three")), assistant("3")),
    ]
    collected = chat_prompts([write_lines(tmp_path / "log.jsonl", {"id": "x", "messages": chat})], every_turn=True)
    begin = [("system", "Be brief."), ("user", "One")]
    longer = [*begin, ("assistant", "1"), ("user", "<image>"), ("user", "Two")]
    assert [(prompt.id, said(prompt)) for prompt in collected.prompts] == [
        ("x/1", begin),
        ("x/2", longer),
        ("x/3", [*longer, ("assistant", "2"), ("user", "<image>Three")]),
    ]
    paths = [[image.path and image.path.name for image in prompt.images] for prompt in collected.prompts]
    assert paths == [[], ["a.png"], ["a.png", "b.png"]]


def test_records_that_cannot_be_used_are_counted_with_file_and_line(tmp_path: Path) -> None:
    remote = {"messages": [user(image_url("https://example.org/a.png"), text_part("What?"))]}
    log = write_lines(
        tmp_path / "log.jsonl", *CHATS[4:], "not json", [1], remote, {"id": "again", "prompt": "Plain"},
        {"messages": [user("Hi"), {"role": "tool", "content": "4"}]}, {"text": "x", "image": "gone.png"},
    )  # fmt: skip
    collected = chat_prompts([log])
    assert len(collected.prompts) == 2
    assert reasons(collected) == {UNUSABLE: 4, REMOTE: 1, REPEATED: 1}
    shown = "\n".join(collected.describe_left_out())
    assert f"{log} line 3: not valid JSON" in shown
    assert f"{log} line 7: `role` must be one of system, user, assistant; got 'tool'" in shown
    assert f"{log} line 8: image 'gone.png' not found" in shown


def test_the_same_chat_in_another_file_counts_once_and_formats_may_differ(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", CHATS[0], CHATS[4])
    (tmp_path / "b.json").write_text(json.dumps([CHATS[0], "text", CHATS[5]]))
    pq.write_table(pa.Table.from_pylist([{"text": "Plain"}, {"text": "Other"}]), tmp_path / "c.parquet")
    collected = chat_prompts([lines, tmp_path / "b.json", tmp_path / "c.parquet"])
    assert names(collected.prompts) == ["a-1", "a-2", "two", "c-2"]
    assert reasons(collected) == {REPEATED: 2, UNUSABLE: 1}
    assert collected.read.startswith("7 records of ")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("log.jsonl", None, "cannot read the manifest"),
        ("log.json", None, "cannot read"),
        ("log.txt", b"hello", "chats are in files that end in .jsonl, .json-lines, .parquet, .json; got .txt"),
        ("log.jsonl", b"", "no prompt was found that can be used: expected records"),
        ("log.jsonl", b"\0\1\2\xff\n", "line 1: not UTF-8 text"),
        ("log.json", b"[", "is not usable JSON"),
        ("log.json", b'{"messages": []}', "holds a mapping: expected a list of records, or a .jsonl file"),
        ("log.parquet", b"PAR1", "is not a readable parquet file"),
        ("log.jsonl", b'{"response": {"body": {}}}\n', "expected exactly one of `messages`"),
    ],
)
def test_files_without_chats_are_refused(tmp_path: Path, name: str, content: bytes | None, expected: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OnPTQError) as caught:
        chat_prompts([path])
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


# --- more from few --------------------------------------------------------------------------------------------------


def test_expand_adds_new_questions_about_the_images_after_the_prompts(tmp_path: Path) -> None:
    draw(tmp_path, "a.png", "b.png")
    given = load_manifest(
        write_lines(
            tmp_path / "few.jsonl",
            {"id": "a", "text": QUESTIONS[0], "image": "a.png"},
            {"id": "both", "text": "What differs?", "images": ["a.png", "b.png"]},
            {"id": "t", "text": "No image"},
        )
    )
    more = expand(given, 20, seed=0)
    assert more[:3] == given
    assert len(more) == 20
    assert [prompt.ordinal for prompt in more] == list(range(20))
    assert len({prompt.id for prompt in more}) == 20
    pairs = [(prompt.images[0].sha256, said(prompt)[0][1]) for prompt in more[3:]]
    assert len(set(pairs)) == 17
    assert (given[0].images[0].sha256, f"<image>{QUESTIONS[0]}") not in pairs
    assert Counter(sha for sha, _ in pairs).most_common(1)[0][1] == 9
    assert manifest_digest(expand(given, 20, seed=0)) == manifest_digest(more)
    assert manifest_digest(expand(given, 20, seed=1)) != manifest_digest(more)
    assert more[:12] == expand(given, 12, seed=0)


@pytest.mark.parametrize("separate", [False, True])
def test_a_run_adds_questions_about_its_own_images_and_none_that_is_held_out(tmp_path: Path, separate: bool) -> None:
    draw(tmp_path, *(f"{place}.png" for place in range(6)))
    records = [{"id": str(n), "text": QUESTIONS[n % 2], "image": f"{n}.png"} for n in range(6)]
    others = [{"id": f"h{n}", "text": question, "image": "0.png"} for n, question in enumerate(QUESTIONS[1:])]
    given = write_lines(tmp_path / "few.jsonl", *records)
    held_out = write_lines(tmp_path / "held.jsonl", *others) if separate else None
    sizes = DataConfig(prompts=30, holdout=3, holdout_share=0.5, expand=True)
    prompts = gather_prompts(given, held_out, sizes, frozenset({"text", "image"}))
    own, more = prompts.calibration[: -prompts.added], prompts.calibration[-prompts.added :]
    assert len(prompts.calibration) == 30
    assert {one.images[0].sha256 for one in more} <= {one.images[0].sha256 for one in own}
    assert not repeated(more, [*own, *prompts.holdout])
    ordinals = [one.ordinal for one in prompts.every]
    assert len(set(ordinals)) == len(ordinals)
    assert min(one.ordinal for one in more) > max(one.ordinal for one in (*own, *prompts.holdout))
    assert f"{prompts.added} further questions about images" in prompts.describe()
    plain = gather_prompts(given, held_out, sizes.model_copy(update={"expand": False}), frozenset({"text", "image"}))
    assert (list(plain.calibration), plain.added) == (own, 0)


def test_expand_returns_what_can_be_made() -> None:
    image = image_prompt(0, "x", Media(None, "1", b"1"), QUESTIONS[3])
    text = Prompt(1, "x+1", [user([text_part("Hi")])])
    assert len(expand([image, text], 100, 0)) == 1 + len(QUESTIONS)
    assert expand([image, text], 1, 0) == [image, text]
    assert expand([text], 100, 0) == [text]
    assert expand([], 3, 0) == []
    assert names(expand([image, text], 3, 0)) == ["x", "x+1", "x+2"]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([{"text": "Hi"}], "has no image that a question could be added for"),
        ([{"text": "Hi"}, {"text": "Ho"}, {"text": "Ha"}], "--to 3: "),
    ],
)
def test_a_manifest_that_cannot_grow_is_refused(tmp_path: Path, records: list[Any], expected: str) -> None:
    path = write_lines(tmp_path / "few.jsonl", *records)
    with pytest.raises(OnPTQError) as caught:
        expanded(path, 3)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
