"""Previews of the user's files: small, within a budget, and kept as the level of detail says."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from onptq.data.prompts import Media, Prompt
from onptq.evaluate.previews import PREVIEWS, SIDE, Preview, keep_previews, preview, read_previews, thumbnail
from onptq.run import Run


def prompts_with_images(folder: Path, count: int) -> list[Prompt]:
    """Prompts of which the last one has its image within the manifest."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        file = folder / f"{number}.png"
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(file)
        media = Media(file, f"hash {number}")
        if number == count - 1:
            media = Media(None, media.sha256, file.read_bytes())
        made.append(Prompt(number, f"p{number}", [], images=(media,)))
    return made


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.open(tmp_path / "out", {})


def test_a_photograph_becomes_a_small_jpeg_and_a_drawing_a_png() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, 2 * SIDE, 3), np.uint8)
    found = {}
    for name, image in (("photo", Image.fromarray(noise)), ("drawing", Image.new("RGB", (600, 300), "red"))):
        buffer = io.BytesIO()
        image.save(buffer, "png")
        found[name] = thumbnail(buffer.getvalue())
    assert (found["photo"].media_type, found["photo"].note) == ("image/jpeg", "1024 x 512 pixels")
    assert found["drawing"].media_type == "image/png"
    small = Image.open(io.BytesIO(found["photo"].data or b""))
    assert small.size == (SIDE, SIDE // 2)


def test_what_cannot_be_read_has_a_reason(tmp_path: Path) -> None:
    assert preview("image", Media(tmp_path / "gone.png", "")) == Preview(
        note="cannot be shown: No such file or directory"
    )


def test_files_are_kept_in_order_within_the_budget_and_embedded_ones_not_again(run: Run, tmp_path: Path) -> None:
    prompts = prompts_with_images(tmp_path / "images", 4)
    sizes = [len(preview("image", one.images[0]).data or b"") for one in prompts]
    keep_previews(run, prompts, "light", budget=sizes[0] + sizes[1] + 10)
    kept = read_previews(run.file(PREVIEWS))
    assert kept is not None
    assert list(kept) == [("image", "hash 0"), ("image", "hash 1")]
    assert kept["image", "hash 1"] == preview("image", prompts[1].images[0])


def test_a_later_level_adds_what_off_left_out_and_nothing_is_lost(run: Run, tmp_path: Path) -> None:
    prompts = prompts_with_images(tmp_path / "images", 3)
    keep_previews(run, prompts, "off")
    assert read_previews(run.file(PREVIEWS)) == {}
    keep_previews(run, prompts, "light")
    written = run.file(PREVIEWS).stat().st_mtime_ns
    assert len(read_previews(run.file(PREVIEWS)) or ()) == 2
    for level in ("light", "full", "off"):
        keep_previews(run, prompts, level)
    assert run.file(PREVIEWS).stat().st_mtime_ns == written


def test_prompts_of_text_and_earlier_runs_have_no_such_file(run: Run) -> None:
    keep_previews(run, [Prompt(0, "p", [])], "light")
    assert read_previews(run.file(PREVIEWS)) is None
