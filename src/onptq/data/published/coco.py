"""The paper's 128 image-caption pairs of COCO: questions of ShareGPT4V's captions about images of COCO."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from onptq.data.chat import kind_of
from onptq.data.manifest import Reader
from onptq.data.media import read_file
from onptq.data.prompts import Prompt
from onptq.data.published.copies import local_copy, require_all
from onptq.errors import OnPTQError

CAPTIONS = "sharegpt4v_instruct_gpt4-vision_cap100k.json"
FOLDERS = ("coco/train2017", "train2017", "")  # where an image may lie below the folder of images
EXPECTED = f"expected ShareGPT4V's {CAPTIONS}, a list of records with `image` and `conversations`"


@dataclass(frozen=True)
class Coco128:
    """The ids of the paper's calibration set, in order."""

    ids: tuple[str, ...]
    records: int  # captions of COCO images that they were drawn from

    @classmethod
    def published(cls) -> Coco128:
        text = resources.files("onptq.data.published").joinpath("coco-128.yaml").read_text(encoding="utf-8")
        data = yaml.safe_load(text)
        return cls(tuple(data["ids"]), data["records"])


def coco_prompts(captions: str, images: str, note: Callable[[str], None] = lambda text: None) -> list[Prompt]:
    """The 128 prompts in the paper's order. `captions` and `images` are paths or `hub:OWNER/NAME`."""
    known = Coco128.published()
    file = local_copy(captions, [CAPTIONS])
    file = file / CAPTIONS if file.is_dir() else file
    records = _read_captions(file)
    if len(records) != known.records:
        note(f"{file} has captions of {len(records):,} COCO images; the paper drew from {known.records:,}")
    missing = [name for name in known.ids if name not in records]
    require_all(missing, len(known.ids), f"COCO images have no caption in {file}")
    folder = local_copy(images, [f"*{name}.jpg" for name in known.ids])
    paths = {name: _find(folder, name) for name in known.ids}
    lacking = [name for name, path in paths.items() if path is None]
    require_all(
        lacking, len(known.ids), f"images are not in {folder}, as ID.jpg, train2017/ID.jpg or coco/train2017/ID.jpg"
    )
    reader = Reader(file, frozenset({"text", "image"}), roots=(folder,))
    prompts = []
    for ordinal, name in enumerate(known.ids):
        record = {"id": name, "image": str(paths[name]), "conversations": records[name].get("conversations")}
        try:
            prompts.append(reader.read(record, ordinal, f"image {name}"))
        except OnPTQError as error:
            raise OnPTQError(f"{file}, image {name}: {error}") from None
    return prompts


def _read_captions(file: Path) -> dict[str, Mapping[str, Any]]:
    """The first record of each COCO image, by the image's id."""
    try:
        content = json.loads(read_file(file).decode("utf-8-sig"))
    except OSError as error:
        raise OnPTQError(f"cannot read {file}: {error.strerror or error}; {EXPECTED}") from None
    except (ValueError, RecursionError) as error:
        raise OnPTQError(f"{file} is not usable JSON ({str(error)[:80]}); {EXPECTED}") from None
    if not isinstance(content, list):
        raise OnPTQError(f"{file} holds {kind_of(content)}; {EXPECTED}")
    records: dict[str, Mapping[str, Any]] = {}
    for record in content:
        image = record.get("image") if isinstance(record, dict) else None
        if isinstance(image, str) and image.startswith("coco/"):
            records.setdefault(PurePosixPath(image).stem, record)
    return records


def _find(folder: Path, name: str) -> Path | None:
    places = (folder / below / f"{name}.jpg" for below in FOLDERS)
    return next((place.absolute() for place in places if place.is_file()), None)
