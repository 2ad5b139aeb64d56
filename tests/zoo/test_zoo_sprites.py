"""Sprites: the same bytes everywhere, painted in order, from an atlas with distinct cells."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image

from onptq.errors import OnPTQError
from onptq.zoo.sprites import (
    CELLS,
    CHARACTERS,
    COLUMNS,
    FONTS,
    LARGEST,
    PLATE,
    SHAPES,
    Drawing,
    Sprite,
    draw,
    glyph_cell,
    load_cells,
    pack,
    render,
    shape_cell,
    to_png,
)
from tools.zoo import atlas

DRAWN = [*range(len(SHAPES)), *range(COLUMNS, CELLS)]
SIDES = (112, 128)


def naive(drawing: Drawing, side: int) -> np.ndarray:
    """Pixel by pixel, in Python's integers."""
    cells = load_cells().tolist()
    image = np.empty((side, side, 3), np.uint8)
    image[:] = drawing.background
    for sprite in drawing.sprites:
        if sprite.cell < 0:
            continue
        for row in range(side):
            v = (2 * row + 1) * 896 // side
            if not sprite.y <= v < sprite.y + sprite.h:
                continue
            for column in range(side):
                u = (2 * column + 1) * 896 // side
                if sprite.x <= u < sprite.x + sprite.w:
                    alpha = sample(cells[sprite.cell], (u - sprite.x, sprite.w), (v - sprite.y, sprite.h))
                    for channel, ink in enumerate(sprite.rgb):
                        below = int(image[row, column, channel])
                        image[row, column, channel] = (alpha * ink + (255 - alpha) * below + 127) // 255
    return image


def sample(mask: list[list[int]], across: tuple[int, int], down: tuple[int, int]) -> int:
    total = 32768
    for row, row_weight in neighbours(*down):
        for column, column_weight in neighbours(*across):
            total += mask[row][column] * row_weight * column_weight
    return total // 65536


