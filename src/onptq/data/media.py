"""Media files within limits: regular files only, so many bytes, so many pixels, and no format that runs a program."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 2**28  # of one file
MAX_PIXELS = 2**26  # of one image: about 8,000 x 8,000
LARGE_PIXELS = 2**23  # of an image that is decoded while no other large one is
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "MPO", "AVIF")

_one_large = threading.Lock()


def read_file(path: Path) -> bytes:
    """The bytes of a regular file; an OSError where it cannot be read."""
    if path.exists() and not path.is_file():
        raise OSError("not a regular file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(f"larger than {MAX_BYTES / 2**20:g} MiB")
    return data


def check_image(data: bytes) -> str:
    """The format of an image that can be decoded. Pillow's decoders raise errors of every kind on broken files."""
    with _opened(data) as image:
        return image.format or ""


def read_image(data: bytes) -> Image:
    """The first frame of an image in RGB, turned upright; of 16 bits per pixel the upper 8."""
    import numpy as np
    from PIL import Image, ImageOps

    with _opened(data) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # integers of 16 or 32 bits, which convert() would clip at 255
            image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
        return image.convert("RGB")


def decode_image(data: bytes, name: str) -> Image:
    """The image that a prompt names; an OnPTQError where there is none."""
    try:
        return read_image(data)
    except Exception as error:  # Pillow's decoders raise errors of every kind on broken files
        raise OnPTQError(f"{name} cannot be decoded: {error}") from error


@contextmanager
def _opened(data: bytes) -> Iterator[Image]:
    """The decoded image, within limits; a large one waits until no other large one is open."""
    from PIL import Image, UnidentifiedImageError

    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        image = Image.open(io.BytesIO(data), formats=known)
    except UnidentifiedImageError:
        raise OnPTQError(f"expected an image in one of the formats {', '.join(known)}") from None
    with image:
        pixels = image.width * image.height
        if pixels > MAX_PIXELS:
            raise OnPTQError(f"it has {image.width} x {image.height} pixels; expected at most {MAX_PIXELS:,} in all")
        if image.mode == "F":
            raise OnPTQError("its pixels are floats, whose range nobody knows; expected 8 or 16 bits")
        with _one_large if pixels > LARGE_PIXELS else nullcontext():
            image.load()
            yield image
