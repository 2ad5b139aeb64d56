"""The paper's calibration sets from copies of the data: files that are drawn here, in the published formats."""

from __future__ import annotations

import hashlib
import json
import struct
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from collecting import said
from test_manifest import picture
from typer.testing import CliRunner

from onptq.cli import app
from onptq.data.manifest import load_manifest, manifest_digest
from onptq.data.published.coco import CAPTIONS, Coco128, coco_prompts
from onptq.data.published.copies import check_digest
from onptq.data.published.omnibench import COUNT, INSTRUCTION, omnibench_prompts
from onptq.errors import OnPTQError

IDS = Coco128.published().ids
DIGEST = "0141ce79a80822251d92e4441382663de7d05635fae0043f50d3debe556d663c"
QUESTION = "<image>\nWhat do you see happening in this image?"


def caption(name: str, folder: str = "coco/train2017", question: str = QUESTION) -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": f"This is {name}."}]
    return {"id": name, "image": f"{folder}/{name}.jpg", "conversations": turns}


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All captions in reverse with others between, and all images."""
    folder = tmp_path_factory.mktemp("coco")
    records = [caption(name) for name in (*reversed(IDS), "000000000009")]
    records += [caption(IDS[0], "sam/images", "<image>\nAnother"), caption(IDS[1], question="<image>\nAgain")]
    (folder / CAPTIONS).write_text(json.dumps(records))
    (folder / "train2017").mkdir()
    for shade, name in enumerate(IDS):
        (folder / "train2017" / f"{name}.jpg").write_bytes(picture(shade, "JPEG", 16))
    return folder


def wav(shade: int) -> bytes:
    import io

    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes(struct.pack("<8h", *range(shade, shade + 8)))
    return file.getvalue()


def row(index: int, **more: Any) -> dict[str, Any]:
    options = [f"{word} {index}" for word in ("one", "two", "three", "four")]
    return {"index": index, "task type": "Action", "question": f"What is {index}?", "options": options, **more}


@pytest.fixture(scope="module")
def omnibench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OmniBench's own layout: a .jsonl beside mm_data."""
    folder = tmp_path_factory.mktemp("omnibench")
    for kind in ("image", "audio"):
        (folder / "mm_data" / kind).mkdir(parents=True)
    rows = []
    for index in range(COUNT + 2):
        (folder / f"mm_data/image/{index}.png").write_bytes(picture(index, size=16))
        (folder / f"mm_data/audio/{index}.wav").write_bytes(wav(index))
        rows.append(row(index, image_path=f"{index}.png", audio_path=f"{index}.wav"))
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in reversed(rows)))
    return folder


# --- COCO -------------------------------------------------------------------------------------------------------------


def test_the_published_ids_are_128_different_coco_ids() -> None:
    known = Coco128.published()
    assert len(set(known.ids)) == len(known.ids) == 128
    assert all(len(name) == 12 and name.isdigit() for name in known.ids)
    assert (known.ids[0], known.ids[63], known.ids[127]) == ("000000039043", "000000115912", "000000179793")
    # of the ids in the order of the paper's table
    assert hashlib.sha256("\n".join(known.ids).encode()).hexdigest() == DIGEST


def test_coco_prompts_are_in_the_papers_order_without_their_captions(coco: Path) -> None:
    notes: list[str] = []
    prompts = coco_prompts(str(coco), str(coco), notes.append)
    assert tuple(prompt.id for prompt in prompts) == IDS
    assert {text for prompt in prompts for _, text in said(prompt)} == {
        "<image>What do you see happening in this image?"
    }
    assert prompts[5].images[0].sha256 == hashlib.sha256(picture(5, "JPEG", 16)).hexdigest()
    assert notes == [f"{coco / CAPTIONS} has captions of 129 COCO images; the paper drew from 50,027"]


def test_what_is_missing_is_named(coco: Path, tmp_path: Path) -> None:
    captions = json.loads((coco / CAPTIONS).read_text())
    few = tmp_path / "few.json"
    few.write_text(json.dumps([one for one in captions if one["id"] not in IDS[3:5]]))
    with pytest.raises(OnPTQError, match=f"2 of 128 COCO images have no caption in .*few.json: {IDS[3]}, {IDS[4]}$"):
        coco_prompts(str(few), str(coco))
    with pytest.raises(OnPTQError, match=rf"128 of 128 images are not in .*: {IDS[0]}, .*, \.\.\.$"):
        coco_prompts(str(coco), str(tmp_path))
    with pytest.raises(OnPTQError, match="nowhere is not there: expected a file or folder, or hub:OWNER/NAME"):
        coco_prompts(str(coco), "nowhere")


@pytest.mark.parametrize(("text", "why"), [("{}", "an empty list|a mapping"), ("[", "not usable JSON")])
def test_a_file_that_holds_no_captions_is_refused(text: str, why: str, coco: Path, tmp_path: Path) -> None:
    (tmp_path / "captions.json").write_text(text)
    with pytest.raises(OnPTQError, match=why):
        coco_prompts(str(tmp_path / "captions.json"), str(coco))


def test_a_broken_image_is_named(coco: Path, tmp_path: Path) -> None:
    for name in IDS:
        (tmp_path / f"{name}.jpg").symlink_to(coco / "train2017" / f"{name}.jpg")
    (tmp_path / f"{IDS[7]}.jpg").unlink()
    (tmp_path / f"{IDS[7]}.jpg").write_bytes(b"no image")
    with pytest.raises(OnPTQError, match=rf"{CAPTIONS}, image {IDS[7]}: image .* cannot be decoded"):
        coco_prompts(str(coco), str(tmp_path))


# --- OmniBench --------------------------------------------------------------------------------------------------------


