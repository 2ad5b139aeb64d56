"""Media that are small on disk and large in memory, and media that are odd: read or refused at once."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from guarded import READ, REFUSED, guarded, outcome
from PIL import Image
from readers import read_picture, read_sound

SECONDS = 30  # of a loaded machine


def png(width: int, height: int, rows: bytes | None = None) -> bytes:
    """A grey image of zeros, whatever its size, in a few KB; or one with other rows."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes((width + 1) * height) if rows is None else rows, 9)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def gif(frames: int) -> bytes:
    buffer = io.BytesIO()
    images = [Image.new("P", (64, 64), number % 256) for number in range(frames)]
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:])
    return buffer.getvalue()


def wav(frames: int, rate: int, channels: int = 1) -> bytes:
    data = bytes(2 * frames * channels)
    form = struct.pack("<HHIIHH", 1, channels, rate, 2 * rate * channels % 2**32, 2 * channels, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def flac(seconds: int, rate: int) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", rate, 1, format="FLAC") as file:
        for _ in range(seconds):
            file.write(np.zeros(rate, np.int16))
    return buffer.getvalue()


IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a bomb of 13,000 x 13,000": (lambda: png(13_000, 13_000), REFUSED),
    "a bomb whose rows go on": (lambda: png(16, 16, bytes(2**27)), READ),
    "60,000 x 60,000 in words": (lambda: png(60_000, 60_000, b""), REFUSED),
    "no pixels": (lambda: png(0, 0), REFUSED),
    "no rows": (lambda: png(16, 0), REFUSED),
    "one pixel": (lambda: png(1, 1), READ),
    "a thousand frames": (lambda: gif(1000), READ),
    "nothing": (lambda: b"", REFUSED),
}
SOUNDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "96 kHz": (lambda: wav(96_000, 96_000), READ),
    "96 kHz in FLAC": (lambda: flac(1, 96_000), READ),
    "hours in FLAC": (lambda: flac(3_600, 8_000), REFUSED),
    "one sample a second": (lambda: wav(30_000, 1), REFUSED),
    "a rate of 4 GHz": (lambda: wav(100, 2**32 - 1), READ),
    "sixty channels": (lambda: wav(1000, 16_000, 60), READ),
    "no samples": (lambda: wav(0, 16_000), REFUSED),
    "no rate": (lambda: wav(16, 0), REFUSED),
}
CASES = {**{name: (read_picture, *case) for name, case in IMAGES.items()}}
CASES |= {name: (read_sound, *case) for name, case in SOUNDS.items()}


@pytest.mark.parametrize("name", CASES)
def test_extreme_media_are_read_or_refused_within_bounds(name: str) -> None:
    read, make, expected = CASES[name]
    data = make()
    assert len(data) < 2**20
    seen: list[str] = []

    def work(case: Path) -> None:
        began = time.monotonic()
        seen.append(outcome(read, data))
        assert seen == [expected]
        assert time.monotonic() - began < SECONDS

    trouble, _ = guarded(work)
    assert trouble is None, trouble
