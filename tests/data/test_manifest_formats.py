"""Manifests in the formats people have: every example of docs/manifests.md, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_manifest import picture, refused, write

from onptq.data import media
from onptq.data.calibration import gather_prompts
from onptq.data.manifest import load_manifest, manifest_digest
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.recipe import DataConfig

PAGE = Path(__file__).parents[2] / "docs" / "manifests.md"
EXAMPLES = [
    json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
]
EVERY = frozenset({"text", "image", "audio"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "photo.png").write_bytes(picture(1))
    (tmp_path / "other.png").write_bytes(picture(2))
    (tmp_path / "speech.wav").write_bytes(b"RIFF0000WAVE")
    return tmp_path


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def turns(prompt: Prompt) -> list[tuple[str, str]]:
    """Roles with their contents, media as <image> and <audio>."""
    return [
        (message["role"], "".join(part.get("text", f"<{part['type']}>") for part in message["content"]))
        for message in prompt.messages
    ]


def test_every_example_of_the_page_is_read(folder: Path) -> None:
    prompts = load_manifest(write(folder, *EXAMPLES))
    briefly = ("system", "Be brief.")
    assert [turns(prompt) for prompt in prompts] == [
        [("user", "<image>What is on the table?")],
        [("user", "<image><image>What differs?")],
        [("user", "<audio>What does she say?")],
        [briefly, ("user", "<image>What is this?"), ("assistant", "A cup."), ("user", "Which colour does it have?")],
        [("user", "<image>What is this?")],
        [("user", "<image>What is this?")],
        [("user", "<image>What is this?")],
        [briefly, ("user", "<image>What is this?"), ("assistant", "A cup."), ("user", "Of which colour?")],
        [("user", "<image>Which colour is it?")],
    ]
    files = [[one.path and one.path.name for one in (*prompt.images, *prompt.audios)] for prompt in prompts]
    assert files == [["photo.png"], ["photo.png", "other.png"], ["speech.wav"], *[["photo.png"]] * 5, [None]]
    assert media.read_image(prompts[-1].images[0].read()).getpixel((0, 0)) == (255, 0, 0)


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"{media.MAX_BYTES // 2**20} MiB" in page
    assert media.MAX_PIXELS == 2**26
    assert "2^26 pixels" in page


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "photo.png"},
        {"type": "image_url", "image_url": {"url": "photo.png", "detail": "low"}},
        {"type": "image", "image": "photo.png"},
        {"type": "image", "url": "photo.png"},
        {"type": "image", "path": "photo.png"},
        {"type": "image", "base64": base64.b64encode(picture(1)).decode()},
        {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(picture(1)).decode()}"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(picture(1)).decode()}"}},
    ],
)
def test_image_parts_of_every_kind_give_the_same_prompt(folder: Path, part: dict[str, Any]) -> None:
    (prompt,) = load_manifest(write(folder, user(part, text("What?"))))
    assert prompt.messages == [{"role": "user", "content": [{"type": "image"}, text("What?")]}]
    assert [one.sha256 for one in prompt.images] == [hashlib.sha256(picture(1)).hexdigest()]
    assert prompt.images[0].read() == picture(1)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "audio", "url": "speech.wav"},
        {"type": "audio_url", "audio_url": {"url": "speech.wav"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF0000WAVE").decode(), "format": "wav"}},
    ],
)
def test_audio_parts_of_every_kind_give_the_same_prompt(folder: Path, part: dict[str, Any]) -> None:
    (prompt,) = load_manifest(write(folder, user(part)))
    assert prompt.messages == [{"role": "user", "content": [{"type": "audio"}]}]
    assert prompt.audios[0].read() == b"RIFF0000WAVE"


def test_a_file_address_is_a_path(folder: Path) -> None:
    (folder / "a b.png").write_bytes(picture(3))
    address = (folder / "a b.png").as_uri()
    assert "%20" in address
    (prompt,) = load_manifest(write(folder, {"text": "x", "image": address}))
    assert prompt.images[0].path == folder / "a b.png"


def test_placeholders_in_plain_text_are_taken_with_the_space_around_them(folder: Path) -> None:
    value = "First <image>\nthen <image> and <b>no</b> <audio>"
    (prompt, plain, tagged) = load_manifest(
        write(
            folder,
            {"conversations": [{"from": "human", "value": value}], "images": ["photo.png"] * 2, "audio": "speech.wav"},
            {"messages": [{"role": "user", "content": "the <image> tag of SVG"}]},
            {"messages": [{"role": "user", "content": "<image> or <audio>"}], "image": "photo.png"},
        )
    )
    kinds = [part.get("text", part["type"]) for part in prompt.messages[0]["content"]]
    assert kinds == ["First", "image", "then", "image", "and <b>no</b>", "audio"]
    assert turns(plain) == [("user", "the <image> tag of SVG")]
    assert turns(tagged) == [("user", "<image>or <audio>")]
    assert len(tagged.images) == 1
    assert not tagged.audios


def test_conversations_may_be_written_with_roles(folder: Path) -> None:
    value = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (prompt,) = load_manifest(write(folder, {"conversations": value}))
    assert turns(prompt) == [("user", "Hi")]


def test_what_is_ignored_is_said_once(folder: Path) -> None:
    answered = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    notes: list[str] = []
    path = write(
        folder,
        {"messages": answered, "answer": "Hello", "source": {"name": "chat"}},
        {"messages": answered, "answer": "x"},
        {"text": "open"},
    )
    prompts = load_manifest(path, note=notes.append)
    assert notes[0] == f"{path}: columns that are not used: 'answer', 'source'"
    assert notes[1].startswith(f"{path}: 2 of 3 conversations end with the assistant: cut after the user's last turn")
    assert len(notes) == 2
    assert prompts[0].extra == {"answer": "Hello", "source": {"name": "chat"}}
    assert [turns(prompt)[-1] for prompt in prompts] == [("user", "Hi"), ("user", "Hi"), ("user", "open")]


def test_extra_columns_do_not_change_the_digest(folder: Path) -> None:
    plain, more = ({"id": "a", "text": "x"} | extra for extra in ({}, {"answer": "y"}))
    assert manifest_digest(load_manifest(write(folder, plain))) == manifest_digest(load_manifest(write(folder, more)))


def test_media_of_an_answer_that_is_cut_are_cut_with_it(folder: Path) -> None:
    record = user({"type": "image", "image": "photo.png"}, text("Draw it"))
    record["messages"].append({"role": "assistant", "content": [{"type": "image", "image": "gone.png"}]})
    assert len(load_manifest(write(folder, record))[0].images) == 1


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "x", "imagess": "photo.png"}, ("unknown column 'imagess'", "did you mean images?")),
        ({"prompt": "a", "question": "b"}, ("exactly one of", "got prompt and question")),
        ({"conversations": []}, ("`conversations` must be a list of at least one turn",)),
        ({"conversations": [{"from": "robot", "value": "x"}]}, ("`from` must be one of", "'robot'")),
        ({"conversations": [{"from": "human"}]}, ("`value` must be text, got nothing",)),
        ({"conversations": [{"from": "human", "value": "<image>"}]}, ("1 image parts", "0 image files")),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, ("last message must be the user's", "'assistant'")),
        (user({"type": "image_url"}), ("must have `image_url` with `url`",)),
        (user({"type": "image", "url": "photo.png", "path": "photo.png"}), ("names its file twice: url and path",)),
        (user({"type": "image", "base64": "no!"}), ("image is not valid base64",)),
        (user({"type": "image", "image": "data:image/png,abc"}), ("is no data URL of the form", "base64")),
        (user({"type": "image_url", "image_url": "http://a/b.png"}), ("is an address", "nothing is downloaded")),
        (user({"type": "image", "index": 0}), ("unknown field 'index'", "valid: image, url, path, base64")),
        (
            {"messages": [{"role": "assistant", "tool_calls": []}, {"role": "user", "content": "x"}]},
            ("`tool_calls`", "tools are not supported"),
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, ("system, user, assistant", "'tool'")),
        ({"text": "x", "image": "\ud800.png"}, ("`image` is not valid Unicode",)),
        ({"id": "\ud800", "text": "x"}, ("`id` is not valid Unicode",)),
        ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", ("not usable JSON",)),
        ('{"id": ' + "1" * 5000 + ', "text": "x"}', ("not usable JSON",)),
    ],
)
def test_what_cannot_be_read_is_an_error_with_its_line(folder: Path, record: Any, expected: tuple[str, ...]) -> None:
    path = write(folder, {"id": "good", "text": "fine"}, record)
    message = refused(path)
    assert message.startswith(f"{path} line 2")
    assert all(part in message for part in expected), message


def test_nesting_that_only_python_minds_is_an_error(folder: Path) -> None:
    deep = '{"a": ' * 900 + "1" + "}" * 900
    for record in ('{"text": ' + deep + "}", '{"text": "x", "extra": ' + deep + "}"):
        assert "line 1: not usable JSON" in refused(write(folder, record))


def test_bad_utf8_inside_a_parquet_is_an_error(folder: Path) -> None:
    path = folder / "prompts.parquet"
    pq.write_table(pa.table({"text": ["aaaa"], "zzzz": ["b"]}), path)
    path.write_bytes(path.read_bytes().replace(b"zzzz", b"\xff\xfe\xfd\xfc"))
    assert "not a readable parquet file" in refused(path)


def test_only_regular_files_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONPTQ_MEDIA_ROOT", "/dev")
    os.mkfifo(folder / "pipe.png")
    os.mkfifo(folder / "pipe.jsonl")
    messages: list[str] = []

    def read() -> None:
        messages.append(refused(write(folder, {"text": "x", "image": "pipe.png"}, {"text": "x", "audio": "/dev/zero"})))
        messages.append(refused(folder / "pipe.jsonl"))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert "line 1: image 'pipe.png' cannot be read: not a regular file" in messages[0]
    assert "line 2: audio '/dev/zero' cannot be read: not a regular file" in messages[0]
    assert "pipe.jsonl: not a regular file" in messages[1]


def test_files_and_images_have_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder, {"text": "x", "image": "photo.png"})
    monkeypatch.setattr(media, "MAX_PIXELS", 40 * 40 - 1)
    assert "image 'photo.png' cannot be decoded: it has 40 x 40 pixels; expected at most 1,599" in refused(path)
    monkeypatch.setattr(media, "MAX_PIXELS", 40 * 40)
    load_manifest(path)
    size = len(picture(1))
    monkeypatch.setattr(media, "MAX_BYTES", size - 1)
    assert "image 'photo.png' cannot be read: larger than" in refused(path)
    monkeypatch.setattr(media, "MAX_BYTES", size)
    load_manifest(path)


def test_a_format_that_would_run_a_program_is_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {folder / 'ran'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    (folder / "a.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n")
    assert "cannot be decoded" in refused(write(folder, {"text": "x", "image": "a.png"}))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("form", ["png", "tiff"])
def test_sixteen_bits_become_the_upper_eight(folder: Path, form: str) -> None:
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(values).save(folder / f"deep.{form}")
    image = media.read_image((folder / f"deep.{form}").read_bytes())
    assert image.mode == "RGB"
    assert (np.asarray(image)[..., 0] == values >> 8).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_eight_bit_images_are_converted_as_pillow_does(mode: str) -> None:
    image = Image.open(io.BytesIO(picture(5))).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "TIFF")
    assert media.read_image(buffer.getvalue()).tobytes() == image.convert("RGB").tobytes()


def test_the_digest_follows_the_audio(folder: Path) -> None:
    path = write(folder, {"id": "a", "text": "x", "audio": "speech.wav"})
    before = manifest_digest(load_manifest(path))
    (folder / "speech.wav").write_bytes(b"RIFF0001WAVE")
    assert manifest_digest(load_manifest(path)) != before


def test_a_file_that_prompts_share_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onptq.data import manifest

    reads: list[Path] = []

    def spy(path: Path) -> bytes:
        reads.append(path)
        return media.read_file(path)

    monkeypatch.setattr(manifest, "read_file", spy)
    load_manifest(write(folder, *({"text": str(i), "image": "photo.png"} for i in range(3))))
    assert reads == [folder / "photo.png"]


def test_bad_prompts_are_left_out_where_a_list_takes_them(folder: Path) -> None:
    path = write(folder, {"text": 1}, {"id": "a", "text": "x"}, "broken", {"text": "y"}, {"id": "a", "text": "z"})
    bad: list[str] = []
    assert [(prompt.ordinal, prompt.id) for prompt in load_manifest(path, bad=bad)] == [(1, "a"), (3, "3")]
    assert [why.split(":")[0].removeprefix(f"{path} ") for why in bad] == ["line 1", "line 3", "line 5 (id 'a')"]
    assert [prompt.id for prompt in load_manifest(path, bad=[], limit=1)] == ["a"]
    assert "line 3" not in refused(path, limit=2)
    assert "has no usable prompts" in refused(write(folder, "broken"), bad=[])


def test_unusable_prompts_are_skipped_and_counted(folder: Path) -> None:
    sizes = DataConfig(prompts=3, holdout=2, holdout_share=0.0)
    path = write(folder, *({"id": f"p{i}", "text": "long" if i % 2 else f"{i}"} for i in range(12)), "broken")

    def usable(prompt: Prompt) -> None:
        if turns(prompt)[0][1] == "long":
            raise OnPTQError(f"{prompt} is too long")

    prompts = gather_prompts(path, None, sizes, EVERY, usable=usable)
    names = [prompt.id for prompt in prompts.every]
    assert (len(prompts.calibration), len(prompts.holdout), len(set(names))) == (3, 2, 5)
    assert set(names) < {"p0", "p2", "p4", "p6", "p8", "p10"}
    assert prompts.describe() == "3 prompts calibrate and 2 are held out, of 6 (5 text only)"
    warning, few = prompts.warnings()
    assert few.startswith("3 calibration and 2 held-out prompts are few")
    assert replace(prompts, from_file=False).warnings() == [warning]
    assert warning.startswith("7 bad prompts are skipped:\n")
    assert f"{path} line 13: not valid JSON" in warning
    assert "prompt 'p1' (prompts.jsonl line 2) is too long" in warning
    with pytest.raises(OnPTQError, match="no usable prompts"):
        gather_prompts(write(folder, {"text": "long"}), None, sizes, EVERY, usable=usable)


def test_a_held_out_manifest_continues_the_ordinals_and_repeats_are_noticed(folder: Path) -> None:
    sizes = DataConfig(prompts=2, holdout=9)
    records = [{"id": name, "text": name, "image": "photo.png"} for name in "abc"]
    calibration = write(folder, *records)
    held = folder / "held.jsonl"
    held.write_text(
        "".join(json.dumps(record) + "\n" for record in ({"id": "z", "text": "z"}, records[1] | {"id": "y"}))
    )
    prompts = gather_prompts(calibration, held, sizes.model_copy(update={"prompts": 3}), EVERY)
    assert [prompt.ordinal for prompt in prompts.every] == [0, 1, 2, 3]
    assert prompts.describe() == "3 prompts calibrate and 1 are held out, of 5 (3 with image, 1 text only)"
    warning, _ = prompts.warnings()
    assert warning == "1 held-out prompts are left out: they are calibration prompts too"
    with pytest.raises(OnPTQError, match="all 3 held-out prompts are calibration prompts too"):
        gather_prompts(calibration, calibration, sizes.model_copy(update={"prompts": 3}), EVERY)


def test_the_same_prompt_twice_is_used_once_and_counted(folder: Path) -> None:
    records = [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}, {"id": "c", "text": "x"}, {"id": "d", "text": "z"}]
    prompts = gather_prompts(write(folder, *records), None, DataConfig(prompts=9, holdout=0), EVERY)
    assert [prompt.id for prompt in prompts.calibration] == ["a", "b", "d"]
    warning, _ = prompts.warnings()
    assert warning == "1 prompts are left out: the same text and media are there already"
