"""Questions about every image below a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from onptq.data.chat import check_text
from onptq.data.collected import UNUSABLE, Collected, LeftOut, collect
from onptq.data.expand import image_prompt
from onptq.data.manifest import check_media
from onptq.data.media import FORMATS, read_file
from onptq.data.prompts import Media, Prompt
from onptq.data.questions import QUESTIONS, pair_with_questions
from onptq.errors import OnPTQError
from onptq.progress import QuietReporter, Reporter

LINKED = "links that lead out of the folder: not followed"
OTHER = "files that are no images"
COPIED = "the same image is there already"


def image_prompts(
    folder: Path,
    questions: Sequence[str] = QUESTIONS,
    per_image: int = 1,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> Collected:
    """`per_image` questions, drawn by the seed, about every image below the folder. No image is taken twice."""
    if not 1 <= per_image <= len(questions):
        raise OnPTQError(f"--per-image {per_image}: expected 1 to {len(questions)}, the number of questions")
    if not folder.is_dir():
        raise OnPTQError(
            f"{folder} is {'not a folder' if folder.exists() else 'not there'}: expected a folder of images"
        )
    images: dict[str, Media] = {}
    left_out: list[LeftOut] = []
    count = 0
    with (reporter or QuietReporter()).phase("Read images", unit="files") as bar:
        for entry in _files(folder):
            bar.advance()
            image = entry if isinstance(entry, LeftOut) else _read(entry)
            count += isinstance(image, Media) or image.reason == UNUSABLE
            if isinstance(image, LeftOut):
                left_out.append(image)
            elif image.sha256 in images:
                left_out.append(LeftOut(COPIED, str(image.path)))
            else:
                images[image.sha256] = image
    prompts = _ask(folder, list(images.values()), questions, per_image, seed)
    nothing = f"{folder} has no usable images: expected {', '.join(FORMATS)}, in it or in folders below"
    return collect(f"{count} images below {folder}", [*left_out, *prompts], nothing)


def _ask(folder: Path, images: list[Media], questions: Sequence[str], per_image: int, seed: int) -> Iterator[Prompt]:
    chosen: list[list[str]] = [[] for _ in images]
    for place, question in pair_with_questions(len(images), questions, seed):
        if len(chosen[place]) == per_image:
            break
        chosen[place].append(question)
    root = folder.absolute()
    for image, mine in zip(images, chosen, strict=True):
        assert image.path is not None
        name = image.path.relative_to(root).as_posix()
        yield from (image_prompt(0, name, image, question, name) for question in mine)


def _files(folder: Path) -> Iterator[Path | LeftOut]:
    """Every regular file below the folder, in order. Links inside the folder lead to files that come anyway."""
    root = os.path.realpath(folder)
    closed: list[LeftOut] = []

    def note(error: OSError) -> None:
        closed.append(LeftOut(UNUSABLE, str(error.filename), f"cannot be read: {error.strerror}"))

    for parent, folders, names in os.walk(folder, onerror=note):
        folders.sort()
        for path in (Path(parent, name) for name in sorted(folders + names)):
            if path.is_symlink():
                if not Path(os.path.realpath(path)).is_relative_to(root):
                    yield LeftOut(LINKED, str(path))
            elif path.is_file():
                yield path
            elif not path.is_dir():
                yield LeftOut(OTHER, str(path))
    yield from closed


def _read(path: Path) -> Media | LeftOut:
    if not _claims_to_be_an_image(path):
        return LeftOut(OTHER, str(path))
    try:
        check_text(str(path), "the file's name")
        data = read_file(path)
        return check_media("image", repr(path.name), data, Media(path.absolute(), hashlib.sha256(data).hexdigest()))
    except OSError as error:
        return LeftOut(UNUSABLE, str(path), f"cannot be read: {error.strerror or error}")
    except OnPTQError as error:
        return LeftOut(UNUSABLE, str(path), str(error))


def _claims_to_be_an_image(path: Path) -> bool:
    """Whether the file's name or its first bytes say that it is one."""
    from PIL import Image

    if Image.registered_extensions().get(path.suffix.lower()) in FORMATS:
        return True
    try:
        with Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN]):
            return True
    except Exception:
        return False
