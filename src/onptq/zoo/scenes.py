"""Scenes of the embedded tasks: coloured things on a grid and signs to read, and their drawings."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from random import Random

from onptq.zoo.sprites import CANVAS, CHARACTERS, FONTS, SHAPES, Drawing, Sprite, glyph_cell, shape_cell

RGB = tuple[int, int, int]

COLORS: dict[str, RGB] = {
    "red": (210, 35, 40),
    "orange": (240, 135, 20),
    "yellow": (235, 205, 30),
    "green": (40, 150, 60),
    "blue": (40, 85, 205),
    "purple": (130, 50, 165),
    "brown": (120, 75, 40),
    "black": (25, 25, 30),
}
GROUNDS: dict[str, RGB] = {
    "white": (250, 250, 250),
    "gray": (190, 190, 195),
    "pink": (250, 200, 215),
    "cream": (250, 240, 205),
    "mint": (205, 240, 215),
    "sky": (200, 225, 250),
}

LARGE, SMALL = (74, 88), (42, 54)  # edge of a thing, in percent of its cell
SHADES = 26  # variation of each channel of a thing's colour
PLAIN, FAINT = 150, 100  # least difference of a sign's letters from its plate

# The sixteenths of all scenes that belong to a split: no scene is in two of them.
SHARES = {"calibration": (0,), "held-out": (1,), "test": (2, 3, 4), "train": tuple(range(5, 16))}


@dataclass(frozen=True)
class Thing:
    color: str
    shape: str
    large: bool
    row: int
    col: int

    @property
    def cell(self) -> tuple[int, int]:
        return self.row, self.col


@dataclass(frozen=True)
class Sign:
    text: str
    row: int
    faint: bool = False  # smaller, paler, anywhere on its plate


@dataclass(frozen=True)
class Scene:
    things: tuple[Thing, ...]
    signs: tuple[Sign, ...]
    ground: str
    grid: int = 3  # rows, and as many columns

    def find(self, *, color: str | None = None, shape: str | None = None) -> list[Thing]:
        return [
            thing
            for thing in self.things
            if (color is None or thing.color == color) and (shape is None or thing.shape == shape)
        ]

    def at(self, row: int, col: int) -> Thing | None:
        return self._cells.get((row, col))

    @cached_property
    def unique(self) -> tuple[Thing, ...]:
        """Things whose colour and shape no other thing has."""
        names = Counter((thing.color, thing.shape) for thing in self.things)
        return tuple(thing for thing in self.things if names[thing.color, thing.shape] == 1)

    @cached_property
    def _cells(self) -> dict[tuple[int, int], Thing]:
        return {thing.cell: thing for thing in self.things}


def in_split(key: str, split: str) -> bool:
    """Whether content with this key belongs to the split. The content alone decides, so splits are disjoint."""
    return zlib.crc32(key.encode()) % 16 in SHARES[split]


def sample_scene(
    rng: Random,
    split: str,
    *,
    things: tuple[int, int],
    signs: Sequence[str] = (),
    faint: bool = False,
    palette: int | None = None,
    grid: int = 3,
) -> Scene:
    """A random scene of the split.

    `things` is the range of their number. A small `palette` of colours and shapes repeats some, for questions that count.
    """
    while True:
        scene = _sample(rng, things, signs, faint, palette, grid)
        if in_split(repr(scene), split):
            return scene


def _sample(
    rng: Random, things: tuple[int, int], signs: Sequence[str], faint: bool, palette: int | None, grid: int
) -> Scene:
    rows = rng.sample(range(grid), len(signs))
    cells = [(row, col) for row in range(grid) if row not in rows for col in range(grid)]
    colors = list(COLORS) if palette is None else rng.sample(list(COLORS), palette)
    shapes = list(SHAPES) if palette is None else rng.sample(list(SHAPES), palette)
    count = min(rng.randint(*things), len(cells))
    placed = tuple(
        Thing(rng.choice(colors), rng.choice(shapes), rng.random() < 0.5, row, col)
        for row, col in sorted(rng.sample(cells, count))
    )
    plates = tuple(Sign(text, row, faint) for text, row in zip(signs, sorted(rows), strict=True))
    return Scene(placed, plates, rng.choice(list(GROUNDS)), grid)


def sample_sign(rng: Random) -> str:
    """The text of a sign: a word, or just as often a random string of 3 to 6 characters."""
    if rng.random() < 0.5:
        return rng.choice(sign_words())
    return "".join(rng.choices(CHARACTERS, k=rng.randint(3, 6)))


@cache
def glosses() -> dict[str, dict[str, str]]:
    """Common English words with their first WordNet 3.0 gloss as noun, verb or adjective."""
    text = files("onptq.zoo").joinpath("assets/glosses.txt").read_text(encoding="utf-8")
    definitions: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        word, part, gloss = line.split("\t")
        definitions.setdefault(word, {})[part] = gloss
    return definitions


@cache
def sign_words() -> tuple[str, ...]:
    words = (word.upper() for word, parts in glosses().items() if "noun" in parts and 3 <= len(word) <= 6)
    return tuple(word for word in words if set(word) <= set(CHARACTERS))


def draw_scene(scene: Scene, rng: Random) -> Drawing:
    """A drawing of the scene with random offsets, sizes, shades and fonts."""
    cell = CANVAS // scene.grid
    sprites = [_thing_sprite(thing, cell, rng) for thing in scene.things]
    for sign in scene.signs:
        sprites += _sign_sprites(sign, cell, rng)
    return Drawing(_shade(GROUNDS[scene.ground], 6, rng), tuple(sprites))


def _thing_sprite(thing: Thing, cell: int, rng: Random) -> Sprite:
    size = rng.randint(*(LARGE if thing.large else SMALL)) * cell // 100
    margin = (cell - size) // 2
    x = thing.col * cell + margin + rng.randint(-margin, margin) * 3 // 4
    y = thing.row * cell + margin + rng.randint(-margin, margin) * 3 // 4
    return Sprite(shape_cell(thing.shape), x, y, size, size, _shade(COLORS[thing.color], SHADES, rng))


def _sign_sprites(sign: Sign, cell: int, rng: Random) -> Iterator[Sprite]:
    """The plate across the row and its characters, dark on light or light on dark."""
    contrast = FAINT if sign.faint else PLAIN
    ink = rng.randint(0, 255 - contrast)
    plate = rng.randint(ink + contrast, 255)
    if rng.random() < 0.5:
        plate, ink = ink, plate
    height = cell * rng.randint(60, 78) // 100
    top = sign.row * cell + (cell - height) // 2 + rng.randint(-40, 40)
    yield Sprite(shape_cell("plate"), 40, top, CANVAS - 80, height, (plate, plate, plate))
    size = min(height - 50, 1640 * 5 // (4 * len(sign.text)))
    size = size * rng.randint(*((65, 90) if sign.faint else (88, 100))) // 100
    advance = size * 4 // 5
    free = (CANVAS - 80 - advance * len(sign.text)) // (3 if sign.faint else 12)
    left = CANVAS // 2 - advance * len(sign.text) // 2 - (size - advance) // 2 + rng.randint(-free, free)
    font = rng.randrange(FONTS)
    for index, char in enumerate(sign.text):
        x, y = left + index * advance, top + (height - size) // 2
        yield Sprite(glyph_cell(font, char), x, y, size, size, (ink, ink, ink))


def _shade(color: RGB, spread: int, rng: Random) -> RGB:
    red, green, blue = (min(255, max(0, part + rng.randint(-spread, spread))) for part in color)
    return red, green, blue
