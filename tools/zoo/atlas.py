"""Draw the atlas of sprite masks: `python -m tools.zoo.atlas` writes atlas.png of the package. Needs the fonts below.

The package has images of glyphs and no fonts, which every licence below allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from onptq import zoo
from onptq.errors import OnPTQError
from onptq.zoo.sprites import CELL, CELLS, CHARACTERS, COLUMNS, PLATE, SHAPES, glyph_cell, shape_cell

FINE = 8  # subpixels a texel, each way
CAPITALS = 22 * FINE  # height of a capital letter
LARGEST_GLYPH = 23 * FINE  # largest width and height

FONT_ROOT = Path("/usr/share/fonts")  # of Debian
VERA = "Bitstream Vera and Arev licence"
OFL = "SIL Open Font License 1.1"


@dataclass(frozen=True)
class Face:
    path: str
    package: str
    licence: str


FACES = (
    Face("truetype/dejavu/DejaVuSans.ttf", "fonts-dejavu-core", VERA),
    Face("truetype/dejavu/DejaVuSerif-Bold.ttf", "fonts-dejavu-core", VERA),
    Face("truetype/dejavu/DejaVuSansMono.ttf", "fonts-dejavu-core", VERA),
    Face("truetype/dejavu/DejaVuSansCondensed-Bold.ttf", "fonts-dejavu-extra", VERA),
    Face("truetype/dejavu/DejaVuSerifCondensed-Italic.ttf", "fonts-dejavu-extra", VERA),
    Face("truetype/noto/NotoSans-BoldItalic.ttf", "fonts-noto-core", OFL),
    Face("truetype/noto/NotoSerif-Regular.ttf", "fonts-noto-core", OFL),
    Face("truetype/noto/NotoSerif-BoldItalic.ttf", "fonts-noto-core", OFL),
    Face("truetype/lato/Lato-Regular.ttf", "fonts-lato", OFL),
    Face("truetype/lato/Lato-Black.ttf", "fonts-lato", OFL),
    Face("truetype/comfortaa/Comfortaa-Bold.ttf", "fonts-comfortaa", OFL),
    Face("opentype/cantarell/Cantarell-Bold.otf", "fonts-cantarell", OFL),
)


class Pen:
    """A pen for one cell; coordinates are in texels, from 0 to 24."""

    def __init__(self) -> None:
        self.image = Image.new("L", (CELL * FINE, CELL * FINE))
        self._draw = ImageDraw.Draw(self.image)

    def polygon(self, *corners: tuple[float, float], ink: int = 255) -> None:
        self._draw.polygon([(x * FINE, y * FINE) for x, y in corners], fill=ink)

    def box(self, left: float, top: float, right: float, bottom: float, ink: int = 255) -> None:
        # PIL includes the last row and column.
        self._draw.rectangle((left * FINE, top * FINE, right * FINE - 1, bottom * FINE - 1), fill=ink)

    def oval(self, x: float, y: float, rx: float, ry: float, ink: int = 255) -> None:
        self._draw.ellipse(((x - rx) * FINE, (y - ry) * FINE, (x + rx) * FINE - 1, (y + ry) * FINE - 1), fill=ink)


def _circle(pen: Pen) -> None:
    pen.oval(12, 12, 11, 11)


def _square(pen: Pen) -> None:
    pen.box(2, 2, 22, 22)


def _triangle(pen: Pen) -> None:
    pen.polygon((12, 1), (23, 22), (1, 22))


def _star(pen: Pen) -> None:
    reach = [(12.0, 5.0)[point % 2] for point in range(10)]
    angles = [math.pi * point / 5 for point in range(10)]
    pen.polygon(*((12 + r * math.sin(t), 13 - r * math.cos(t)) for r, t in zip(reach, angles, strict=True)))


def _heart(pen: Pen) -> None:
    angles = [2 * math.pi * step / 200 for step in range(200)]
    pen.polygon(*((12 + 11 * math.sin(t) ** 3, 11 - _heart_height(t) * 11 / 16) for t in angles))


def _heart_height(t: float) -> float:
    return 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)


def _cross(pen: Pen) -> None:
    pen.box(8.5, 1, 15.5, 23)
    pen.box(1, 8.5, 23, 15.5)


def _diamond(pen: Pen) -> None:
    pen.polygon((12, 1), (20.5, 12), (12, 23), (3.5, 12))


def _ring(pen: Pen) -> None:
    pen.oval(12, 12, 11, 11)
    pen.oval(12, 12, 6, 6, ink=0)


def _moon(pen: Pen) -> None:
    pen.oval(12, 12, 11, 11)
    pen.oval(17.5, 10, 9, 9.5, ink=0)


def _arrow(pen: Pen) -> None:
    pen.polygon((12, 1), (22, 12), (2, 12))
    pen.box(8.5, 11, 15.5, 23)


def _house(pen: Pen) -> None:
    pen.polygon((12, 1), (23, 11), (1, 11))
    pen.box(17, 2, 20, 10)
    pen.box(3, 11, 21, 23)
    pen.box(9.5, 15, 14.5, 23, ink=0)


def _tree(pen: Pen) -> None:
    pen.polygon((12, 1), (18, 8), (6, 8))
    pen.polygon((12, 3), (20.5, 14), (3.5, 14))
    pen.polygon((12, 8), (23, 20), (1, 20))
    pen.box(10, 20, 14, 23)


def _fish(pen: Pen) -> None:
    pen.oval(9.5, 12, 8.5, 8)
    pen.polygon((13, 12), (23, 3), (23, 21))
    pen.oval(6, 10, 1.6, 1.6, ink=0)


def _cup(pen: Pen) -> None:
    pen.oval(17, 11, 6, 6)
    pen.oval(17, 11, 3.2, 3.2, ink=0)
    pen.polygon((1, 3), (18, 3), (15.5, 21), (3.5, 21))


def _flag(pen: Pen) -> None:
    pen.box(2, 1, 5, 23)
    pen.polygon((5, 2), (23, 2), (17.5, 8.5), (23, 15), (5, 15))


def _bolt(pen: Pen) -> None:
    pen.polygon((14, 1), (3.5, 14), (10.5, 14), (8, 23), (20.5, 9), (13, 9), (18, 1))


PAINTERS: tuple[Callable[[Pen], None], ...] = (
    *(_circle, _square, _triangle, _star, _heart, _cross, _diamond, _ring),
    *(_moon, _arrow, _house, _tree, _fish, _cup, _flag, _bolt),
)


def draw_atlas() -> NDArray[np.uint8]:
    """All cells in rows of COLUMNS, as one grayscale image."""
    cells = np.zeros((CELLS, CELL, CELL), np.uint8)
    cells[PLATE] = 255
    for name, paint in zip(SHAPES, PAINTERS, strict=True):
        pen = Pen()
        paint(pen)
        cells[shape_cell(name)] = _average(pen.image)
    for font, face in enumerate(FACES):
        for char, cell in zip(CHARACTERS, _glyphs(face), strict=True):
            cells[glyph_cell(font, char)] = cell
    rows = cells.reshape(-1, COLUMNS, CELL, CELL).swapaxes(1, 2)
    return rows.reshape(-1, COLUMNS * CELL)


def _average(fine: Image.Image) -> NDArray[np.uint8]:
    blocks = np.asarray(fine, np.int64).reshape(CELL, FINE, CELL, FINE)
    texels: NDArray[np.int64] = (blocks.sum(axis=(1, 3)) + FINE * FINE // 2) // (FINE * FINE)
    return texels.astype(np.uint8)


def _glyphs(face: Face) -> list[NDArray[np.uint8]]:
    path = FONT_ROOT / face.path
    if not path.exists():
        raise OnPTQError(f"no font {path}; expected it from the Debian package {face.package}")
    trial = ImageFont.truetype(path, 1000, layout_engine=ImageFont.Layout.BASIC)
    _, top, _, bottom = trial.getbbox("H")
    font = trial.font_variant(size=1000 * CAPITALS / (bottom - top))
    return [_average(_centre(font, char)) for char in CHARACTERS]


def _centre(font: ImageFont.FreeTypeFont, char: str) -> Image.Image:
    """The glyph in the middle of a cell; one that is too wide (W) or too tall (Q) is squeezed in that direction."""
    left, top, right, bottom = font.getbbox(char)
    ink = Image.new("L", (math.ceil(right - left), math.ceil(bottom - top)))
    ImageDraw.Draw(ink).text((-left, -top), char, fill=255, font=font)
    ink = ink.crop(ink.getbbox())
    ink = ink.resize((min(ink.width, LARGEST_GLYPH), min(ink.height, LARGEST_GLYPH)), Image.Resampling.BOX)
    cell = Image.new("L", (CELL * FINE, CELL * FINE))
    cell.paste(ink, ((cell.width - ink.width) // 2, (cell.height - ink.height) // 2))
    return cell


def main() -> None:
    Image.fromarray(draw_atlas()).save(Path(zoo.__file__).with_name("assets") / "atlas.png", optimize=True)


if __name__ == "__main__":
    main()
