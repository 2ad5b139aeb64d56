from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from onptq.data import manifest as manifest_module
from onptq.data.calibration import gather_prompts, split
from onptq.data.manifest import load_manifest, manifest_digest
from onptq.data.media import read_file
from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.recipe import DataConfig


def picture(shade: int = 0, form: str = "PNG", size: int = 40) -> bytes:
    image = Image.new("RGB", (size, size))
    image.putdata([((x * 7 + shade) % 256, (x * 13) % 256, (x * 29) % 256) for x in range(size * size)])
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(picture(1))
    (tmp_path / "b.png").write_bytes(picture(2))
    (tmp_path / "c.wav").write_bytes(b"RIFF0000WAVE")
    return tmp_path


def write(folder: Path, *records: Any) -> Path:
    path = folder / "prompts.jsonl"
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(OnPTQError) as caught:
        load_manifest(path, **options)
    return str(caught.value)


def test_text_becomes_one_user_message_with_images_then_audio_then_text(folder: Path) -> None:
    path = write(folder, {"id": "x", "text": "What?", "images": ["a.png", "b.png"], "audio": "c.wav"})
    (prompt,) = load_manifest(path)
    parts = [{"type": "image"}, {"type": "image"}, {"type": "audio"}, {"type": "text", "text": "What?"}]
    assert prompt.messages == [{"role": "user", "content": parts}]
    assert [image.path for image in prompt.images] == [folder / "a.png", folder / "b.png"]
    assert prompt.images[0].sha256 == hashlib.sha256(picture(1)).hexdigest()
    assert prompt.audios[0].read() == b"RIFF0000WAVE"


def test_an_id_is_the_ordinal_when_none_is_given_and_blank_lines_do_not_count(folder: Path) -> None:
    path = write(folder, {"text": "a"}, "", {"text": "b"}, {"id": 17, "text": "c"}, {"id": None, "text": "d"})
    prompts = load_manifest(path)
    assert [(prompt.ordinal, prompt.id) for prompt in prompts] == [(0, "0"), (1, "1"), (2, "17"), (3, "3")]


def test_messages_keep_roles_and_order_and_take_media_from_beside_or_inside(folder: Path) -> None:
    inside = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "image", "image": "b.png"}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "audio", "audio": "c.wav"}]},
    ]
    beside = json.loads(json.dumps(inside))
    for message in beside:
        if isinstance(message["content"], list):
            message["content"] = [
                part if part["type"] == "text" else {"type": part["type"]} for part in message["content"]
            ]
    first, second = load_manifest(
        write(folder, {"messages": inside}, {"messages": beside, "images": ["b.png", "a.png"], "audios": "c.wav"})
    )
    assert first.messages == second.messages
    assert first.messages[0] == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert [image.path for image in first.images] == [folder / "b.png", folder / "a.png"]
    assert (first.images, first.audios) == (second.images, second.audios)


def test_absolute_paths_are_taken_as_they_are(folder: Path) -> None:
    path = write(folder, {"text": "x", "image": str(folder / "a.png")})
    assert load_manifest(path)[0].images[0].path == folder / "a.png"


def test_media_lie_in_the_manifests_folder_or_in_one_that_is_allowed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("mine")
    (place / "link.png").symlink_to(folder / "a.png")
    (place / "own.png").write_bytes((folder / "a.png").read_bytes())
    outside = [f"../{folder.name}/a.png", str(folder / "a.png"), (folder / "a.png").as_uri(), "link.png"]
    names = [*outside, "own.png", str(place / "own.png"), "../mine0/own.png"]
    path = write(place, *({"text": str(number), "image": name} for number, name in enumerate(names)))
    bad: list[str] = []
    prompts = load_manifest(path, bad=bad)
    assert [prompt.messages[0]["content"][-1]["text"] for prompt in prompts] == ["4", "5", "6"]
    assert len(bad) == len(outside)
    assert all(f"set ONPTQ_MEDIA_ROOT={folder.resolve()} (" in why for why in bad)
    for roots in (str(folder), f"{folder.parent / 'none'}{os.pathsep}{folder}", "/"):
        monkeypatch.setenv("ONPTQ_MEDIA_ROOT", roots)
        assert len(load_manifest(path)) == len(names)