def neighbours(offset: int, extent: int) -> list[tuple[int, int]]:
    texel, part = divmod(offset * 24 * 256 // extent - 128, 256)
    return [(max(texel, 0), 256 - part), (min(texel + 1, 23), part)]


def random_color(random: Random) -> tuple[int, int, int]:
    return random.randrange(256), random.randrange(256), random.randrange(256)


def random_sprite(random: Random) -> Sprite:
    """Anywhere, also beyond the edges; sometimes a plate of any size, sometimes nothing."""
    kind = random.random()
    cell = PLATE if kind < 0.2 else -1 if kind < 0.3 else random.choice(DRAWN)
    extent = 1500 if cell == PLATE else LARGEST
    w, h = random.randint(0, extent), random.choice((0, 1, random.randint(2, extent), extent))
    return Sprite(cell, random.randint(-700, 1900), random.randint(-700, 1900), w, h, random_color(random))


def random_drawing(seed: int, count: int = 12) -> Drawing:
    random = Random(seed)
    return Drawing(random_color(random), tuple(random_sprite(random) for _ in range(count)))


def fixed_drawing() -> Drawing:
    shapes = [
        Sprite(cell, 40 + 420 * (cell % 4), 30 + 400 * (cell // 4), 380, 390, (15 * cell, 200, 255 - 15 * cell))
        for cell in range(len(SHAPES))
    ]
    sign = Sprite(PLATE, 500, 820, 900, 300, (250, 250, 240))
    glyphs = [Sprite(glyph_cell(3 * k, c), 540 + 200 * k, 860, 210, 210, (20, 0, 90)) for k, c in enumerate("K7QW")]
    return Drawing((90, 130, 60), (*shapes, sign, *glyphs, Sprite(0, 1600, -100, 300, 300, (255, 0, 0))))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(4))
def test_render_equals_the_formula_pixel_by_pixel(seed: int, side: int) -> None:
    drawing = random_drawing(seed)
    np.testing.assert_array_equal(draw(drawing, side).numpy(), naive(drawing, side))


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_the_largest_sprite_that_begins_at_a_pixel_centre_is_whole(side: int) -> None:
    half = 896 // side
    wide = max(range(COLUMNS, CELLS), key=lambda cell: load_cells()[cell][:, [0, -1]].min(axis=1).max())
    drawing = Drawing((0, 0, 0), (Sprite(wide, 21 * half, 11 * half, LARGEST, LARGEST, (255, 255, 255)),))
    expected = naive(drawing, side)
    assert expected[:, 10].any()
    assert expected[:, 10 + -(-LARGEST // (2 * half)) - 1].any()
    np.testing.assert_array_equal(draw(drawing, side).numpy(), expected)


@pytest.mark.parametrize("side", SIDES)
def test_a_batch_with_empty_slots_equals_its_images(side: int) -> None:
    drawings = [random_drawing(seed, count) for seed, count in ((10, 0), (11, 5), (12, 16))]
    packed = torch.from_numpy(np.stack([pack(drawing.sprites, 16) for drawing in drawings]))
    background = torch.tensor([drawing.background for drawing in drawings], dtype=torch.uint8)
    images = render(packed, background, side)
    assert images.shape == (3, side, side, 3)
    assert images.dtype == torch.uint8
    assert images.is_contiguous()
    for image, drawing in zip(images, drawings, strict=True):
        assert torch.equal(image, draw(drawing, side))


@pytest.mark.parametrize(
    ("side", "digest"),
    [
        (112, "698c14945c159c616b02be7bcee5a0914bd3bddefc46bc22df2a0a43a041477d"),
        (128, "877beedda2cfac67d45ec393151e77690db5908d4d4be3d885ac8086d9f3ec6b"),
    ],
)
def test_the_same_bytes_as_ever(side: int, digest: str) -> None:
    assert hashlib.sha256(draw(fixed_drawing(), side).numpy().tobytes()).hexdigest() == digest


def test_render_decides_nothing_by_its_data() -> None:
    """Checked with tensors that have no data."""
    packed = torch.from_numpy(pack(fixed_drawing().sprites, 24))[None].to("meta")
    assert render(packed, torch.zeros(1, 3, dtype=torch.uint8, device="meta"), 112).shape == (1, 112, 112, 3)


@pytest.mark.parametrize("cells", [(PLATE, PLATE), (0, PLATE), (PLATE, 1), (1, 1)])
def test_later_sprites_cover_earlier_ones(cells: tuple[int, int]) -> None:
    red, blue = (255, 0, 0), (0, 0, 255)
    first, second = (Sprite(cell, 400, 400, 540, 540, color) for cell, color in zip(cells, (red, blue), strict=True))
    middle = 670 // 16
    assert draw(Drawing((9, 9, 9), (first, second)), 112)[middle, middle].tolist() == list(blue)
    assert draw(Drawing((9, 9, 9), (second, first)), 112)[middle, middle].tolist() == list(red)


@pytest.mark.parametrize("sprite", [Sprite(-1, 0, 0, 500, 500, (0, 0, 0)), Sprite(0, 0, 0, 0, 500, (0, 0, 0))])
def test_an_empty_sprite_paints_nothing(sprite: Sprite) -> None:
    image = draw(Drawing((1, 2, 3), (sprite,)), 112)
    assert torch.equal(image, torch.tensor([1, 2, 3], dtype=torch.uint8).expand(112, 112, 3))


def test_a_plate_fills_its_box_to_the_pixel() -> None:
    image = draw(Drawing((0, 0, 0), (Sprite(PLATE, 160, 320, 800, 480, (7, 8, 9)),)), 112)
    expected = torch.zeros(112, 112, 3, dtype=torch.uint8)
    expected[20:50, 10:60] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    assert torch.equal(image, expected)


def test_a_png_holds_the_drawn_pixels() -> None:
    drawing = fixed_drawing()
    data = to_png(drawing, 128)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), draw(drawing, 128).numpy())
    assert to_png(drawing, 128) == data


def test_every_shape_and_glyph_is_distinct_and_well_filled() -> None:
    cells = load_cells()
    assert (cells[PLATE] == 255).all()
    assert len({cells[cell].tobytes() for cell in (*DRAWN, PLATE)}) == len(DRAWN) + 1
    for cell in DRAWN:
        rows, columns = np.nonzero(cells[cell] > 127)
        assert max(np.ptp(rows), np.ptp(columns)) >= 19, cell
        assert len(rows) >= 50, cell


@pytest.mark.parametrize("font", range(FONTS))
def test_no_two_characters_of_a_font_look_alike(font: int) -> None:
    glyphs = load_cells()[[glyph_cell(font, char) for char in CHARACTERS]].astype(int)
    apart = np.abs(glyphs[:, None] - glyphs[None]).mean(axis=(2, 3)) + 255 * np.eye(len(CHARACTERS))
    assert apart.min() > 5


def test_no_two_shapes_look_alike() -> None:
    shapes = load_cells()[: len(SHAPES)].astype(int)
    apart = np.abs(shapes[:, None] - shapes[None]).mean(axis=(2, 3)) + 255 * np.eye(len(SHAPES))
    assert apart.min() > 20


def test_the_atlas_is_what_its_script_draws() -> None:
    if not all((atlas.FONT_ROOT / face.path).exists() for face in atlas.FACES):
        pytest.skip("needs the Debian packages " + ", ".join(sorted({face.package for face in atlas.FACES})))
    drawn = atlas.draw_atlas().reshape(-1, 24, COLUMNS, 24).swapaxes(1, 2).reshape(CELLS, 24, 24).astype(int)
    # Releases of Pillow and FreeType may round an edge differently.
    assert np.abs(drawn - load_cells()).mean(axis=(1, 2)).max() < 3


def test_a_missing_font_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atlas, "FONT_ROOT", tmp_path)
    with pytest.raises(OnPTQError, match=r"DejaVuSans\.ttf; .* package fonts-dejavu-core"):
        atlas.draw_atlas()


@pytest.mark.parametrize(
    ("sprite", "message"),
    [
        (Sprite(CELLS, 0, 0, 9, 9, (0, 0, 0)), f"sprite 1 has cell {CELLS}; expected -1 to {CELLS - 1}"),
        (Sprite(0, 40_000, 0, 9, 9, (0, 0, 0)), "has x 40000; expected -7168 to 7168"),
        (Sprite(0, 0, 0, 9, LARGEST + 1, (0, 0, 0)), "has h 545; expected 0 to 544"),
        (Sprite(0, 0, 0, 9, 9, (0, 256, 0)), "has green 256; expected 0 to 255"),
    ],
)
def test_a_sprite_out_of_bounds_is_refused(sprite: Sprite, message: str) -> None:
    with pytest.raises(OnPTQError, match=message):
        pack([Sprite(PLATE, 0, 0, LARGEST + 1, 9, (0, 0, 0)), sprite], 4)


def test_more_sprites_than_slots_are_refused() -> None:
    sprites = fixed_drawing().sprites
    packed = pack(sprites, len(sprites) + 2)
    assert packed.shape == (len(sprites) + 2, 8)
    assert packed.dtype == np.int16
    assert packed[:, 0].tolist() == [*(sprite.cell for sprite in sprites), -1, -1]
    assert pack(sprites, len(sprites)).tolist() == packed[:-2].tolist()
    with pytest.raises(OnPTQError, match=f"{len(sprites)} sprites do not fit into {len(sprites) - 1} slots"):
        pack(sprites, len(sprites) - 1)


def test_unknown_names_and_sides_are_refused_with_the_valid_ones() -> None:
    with pytest.raises(OnPTQError, match=r"unknown shape 'cat': expected one of circle, .*, plate"):
        shape_cell("cat")
    with pytest.raises(OnPTQError, match="no glyph for 'O': expected one of ABCDEFGH"):
        glyph_cell(0, "O")
    with pytest.raises(OnPTQError, match="unknown font 12: expected 0 to 11"):
        glyph_cell(FONTS, "A")
    with pytest.raises(OnPTQError, match=r"100 pixels a side; expected one of .*112, 128"):
        draw(fixed_drawing(), 100)
