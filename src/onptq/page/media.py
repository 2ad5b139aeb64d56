"""Images and audio as the page holds them: small, and within a budget that the worst examples spend first."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Literal

from onptq.data.media import read_image
from onptq.data.prompts import Media as Source
from onptq.errors import OnPTQError
from onptq.evaluate.asked import Asked
from onptq.page.contract import Media, MessagePart, Turn

BUDGET = 6 * 2**20  # bytes of all media together, as they are in the file
SIDE = 512  # pixels
QUALITY = 82  # of JPEG
SECONDS = 60  # of audio that are kept
LEFT_OUT = "left out, so that the page stays small"

Modality = Literal["image", "audio"]


class Album:
    """The media of all questions, each once."""

    def __init__(self, budget: int = BUDGET) -> None:
        self._left, self._spent = budget, budget // 50  # so little left is hardly enough for one more
        self._places: dict[tuple[Modality, str], int] = {}
        self._sources: list[tuple[Modality, Source]] = []
        self._ranks: list[float] = []

    def turns(self, asked: Asked, badness: float = 0.0) -> list[Turn]:
        """The messages, with their media put into the album. The worse a question's answers, the earlier its media are kept."""
        files: dict[Modality, Iterable[Source]] = {"image": iter(asked.images), "audio": iter(asked.audios)}
        turns = []
        for message in asked.messages:
            parts = []
            for part in message["content"]:
                kind: Modality | None = part["type"] if part["type"] in files else None
                if kind is None:
                    parts.append(MessagePart(str(part.get("text", ""))))
                else:
                    source = next(iter(files[kind]), None)
                    place = None if source is None else self.place(kind, source, badness)
                    parts.append(MessagePart(media=place) if place is not None else MessagePart(f"[{kind}]"))
            turns.append(Turn(str(message["role"]), parts))
        return turns

    def place(self, kind: Modality, source: Source, badness: float) -> int:
        """The number of the file among the album's media."""
        key = kind, source.sha256
        if key not in self._places:
            self._places[key] = len(self._sources)
            self._sources.append((kind, source))
            self._ranks.append(badness)
        place = self._places[key]
        self._ranks[place] = max(self._ranks[place], badness)
        return place

    def media(self) -> list[Media]:
        """All of them in their order; what the budget does not hold, or nobody can read, has a note instead."""
        found: dict[int, Media] = {}
        for place in sorted(range(len(self._sources)), key=lambda place: (-self._ranks[place], place)):
            found[place] = self._kept(*self._sources[place])
        return [found[place] for place in range(len(found))]

    def _kept(self, kind: Modality, source: Source) -> Media:
        name = source.path.name if source.path is not None else f"{kind} {source.sha256[:8]}"
        if self._left < self._spent:
            return Media(kind, name, None, LEFT_OUT)
        try:
            data = source.read()
            media_type, small, note = thumbnail(data) if kind == "image" else clip(data)
        except Exception as error:  # decoders raise errors of every kind
            return Media(kind, name, None, f"cannot be shown: {_reason(error)}")
        url = f"data:{media_type};base64,{base64.b64encode(small).decode()}"
        if len(url) > self._left:
            return Media(kind, name, None, LEFT_OUT)
        self._left -= len(url)
        return Media(kind, name, url, note)


def thumbnail(data: bytes) -> tuple[str, bytes, str]:
    """The image with at most 512 pixels a side, as the smaller of PNG and JPEG; nothing but its pixels is kept."""
    image = read_image(data)
    note = f"{image.width} x {image.height} pixels" if max(image.size) > SIDE else ""
    image.thumbnail((SIDE, SIDE))
    forms = []
    for form, options in (("png", {"optimize": True}), ("jpeg", {"quality": QUALITY, "optimize": True})):
        buffer = io.BytesIO()
        image.save(buffer, form, **options)
        forms.append((f"image/{form}", buffer.getvalue()))
    media_type, small = min(forms, key=lambda pair: len(pair[1]))
    return media_type, small, note


def clip(data: bytes) -> tuple[str, bytes, str]:
    """The audio in one channel, compressed; what is no WAV, or where soundfile is not installed, as it is."""
    try:
        import soundfile
    except ImportError:
        return _as_it_is(data)
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        rate, seconds = file.samplerate, len(file) / file.samplerate
        samples = file.read(SECONDS * rate, dtype="float32", always_2d=True).mean(axis=1)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="OGG", subtype="VORBIS")
    return "audio/ogg", buffer.getvalue(), f"the first {SECONDS} of {seconds:.0f} s" if seconds > SECONDS else ""


def _as_it_is(data: bytes) -> tuple[str, bytes, str]:
    kinds: Sequence[tuple[bytes, str]] = ((b"RIFF", "wav"), (b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mpeg"))
    for head, kind in kinds:
        if data.startswith(head):
            return f"audio/{kind}", data, ""
    raise OnPTQError("soundfile is not installed: pip install onptq[audio]")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