def test_media_of_a_snapshot_in_a_hub_cache_may_be_links_to_its_blobs(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "datasets--a--b" / "snapshots" / "1", tmp_path / "datasets--a--b" / "blobs"
    for place in (snapshot, blobs):
        place.mkdir(parents=True)
    (blobs / "f00").write_bytes((folder / "a.png").read_bytes())
    (snapshot / "a.png").symlink_to(blobs / "f00")
    assert len(load_manifest(write(snapshot, {"text": "x", "image": "a.png"}))) == 1


def test_a_row_group_that_would_fill_the_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "prompts.parquet"
    rows = [{"id": str(n), "text": "x", "image": picture(n)} for n in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    monkeypatch.setattr("onptq.data.manifest.MAX_GROUP", 1000)
    assert "row group 1 takes" in refused(path)
    monkeypatch.setattr("onptq.data.manifest.MAX_GROUP", path.stat().st_size * 2)
    assert len(load_manifest(path)) == 9


@pytest.mark.parametrize("as_struct", [False, True])
def test_parquet_may_embed_media(folder: Path, as_struct: bool) -> None:
    data = picture(3)
    image = {"bytes": data, "path": "gone.png"} if as_struct else data
    rows = [{"id": "e", "text": "x", "image": image, "audio": None}]
    path = folder / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    (prompt,) = load_manifest(path)
    assert prompt.images[0].path is None
    assert prompt.images[0].read() == data
    assert prompt.images[0].sha256 == hashlib.sha256(data).hexdigest()


def test_parquet_and_jsonl_of_the_same_prompts_are_the_same(folder: Path) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
    rows: list[dict[str, Any]] = [
        {"id": "m", "messages": [{"role": "user", "content": parts}]},
        {"id": "t", "text": "Hi", "images": ["b.png"]},
    ]
    path = folder / "prompts.parquet"
    pq.write_table(
        pa.Table.from_pylist([{"messages": None, "text": None, "images": None, **row} for row in rows]), path
    )
    assert load_manifest(path) == load_manifest(write(folder, *rows))


def test_the_digest_follows_content_and_order_but_not_place(folder: Path, tmp_path_factory: Any) -> None:
    records = [{"id": "1", "text": "x", "image": "a.png"}, {"id": "2", "text": "y"}]
    digest = manifest_digest(load_manifest(write(folder, *records)))
    other = tmp_path_factory.mktemp("moved")
    (other / "a.png").write_bytes(picture(1))
    assert manifest_digest(load_manifest(write(other, *records))) == digest
    assert manifest_digest(load_manifest(write(other, *records[::-1]))) != digest
    (other / "a.png").write_bytes(picture(9))
    assert manifest_digest(load_manifest(write(other, *records))) != digest
    changed = [records[0] | {"text": "z"}, records[1]]
    assert manifest_digest(load_manifest(write(folder, *changed))) != digest


@pytest.mark.parametrize(("kind", "file"), [("image", "a.png"), ("audio", "c.wav")])
def test_another_image_or_recording_of_the_same_name_gives_another_digest(folder: Path, kind: str, file: str) -> None:
    path = write(folder, {"id": "1", "text": "x", kind: file})
    before = manifest_digest(load_manifest(path))
    assert manifest_digest(load_manifest(path)) == before
    (folder / file).write_bytes(picture(9) if kind == "image" else b"RIFF1111WAVE")
    assert manifest_digest(load_manifest(path)) != before


def test_a_file_that_many_prompts_name_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []

    def spy(path: Path) -> bytes:
        reads.append(path)
        return read_file(path)

    monkeypatch.setattr(manifest_module, "read_file", spy)
    shared = [{"text": f"{n}", "image": "a.png", "audio": "c.wav"} for n in range(5)]
    prompts = load_manifest(write(folder, *shared, {"text": "other", "image": "b.png"}))
    assert sorted(reads) == [folder / "a.png", folder / "b.png", folder / "c.wav"]
    assert len({prompt.images[0].sha256 for prompt in prompts}) == 2


def test_a_limit_counts_bad_prompts_too_unless_they_are_skipped(folder: Path) -> None:
    path = write(folder, {"text": "a"}, "broken", "broken too", {"text": "b"}, {"text": "c"})
    message = refused(path, limit=2)
    assert "line 2" in message
    assert "line 3" not in message, "nothing behind the limit is looked at"
    bad: list[str] = []
    assert [prompt.ordinal for prompt in load_manifest(path, limit=2, bad=bad)] == [0, 3]
    assert len(bad) == 2


def test_ordinals_of_held_out_prompts_follow_those_of_the_calibration_prompts(folder: Path) -> None:
    calibration = write(folder, *({"text": f"c{n}"} for n in range(4)))
    held_out = folder / "holdout.jsonl"
    held_out.write_text("".join(json.dumps({"text": f"h{n}"}) + "\n" for n in range(3)))
    sizes = DataConfig(prompts=2, holdout=3)
    sources: list[tuple[Path | list[Prompt], Path | list[Prompt]]] = [
        (calibration, held_out),
        (load_manifest(calibration), load_manifest(held_out)),
    ]
    for calibration_source, held_out_source in sources:
        prompts = gather_prompts(calibration_source, held_out_source, sizes, frozenset({"text"}))
        drawn = [prompt.ordinal for prompt in prompts.calibration]
        assert len(drawn) == 2
        assert drawn == sorted(drawn)
        assert set(drawn) < {0, 1, 2, 3}
        assert [prompt.ordinal for prompt in prompts.holdout] == [4, 5, 6]


def test_limit_reads_no_further(folder: Path) -> None:
    path = write(folder, {"text": "a"}, {"text": "b"}, "broken")
    assert [prompt.id for prompt in load_manifest(path, limit=2)] == ["0", "1"]
    assert "line 3" in refused(path, limit=3)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "x"', ("not valid JSON", "expected one JSON object per line")),
        ("[1, 2]", ("a list", "expected one JSON object per line")),
        ('"text"', ("expected one JSON object per line",)),
        ({"texts": "x"}, ("unknown column 'texts'", "did you mean text?", "valid: messages, conversations, text")),
        ({"id": "x"}, ("exactly one of `messages`, `conversations`, `text`", "got none")),
        ({"text": "x", "messages": []}, ("exactly one of", "got messages and text")),
        ({"text": 3}, ("`text` must be text, got a number",)),
        ({"text": "  "}, ("must not be empty",)),
        ({"text": "\ud800"}, ("not valid Unicode",)),
        ({"id": True, "text": "x"}, ("`id` must be text or a whole number",)),
        ({"text": "x", "image": "a.png", "images": ["a.png"]}, ("one of `image` and `images`, got both",)),
        ({"text": "x", "image": 3}, ("image must be a path", "a number")),
        ({"text": "x", "images": [None]}, ("image must be a path", "nothing")),
        ({"text": "x", "image": "https://a.b/c.png"}, ("'https://a.b/c.png' is an address", "nothing is downloaded")),
        ({"messages": "x"}, ("`messages` must be a list", "text")),
        ({"messages": []}, ("`messages` must be a list of at least one", "an empty list")),
        ({"messages": ["x"]}, ("`role` and `content`, got text",)),
        ({"messages": [{"role": "bot", "content": "x"}]}, ("system, user, assistant", "'bot'")),
        ({"messages": [{"role": "user", "context": "x"}]}, ("'context'", "did you mean content?")),
        ({"messages": [{"role": "user"}]}, ("`content` must be text or a list of parts, got nothing",)),
        ({"messages": [{"role": "assistant", "content": "x"}]}, ("last message must be the user's", "'assistant'")),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, ("text, image, audio", "'video'")),
        ({"messages": [{"role": "user", "content": ["x"]}]}, ("text, image, audio", "got text")),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "imagge": "a.png"}]}]},
            ("'imagge'", "did you mean image?"),
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ("1 image parts", "0 image files")),
        ({"messages": [{"role": "user", "content": "x"}], "audio": "c.wav"}, ("0 audio parts", "1 audio files")),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "images": ["a.png"]},
            ("both in the messages' parts and beside them",),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "image"}]}]},
            ("image part 2 names no file",),
        ),
    ],
)
def test_a_malformed_line_is_numbered_and_says_what_was_expected(
    folder: Path, line: Any, expected: tuple[str, ...]
) -> None:
    path = write(folder, {"id": "good", "text": "fine"}, "", line)
    message = refused(path)
    assert message.startswith(f"{path} line 3")
    for part in expected:
        assert part in message