def test_omnibench_prompts_are_questions_0_to_127_with_audio_image_and_lettered_options(omnibench: Path) -> None:
    notes: list[str] = []
    prompts = omnibench_prompts(str(omnibench / "rows.jsonl"), note=notes.append)
    assert [prompt.id for prompt in prompts] == [str(index) for index in range(128)]
    text = f"Question:\nWhat is 9?\n\nOptions:\nA. one 9\nB. two 9\nC. three 9\nD. four 9\n\n{INSTRUCTION}"
    assert said(prompts[9]) == [("user", f"<audio><image>{text}")]
    assert prompts[9].audios[0].sha256 == hashlib.sha256(wav(9)).hexdigest()
    assert notes == [f"{omnibench / 'rows.jsonl'} has 130 questions; OmniBench has 1,142"]


def test_parquet_rows_with_media_inside_give_the_same_prompts(omnibench: Path, tmp_path: Path) -> None:
    rows = [
        row(index, image={"bytes": picture(index, size=16), "path": None}, audio={"bytes": wav(index), "path": "a.wav"})
        for index in range(COUNT)
    ]
    for part, some in enumerate((rows[64:], rows[:64])):
        pq.write_table(pa.Table.from_pylist(some), tmp_path / f"train-{part}.parquet")
    inside = omnibench_prompts(str(tmp_path))
    assert manifest_digest(inside) == manifest_digest(omnibench_prompts(str(omnibench)))


def test_questions_and_media_that_are_missing_are_named(omnibench: Path, tmp_path: Path) -> None:
    rows = [row(index, image_path=f"{index}.png", audio_path="x.wav") for index in range(COUNT) if index != 77]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    with pytest.raises(OnPTQError, match=r"1 of 128 questions are not in .*: 77$"):
        omnibench_prompts(str(tmp_path))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row(77, image_path="../secret", audio_path="x.wav")))
    with pytest.raises(OnPTQError, match=r"question 0 \(image '0.png' is not below") as caught:
        omnibench_prompts(str(tmp_path))
    assert "128 of 128 questions cannot be used" in str(caught.value)
    with pytest.raises(OnPTQError, match=r"question 0 \(audio 'x.wav' is not below"):
        omnibench_prompts(str(tmp_path), omnibench)


# --- the command ------------------------------------------------------------------------------------------------------


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["data", "prepare", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_write_manifests_that_read_back_and_say_their_hash(
    coco: Path, omnibench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "coco.jsonl"
    printed = run("coco-128", "--captions", coco / CAPTIONS, "--images", coco, "--out", out)
    assert f"ONPTQ_MEDIA_ROOT={coco / 'train2017'} onptq quantize MODEL" in printed
    monkeypatch.setenv("ONPTQ_MEDIA_ROOT", str(coco))
    prompts = load_manifest(out)
    assert f"sha256 of prompts and media: {manifest_digest(prompts)}" in printed
    assert "wrote 128 prompts" in printed
    out = tmp_path / "omni.jsonl"
    rows = [row(index, image={"bytes": picture(index, size=16)}, audio={"bytes": wav(index)}) for index in range(COUNT)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    run("omnibench", "--source", tmp_path / "rows.parquet", "--out", out)
    assert manifest_digest(load_manifest(out)) == manifest_digest(omnibench_prompts(str(omnibench)))
    assert len(list((tmp_path / "omni-media").iterdir())) == 256
    assert out.stat().st_size < 200_000


def test_another_hash_is_refused_and_nothing_is_written(coco: Path, tmp_path: Path) -> None:
    prompts = coco_prompts(str(coco), str(coco))
    assert check_digest(prompts, manifest_digest(prompts).upper()) == manifest_digest(prompts)
    words = ["--captions", coco, "--images", coco, "--out", tmp_path / "x.jsonl", "--sha256", "0" * 64]
    result = CliRunner().invoke(app, ["data", "prepare", "coco-128", *map(str, words)])
    assert result.exit_code == 2
    assert "they are not the same" in result.output
    assert not (tmp_path / "x.jsonl").exists()


# --- the hub ----------------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(coco: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A hub on loopback that has the files of `coco` as someone/coco; yields the paths it was asked for."""
    files = [path.relative_to(coco).as_posix() for path in sorted(coco.rglob("*")) if path.is_file()]
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body: bytes, **headers: str) -> None:
            self.send_response(200)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            if "/tree/" in self.path:
                entries = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in [*files, "other.bin"]]
                self.reply(json.dumps(entries).encode())
            elif self.path.startswith("/api/"):
                siblings = [{"rfilename": name} for name in [*files, "other.bin"]]
                self.reply(json.dumps({"id": "someone/coco", "sha": COMMIT, "siblings": siblings}).encode())
            else:
                body = (coco / self.path.partition(f"/{COMMIT}/")[2]).read_bytes()
                self.reply(body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    import huggingface_hub.constants as constants

    here = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", here)
    template = f"{here}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield asked
    server.shutdown()
    server.server_close()


def test_a_hub_id_downloads_what_is_needed_and_a_path_asks_nobody(coco: Path, hub: list[str]) -> None:
    here = coco_prompts(str(coco), str(coco))
    assert hub == []
    fetched = coco_prompts("hub:someone/coco", "hub:someone/coco")
    assert manifest_digest(fetched) == manifest_digest(here)
    assert not any("other.bin" in path for path in hub)


def test_a_hub_that_cannot_be_reached_and_a_wrong_id_are_errors(coco: Path) -> None:
    with pytest.raises(OnPTQError, match="cannot fetch hub:someone/nothing from the hub"):
        coco_prompts("hub:someone/nothing", str(coco))
    with pytest.raises(OnPTQError, match="names no hub repository; expected hub:OWNER/NAME"):
        coco_prompts("hub:nothing", str(coco))
