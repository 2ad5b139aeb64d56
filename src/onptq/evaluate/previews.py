"""Previews of images and clips that are files of the user: what a page shows of them when the files are gone."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from onptq.data.media import read_image
from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.details import LEVEL, LIGHT, OFF, keeps
from onptq.run import Run

PREVIEWS = "previews.parquet"
BUDGET = 32 * 2**20  # bytes of all previews of a run or a comparison
SIDE = 512  # pixels
QUALITY = 82  # of JPEG
FEW_COLOURS = 256  # of which a PNG is smaller
SECONDS = 60  # of audio
AT_ONCE = 4  # files that are read in parallel
NOT_KEPT = "not among the run's files"

Modality = Literal["image", "audio"]


@dataclass(frozen=True)
class Preview:
    """The bytes of a small image or clip, or None and the reason in `note`."""

    media_type: str = ""
    data: bytes | None = None
    note: str = NOT_KEPT


Previews = Mapping[tuple[Modality, str], Preview]


def preview(kind: Modality, source: Media) -> Preview:
    """The image with at most 512 pixels a side, or the first minute of the clip in one channel."""
    try:
        data = source.read()
        return thumbnail(data) if kind == "image" else clip(data)
    except Exception as error:  # decoders raise errors of every kind
        return Preview(note=f"cannot be shown: {_reason(error)}")


def thumbnail(data: bytes) -> Preview:
    """The image as JPEG, or as PNG where it has few colours and that is smaller; nothing but its pixels is kept."""
    image = read_image(data)
    note = f"{image.width} x {image.height} pixels" if max(image.size) > SIDE else ""
    image.thumbnail((SIDE, SIDE))
    forms = {"jpeg": {"quality": QUALITY, "optimize": True}}
    if image.getcolors(FEW_COLOURS) is not None:
        forms["png"] = {"optimize": True}
    buffers = {form: io.BytesIO() for form in forms}
    for form, options in forms.items():
        image.save(buffers[form], form, **options)
    form = min(buffers, key=lambda form: buffers[form].tell())
    return Preview(f"image/{form}", buffers[form].getvalue(), note)


def clip(data: bytes) -> Preview:
    """The audio in one channel, compressed; where soundfile is not installed, as it is."""
    try:
        import soundfile
    except ImportError:
        return _as_it_is(data)
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        rate, seconds = file.samplerate, len(file) / file.samplerate
        samples = file.read(SECONDS * rate, dtype="float32", always_2d=True).mean(axis=1)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="OGG", subtype="VORBIS")
    return Preview(
        "audio/ogg", buffer.getvalue(), f"the first {SECONDS} of {seconds:.0f} s" if seconds > SECONDS else ""
    )


def _as_it_is(data: bytes) -> Preview:
    kinds: Sequence[tuple[bytes, str]] = ((b"RIFF", "wav"), (b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mpeg"))
    for head, kind in kinds:
        if data.startswith(head):
            return Preview(f"audio/{kind}", data, "")
    raise OnPTQError("soundfile is not installed: pip install onptq[audio]")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def keep_previews(run: Run, prompts: Iterable[Prompt], level: str, budget: int = BUDGET) -> None:
    """Commit previews of the media that are files, in the order of the prompts and within the budget; none at level `off`.

    Media without a path are among the prompts of the run already."""
    sources = _files(prompts)
    if not sources or (run.has(PREVIEWS) and (level == OFF or keeps(run.file(PREVIEWS), LIGHT))):
        return
    kept = {} if level == OFF else dict(_within(sources, budget))
    with run.writing(PREVIEWS) as path:
        write_previews(kept, level, path)


def _files(prompts: Iterable[Prompt]) -> dict[tuple[Modality, str], Media]:
    sources: dict[tuple[Modality, str], Media] = {}
    for prompt in prompts:
        of_prompt: dict[Modality, Sequence[Media]] = {"image": prompt.images, "audio": prompt.audios}
        sources |= {(kind, one.sha256): one for kind, each in of_prompt.items() for one in each if one.data is None}
    return sources


def _within(
    sources: Mapping[tuple[Modality, str], Media], budget: int
) -> Iterator[tuple[tuple[Modality, str], Preview]]:
    keys, many = list(sources), 4 * AT_ONCE
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for some in (keys[first : first + many] for first in range(0, len(keys), many)):
            for key, one in zip(some, pool.map(lambda key: preview(key[0], sources[key]), some), strict=True):
                size = len(one.data or b"")
                if size <= budget:
                    budget -= size
                    yield key, one
            if budget <= 0:
                return


def write_previews(previews: Previews, level: str, path: Path) -> None:
    """Write one row per image or clip."""
    columns = {
        "kind": pa.array([kind for kind, _ in previews], pa.string()),
        "sha256": pa.array([sha256 for _, sha256 in previews], pa.string()),
        "media_type": pa.array([one.media_type for one in previews.values()], pa.string()),
        "bytes": pa.array([one.data for one in previews.values()], pa.binary()),
        "note": pa.array([one.note for one in previews.values()], pa.string()),
    }
    pq.write_table(pa.table(columns).replace_schema_metadata({LEVEL: level.encode()}), path)


def read_previews(path: Path) -> Previews | None:
    """Previews by kind and hash; None where there is no such file, as in runs of earlier versions."""
    if not path.is_file():
        return None
    rows = pq.read_table(path).to_pylist()
    return {(row["kind"], row["sha256"]): Preview(row["media_type"], row["bytes"], row["note"]) for row in rows}