def test_a_line_that_is_not_utf8_is_numbered(folder: Path) -> None:
    path = folder / "prompts.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert f"{path} line 2: not UTF-8" in refused(path)


def test_a_byte_order_mark_is_no_error(folder: Path) -> None:
    path = folder / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert len(load_manifest(path)) == 1


def test_a_missing_image_is_named_with_file_line_id_and_path(folder: Path) -> None:
    path = write(folder, {"id": "x", "text": "a"}, {"id": "y", "text": "b", "image": "sub/gone.png"})
    message = refused(path)
    assert f"{path} line 2 (id 'y'): image 'sub/gone.png' not found" in message
    assert str(folder / "sub" / "gone.png") in message


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_truncated_image_is_named(folder: Path, form: str) -> None:
    data = picture(0, form, size=200)
    (folder / "cut.img").write_bytes(data[: len(data) * 2 // 3])
    message = refused(write(folder, {"id": "x", "text": "a", "image": "cut.img"}))
    assert "(id 'x'): image 'cut.img' cannot be decoded" in message


def test_what_is_no_image_or_empty_or_a_folder_is_named(folder: Path) -> None:
    (folder / "text.png").write_text("hello")
    (folder / "empty.wav").touch()
    message = refused(
        write(
            folder,
            {"text": "a", "image": "text.png"},
            {"text": "a", "audio": "empty.wav"},
            {"text": "a", "image": str(folder)},
        )
    )
    first, second, third = message.splitlines()
    assert "line 1: image 'text.png' cannot be decoded" in first
    assert "line 2: audio 'empty.wav' is empty" in second
    assert "line 3" in third
    assert "cannot be read" in third


def test_embedded_media_are_checked_too(folder: Path) -> None:
    path = folder / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": "e", "text": "x", "image": picture(1)[:50]}]), path)
    assert "row 1 (id 'e'): image embedded in the manifest cannot be decoded" in refused(path)


def test_a_repeated_id_names_both_lines(folder: Path) -> None:
    message = refused(write(folder, {"id": "1", "text": "a"}, {"text": "b"}))
    assert "line 2: id '1' is already taken by line 1" in message


def test_errors_are_shown_together_up_to_ten(folder: Path) -> None:
    message = refused(write(folder, *({"text": i} for i in range(25))))
    assert message.count("must be text") == 10
    assert "stopped after 10 errors" in message
    assert refused(write(folder, {"text": 1}, {"text": "ok"}, {"text": 2})).count("must be text") == 2


def test_a_modality_the_model_cannot_take_is_refused(folder: Path) -> None:
    path = write(folder, {"id": "v", "text": "a", "image": "a.png"}, {"id": "s", "text": "a", "audio": "c.wav"})
    message = refused(path, modalities=frozenset({"text", "image"}))
    assert "(id 's'): has audio, but this model takes only image, text" in message
    assert "(id 'v')" not in message
    assert len(load_manifest(path, modalities=frozenset({"text", "image", "audio"}))) == 2


def test_an_empty_manifest_is_refused(folder: Path) -> None:
    assert "has no prompts" in refused(write(folder, ""))
    path = folder / "none.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert "has no prompts" in refused(path)


def test_an_unknown_suffix_names_the_valid_ones(folder: Path) -> None:
    message = refused(folder / "prompts.csv")
    for suffix in (".jsonl", ".json-lines", ".parquet", ".csv"):
        assert suffix in message


def test_a_missing_or_broken_manifest_file_is_named(folder: Path) -> None:
    assert "nowhere.jsonl: No such file" in refused(folder / "nowhere.jsonl")
    (folder / "bad.parquet").write_bytes(b"not parquet at all")
    assert "bad.parquet is not a readable parquet file" in refused(folder / "bad.parquet")
    (folder / "folder.jsonl").mkdir()
    assert "folder.jsonl: Is a directory" in refused(folder / "folder.jsonl")


def numbered(count: int) -> list[Prompt]:
    return [Prompt(ordinal=i, id=str(i), messages=[]) for i in range(count)]


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 300), st.integers(0, 64), st.floats(0, 0.5), st.integers(0, 3))
def test_split_never_overlaps_never_starves_calibration_and_draws_alike(
    count: int, prompts: int, holdout: int, share: float, seed: int
) -> None:
    manifest = numbered(count)
    calibration, held = split(manifest, prompts=prompts, holdout=holdout, share=share, seed=seed)
    assert len({prompt.ordinal for prompt in (*calibration, *held)}) == len(calibration) + len(held)
    fewer, _ = split(manifest, prompts=max(1, prompts // 2), holdout=holdout, share=0, seed=seed)
    assert fewer[: len(calibration)] == calibration[: len(fewer)], "fewer are the first of the same draw"
    assert not {prompt.ordinal for prompt in calibration} & {prompt.ordinal for prompt in held}
    assert 1 <= len(calibration) <= prompts
    assert len(held) <= holdout
    spare = max(0, count - prompts)
    assert len(held) == min(holdout, max(spare, math.floor(share * count)))
    if spare >= holdout or share == 0:
        assert len(calibration) == min(count, prompts)
    assert (calibration, held) == split(manifest, prompts=prompts, holdout=holdout, share=share, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_a_manifest_sorted_by_kind_gives_calibration_and_held_out_prompts_of_every_kind(seed: int) -> None:
    """The head calibrates nothing that the tail is asked: every part has each kind in its share, within one prompt."""
    image = Media(None, "0" * 64, b"")
    kinds = [("caption", (image,))] * 60 + [("question", (image,))] * 30 + [("chat", ())] * 10
    manifest = [Prompt(n, str(n), [], images, extra={"task": task}) for n, (task, images) in enumerate(kinds)]
    calibration, held = split(manifest, prompts=50, holdout=20, share=0, seed=seed)
    for part in (calibration, held):
        tasks = Counter(prompt.extra["task"] for prompt in part)
        for task, share in (("caption", 0.6), ("question", 0.3), ("chat", 0.1)):
            assert abs(tasks[task] - share * len(part)) <= 2
    assert calibration != split(manifest, prompts=50, holdout=20, share=0, seed=seed + 1)[0]


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(128, 0.125, (112, 16)), (128, 0.0, (128, 0)), (144, 0.125, (128, 16)), (132, 0.0, (128, 4)), (7, 0.125, (7, 0))],
)
def test_split_of_common_manifests(count: int, share: float, expected: tuple[int, int]) -> None:
    calibration, held = split(numbered(count), prompts=128, holdout=16, share=share)
    assert (len(calibration), len(held)) == expected
