"""The paper's calibration set for Omni models: questions 0 to 127 of OmniBench, each about an image and an audio clip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onptq.data.chat import MEDIA
from onptq.data.manifest import JSONL_SUFFIXES, SUFFIXES, Reader, decode_record, records
from onptq.data.prompts import Media, Prompt
from onptq.data.published.copies import local_copy, require_all
from onptq.errors import OnPTQError
from onptq.files import atomically

COUNT = 128  # of the first questions, by `index`
QUESTIONS = 1142
INSTRUCTION = "Answer with the option's letter from the given choices directly."
EXPECTED = "expected rows with `index`, `question`, `options`, and `image` and `audio` or their paths"
FOLDERS = {"image": ("mm_data/image", "image", ""), "audio": ("mm_data/audio", "audio", "")}


def omnibench_prompts(
    source: str, media: Path | None = None, note: Callable[[str], None] = lambda text: None
) -> list[Prompt]:
    """The 128 prompts by index. `source` is a file, a folder of parquet files, or `hub:OWNER/NAME`.

    Rows without the media themselves name files below `media`, by default the folder of the rows.
    """
    place = local_copy(source, ["*.parquet"])
    rows: dict[int, tuple[Mapping[str, Any], Path, str]] = {}
    count = 0
    for file in _files(place):
        for where, raw in records(file):
            count += 1
            row = decode_record(raw)
            if isinstance(index := row.get("index"), int) and 0 <= index < COUNT:
                if index in rows:
                    raise OnPTQError(f"{file} {where}: index {index} is already that of {rows[index][2]}")
                rows[index] = row, file, f"{file.name} {where}"
    if count != QUESTIONS:
        note(f"{place} has {count:,} questions; OmniBench has {QUESTIONS:,}")
    absent = [str(index) for index in range(COUNT) if index not in rows]
    require_all(absent, COUNT, f"questions are not in {place}, by their `index` ({EXPECTED})")
    return _read(rows, media)


def unpacked(prompts: list[Prompt], folder: Path) -> list[Prompt]:
    """The prompts with their media as files in the folder, named after their content."""

    def unpack(media: Media) -> Media:
        if media.path is not None:
            return media
        path = folder / media.sha256
        with atomically(path) as temporary:
            temporary.write_bytes(media.read())
        return Media(path.absolute(), media.sha256)

    return [
        replace(one, images=tuple(map(unpack, one.images)), audios=tuple(map(unpack, one.audios))) for one in prompts
    ]


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    # one format: a clone of the repository may hold the same rows in both
    for suffixes in ((".parquet",), JSONL_SUFFIXES):
        if files := sorted(path for path in place.rglob("*") if path.suffix in suffixes):
            return files
    raise OnPTQError(f"{place} has no file that ends in {', '.join(SUFFIXES)}; {EXPECTED}")


def _read(rows: Mapping[int, tuple[Mapping[str, Any], Path, str]], media: Path | None) -> list[Prompt]:
    readers: dict[Path, Reader] = {}
    prompts, problems = [], []
    for index in range(COUNT):
        row, file, where = rows[index]
        reader = readers.setdefault(file, Reader(file, None, roots=() if media is None else (media,)))
        try:
            prompts.append(replace(reader.read(_record(row, index, media or file.parent), index, where), extra={}))
        except OnPTQError as error:
            problems.append(f"question {index} ({error})")
    require_all(problems, COUNT, "questions cannot be used")
    return prompts


def _record(row: Mapping[str, Any], index: int, folder: Path) -> dict[str, Any]:
    """The row as a record of a manifest, worded as lmms-eval words its task."""
    question, options = row.get("question"), row.get("options")
    if not isinstance(question, str) or not isinstance(options, list) or not 2 <= len(options) <= 26:
        raise OnPTQError(EXPECTED)
    letters = [f"{letter}. {option}" for letter, option in zip(map(chr, range(65, 91)), options, strict=False)]
    text = f"Question:\n{question}\n\nOptions:\n" + "\n".join(letters) + f"\n\n{INSTRUCTION}"
    sources = {kind: row[kind] if kind in row else _find(row, kind, folder) for kind in MEDIA}
    content = [{"type": kind, kind: sources[kind]} for kind in ("audio", "image")]
    return {"id": str(index), "messages": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]}


def _find(row: Mapping[str, Any], kind: str, folder: Path) -> str:
    name = row.get(f"{kind}_path")
    if not isinstance(name, str) or Path(name).name != name:
        raise OnPTQError(f"`{kind}_path` is {name!r}; expected the name of a file")
    for below in FOLDERS[kind]:
        if (path := folder / below / name).is_file():
            return str(path.absolute())
    raise OnPTQError(f"{kind} {name!r} is not below {folder}")
