"""Images made of sprites: coloured masks from a shipped atlas, painted in integers, the same bytes on every machine.

An image is a background and sprites in the order in which they are painted. Places and sizes are in units of 1/16 of a
pixel of a 112-pixel canvas, so that one image can be drawn at several sides. The pixel at column p of a canvas of S
pixels samples unit u = (2p + 1) * 1792 / (2S). Where u lies in a sprite's box, u >= x and u < x + w, the mask is read
between its 24 texels at f = (u - x) * 24 * 256 // w - 128 in steps of 1/256 texel, held within the first and the last of
them, rows likewise, and the pixel becomes (a * rgb + (255 - a) * below + 127) // 255.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onptq.errors import OnPTQError

CANVAS = 1792  # units across an image
CELL = 24  # texels across a cell of the atlas
COLUMNS = 32  # cells in a row of the atlas: the first row holds the shapes and the plate, then one row per font
SHAPES = (
    *("circle", "square", "triangle", "star", "heart", "cross", "diamond", "ring"),
    *("moon", "arrow", "house", "tree", "fish", "cup", "flag", "bolt"),
)
PLATE = len(SHAPES)  # the cell without a hole, for signs
CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"  # no I, O, 0 and 1: nobody can tell them apart in every font
FONTS = 12
CELLS = COLUMNS * (1 + FONTS)

# Every sprite but a plate is painted as a patch of at most this size, which bounds the work of `render`.
LARGEST = 34 * 16
FAR = 4 * CANVAS
FIELDS = ("cell", "x", "y", "w", "h", "red", "green", "blue")
LOWEST = np.array([-1, -FAR, -FAR, 0, 0, 0, 0, 0])
HIGHEST = np.array([CELLS - 1, FAR, FAR, FAR, FAR, 255, 255, 255])

RGB = tuple[int, int, int]


@dataclass(frozen=True)
class Sprite:
    cell: int
    x: int  # left and top of the box
    y: int
    w: int
    h: int
    rgb: RGB


@dataclass(frozen=True)
class Drawing:
    background: RGB
    sprites: tuple[Sprite, ...]


def shape_cell(name: str) -> int:
    if name == "plate":
        return PLATE
    if name not in SHAPES:
        raise OnPTQError(f"unknown shape {name!r}: expected one of {', '.join(SHAPES)}, plate")
    return SHAPES.index(name)


def glyph_cell(font: int, char: str) -> int:
    if not 0 <= font < FONTS:
        raise OnPTQError(f"unknown font {font}: expected 0 to {FONTS - 1}")
    if len(char) != 1 or char not in CHARACTERS:
        raise OnPTQError(f"no glyph for {char!r}: expected one of {CHARACTERS}")
    return COLUMNS * (1 + font) + CHARACTERS.index(char)


def pack(sprites: Sequence[Sprite], slots: int) -> NDArray[np.int16]:
    """The sprites as rows [slots, 8] of cell, box and colour; unused rows have cell -1 and paint nothing."""
    if len(sprites) > slots:
        raise OnPTQError(f"{len(sprites)} sprites do not fit into {slots} slots; expected at most {slots}")
    packed = np.zeros((slots, len(FIELDS)), np.int16)
    packed[len(sprites) :, 0] = -1
    if sprites:
        rows = np.array([(s.cell, s.x, s.y, s.w, s.h, *s.rgb) for s in sprites])
        _check(rows)
        packed[: len(sprites)] = rows
    return packed


def _check(rows: NDArray[np.int64]) -> None:
    highest = np.repeat(HIGHEST[None], len(rows), axis=0)
    highest[rows[:, 0] != PLATE, 3:5] = LARGEST
    wrong = np.argwhere((rows < LOWEST) | (rows > highest))
    if len(wrong):
        row, column = wrong[0]
        raise OnPTQError(
            f"sprite {row} has {FIELDS[column]} {rows[row, column]}; "
            f"expected {LOWEST[column]} to {highest[row, column]}"
        )


def render(packed: Tensor, background: Tensor, side: int) -> Tensor:
    """Paint [B, slots, 8] rows of `pack` over [B, 3] backgrounds, both on one device: uint8 [B, side, side, 3].

    It never waits for the device; only the first call on a device copies the atlas there.
    """
    half = _half_pixel(side)
    batch, slots, _ = packed.shape
    patch = -(-LARGEST // (2 * half))  # no box of LARGEST units holds more pixel centres
    canvas = background[:, None].repeat(1, side * side + 1, 1)  # the last pixel takes what hangs over the edge
    image = canvas[:, :-1].view(batch, side, side, 3)

    rows = packed.int()
    is_plate = rows[..., 0] == PLATE
    plates = _plate_masks(rows, is_plate, side, half)
    alphas, places = _patches(rows, (rows[..., 0] >= 0) & ~is_plate, patch, side, half)
    images = torch.arange(batch, device=packed.device)[:, None]
    for slot in range(slots):
        rgb = packed[:, slot, 5:].to(torch.uint8)
        torch.where(plates[:, slot, :, :, None], rgb[:, None, None], image, out=image)
        place = places[:, slot]  # [B, patch * patch]
        below = canvas[images, place].int()
        over = (rgb[:, None] - below) * alphas[:, slot, :, None] + 255 * below + 127
        canvas[images, place] = (over // 255).to(torch.uint8)
    return image.contiguous()


def draw(drawing: Drawing, side: int) -> Tensor:
    """One image as uint8 [side, side, 3]."""
    packed = torch.from_numpy(pack(drawing.sprites, len(drawing.sprites)))
    return render(packed[None], torch.tensor([drawing.background], dtype=torch.uint8), side)[0]


def to_png(drawing: Drawing, side: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(draw(drawing, side).numpy()).save(file, "PNG", compress_level=6)
    return file.getvalue()


def _half_pixel(side: int) -> int:
    if side <= 0 or CANVAS % (2 * side):
        valid = [s for s in range(16, CANVAS) if CANVAS % (2 * s) == 0]
        raise OnPTQError(f"an image cannot have {side} pixels a side; expected one of {valid}")
    return CANVAS // (2 * side)


def _plate_masks(rows: Tensor, is_plate: Tensor, side: int, half: int) -> Tensor:
    """Masks of the plates: bool [B, slots, side, side]."""
    centres = (2 * torch.arange(side, device=rows.device, dtype=torch.int32) + 1) * half
    start, extent = rows[..., 1:3, None], rows[..., 3:5, None]
    inside = (centres >= start) & (centres < start + extent) & is_plate[..., None, None]  # [B, slots, 2, side]
    return inside[..., 1, :, None] & inside[..., 0, None, :]


def _patches(rows: Tensor, painted: Tensor, patch: int, side: int, half: int) -> tuple[Tensor, Tensor]:
    """Opacities 0 to 255 of each sprite's patch of pixels, and the place of each pixel in the canvas.

    Both are [B, slots, patch * patch]; pixels beyond the canvas go to place side * side.
    """
    start, extent = rows[..., 1:3, None], rows[..., 3:5, None]
    first = (start + half - 1) // (2 * half)  # the first pixel whose centre is in the box
    pixel = first + torch.arange(patch, device=rows.device, dtype=torch.int32)
    offset = (2 * pixel + 1) * half - start  # [B, slots, 2, patch], columns then rows
    position = (offset * (CELL * 256) // extent.clamp(min=1) - 128).clamp(0, (CELL - 1) * 256)
    inside = (offset < extent) & painted[..., None, None]
    (x, y), (across, down) = _split(position >> 8), _split(position & 255)

    corner = (rows[..., 0, None, None].clamp(min=0) * (CELL * CELL) + y * CELL + x).long()
    a, b, c, d = (tap[corner].int() for tap in _taps(rows.device))
    top, bottom = a * 256 + (b - a) * across, c * 256 + (d - c) * across
    alphas = (top * 256 + (bottom - top) * down + 32768) >> 16

    covered = _split(inside)
    visible = _split((pixel >= 0) & (pixel < side))
    column, row = _split(pixel)
    alphas = alphas * (covered[0] & covered[1])
    places = torch.where(visible[0] & visible[1], row * side + column, side * side)
    return alphas.flatten(2), places.flatten(2).long()


def _split(axes: Tensor) -> tuple[Tensor, Tensor]:
    """[B, slots, 2, patch] as a row for the columns and a column for the rows, ready to broadcast."""
    return axes[..., 0, None, :], axes[..., 1, :, None]


@cache
def _taps(device: torch.device) -> tuple[Tensor, ...]:
    """The atlas as one row of texels, and the same with the texel to the right, below, and below to the right.

    Next to a cell's last texel lies another cell's, or the padding; both are read with weight 0 only.
    """
    flat = torch.from_numpy(np.pad(load_cells().ravel(), (0, CELL + 1))).to(device)
    return tuple(flat[shift:] for shift in (0, 1, CELL, CELL + 1))


def load_cells() -> NDArray[np.uint8]:
    """The masks of the atlas, [CELLS, 24, 24]."""
    from PIL import Image

    with resources.files("onptq.zoo").joinpath("assets", "atlas.png").open("rb") as file:
        atlas = np.asarray(Image.open(file))
    cells = atlas.reshape(-1, CELL, COLUMNS, CELL).swapaxes(1, 2)
    return np.ascontiguousarray(cells.reshape(CELLS, CELL, CELL))
