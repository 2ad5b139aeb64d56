"""From the files of the calibration material to the arguments of the model's forward.

Runs in the peers' environments: plain transformers, no OnPTQ. The image processor is the Pillow one, as in OnPTQ, so
that every quantizer gets the same pixels whether or not torchvision is installed.
"""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STAGE = ".partial"
COMPANIONS = ("tokenizer*.json", "vocab.json", "merges.txt", "*processor_config.json", "chat_template.*")


def read_samples(material: Path, model: Path) -> list[dict[str, Tensor]]:
    """One sample per prompt, followed by the dense model's response: input_ids, attention_mask, mm_token_type_ids,
    images."""
    from PIL import Image, ImageOps
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(model)
    images = Qwen2VLImageProcessorPil.from_pretrained(model)
    token = json.loads((model / "config.json").read_text(encoding="utf-8"))["image_token_id"]
    responses = {record["id"]: record["tokens"] for record in _lines(material / "responses.jsonl")}
    samples = []
    for record in _lines(material / "prompts.jsonl"):
        text = tokenizer.apply_chat_template(record["messages"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tensors: dict[str, Tensor] = {}
        if record["images"]:
            opened = [ImageOps.exif_transpose(Image.open(material / name)).convert("RGB") for name in record["images"]]
            processed = images(images=opened, return_tensors="pt")
            tensors = {name: processed[name] for name in ("pixel_values", "image_grid_thw")}
            sizes = [int(grid.prod()) // images.merge_size**2 for grid in processed["image_grid_thw"]]
            ids = _expanded(ids, token, sizes)
        ids = torch.tensor([ids + responses[record["id"]]])
        tensors |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        samples.append(tensors | {"mm_token_type_ids": (ids == token).long()})
    return samples


def read_model(folder: Path) -> Any:
    """The model in its stored dtype, as the peers' own examples load it."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", local_files_only=True).eval()


@contextmanager
def writing(out: Path, model: Path) -> Iterator[Path]:
    """A folder that becomes `out` when the checkpoint in it is complete; files that only the source has are added."""
    stage = out.with_name(out.name + STAGE)
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    yield stage
    if not (stage / "config.json").is_file():
        raise FileNotFoundError(f"{stage} has no config.json: nothing was saved there")
    for path in (path for pattern in COMPANIONS for path in model.glob(pattern)):
        if not (stage / path.name).exists():
            shutil.copyfile(path, stage / path.name)
    stage.rename(out)


def write_record(path: Path, began: float, packages: tuple[str, ...], settings: dict[str, Any]) -> None:
    """Write the settings and versions that made the checkpoint, its seconds and the process's peak memory."""
    record = {
        "seconds": round(time.monotonic() - began, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {name: version(name) for name in packages},
        "settings": settings,
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _expanded(ids: list[int], token: int, sizes: list[int]) -> list[int]:
    """The ids with each image's placeholder repeated for every token of the image."""
    if ids.count(token) != len(sizes):
        raise ValueError(f"{ids.count(token)} placeholders for {len(sizes)} images; expected one for each")
    left = iter(sizes)
    return [each for each in ids for _ in range(next(left) if each == token else 1)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
