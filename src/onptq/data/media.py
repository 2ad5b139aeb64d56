"""Media files within limits: regular files only, so many bytes, so many pixels, and no format that runs a program."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 2**28  # of one file
MAX_PIXELS = 2**26  # of one image: about 8,000 x 8,000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "MPO", "AVIF")


def read_file(path: Path) -> bytes:
    """The bytes of a regular file; an OSError where it cannot be read."""
    if path.exists() and not path.is_file():
        raise OSError("not a regular file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(f"larger than {MAX_BYTES / 2**20:g} MiB")
    return data


def decode_image(data: bytes) -> Image:
    """The decoded image. Pillow's decoders raise errors of every kind on broken files."""
    from PIL import Image

    Image.init()
    with Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN]) as image:
        if image.width * image.height > MAX_PIXELS:
            raise OnPTQError(f"it has {image.width} x {image.height} pixels; expected at most {MAX_PIXELS:,} in all")
        image.load()
        return image


def read_image(data: bytes) -> Image:
    """The decoded image in RGB, turned upright; of 16 bits per pixel the upper 8."""
    import numpy as np
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(decode_image(data))
    if image.mode.startswith("I"):  # integers of 16 or 32 bits, which convert() would clip at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    return image.convert("RGB")
