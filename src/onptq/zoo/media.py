"""Prompts with drawn images and synthesized audio clips, the same for the same seed."""

from __future__ import annotations

import json
import wave
from collections.abc import Set
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

COLORS = ("red", "green", "blue", "orange", "purple", "teal", "black", "yellow")
RATE = 16_000  # Hz, what the audio towers take

QUESTIONS = (
    "How many shapes are there, and which is the largest?",
    "Explain in one short sentence why the sky is blue.",
    "Describe what stands in the middle.",
    "List three facts and a possible title.",
    "Compare both answers and give reasons.",
    "Tell me a story about an old sailor and his maps.",
)


def write_prompts(folder: Path, modalities: Set[str], count: int, image_size: int, seed: int) -> None:
    """Write prompts.jsonl, and under media/ the images and audio clips that its lines name."""
    lines = []
    for index in range(count):
        random = Random(f"{seed}/{index}")
        images = _draw_images(folder, index, image_size, random) if _has_image(index, modalities) else []
        audios = [_write_sweep(folder, index, random)] if _has_audio(index, modalities) else []
        lines.append(_prompt(index, images, audios, random))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _has_image(index: int, modalities: Set[str]) -> bool:
    """Whether a prompt has an image. Families with audio get images in two of three prompts; every eighth is text alone."""
    return "image" in modalities and index % 8 != 7 and ("audio" not in modalities or index % 3 != 1)


def _has_audio(index: int, modalities: Set[str]) -> bool:
    return "audio" in modalities and index % 8 != 7 and index % 3 != 0


def _prompt(index: int, images: list[str], audios: list[str], random: Random) -> dict[str, Any]:
    text = " ".join((*random.sample(QUESTIONS, 1 + index % 3), f"Use at most {index + 5} words."))
    return {"id": f"p{index:03d}", "text": text} | _if_any("images", images) | _if_any("audios", audios)


def _if_any(key: str, paths: list[str]) -> dict[str, list[str]]:
    return {key: paths} if paths else {}


def _draw_images(folder: Path, index: int, size: int, random: Random) -> list[str]:
    from PIL import Image, ImageDraw

    (folder / "media").mkdir(exist_ok=True)
    paths = []
    for number in range(2 if index % 5 == 4 else 1):
        width, height = (max(8, int(size * random.uniform(0.6, 1.6))) for _ in range(2))
        image = Image.new("RGB", (width, height), random.choice(COLORS))
        pencil = ImageDraw.Draw(image)
        for _ in range(random.randint(2, 6)):
            corners = sorted(random.sample(range(width), 2)), sorted(random.sample(range(height), 2))
            box = (corners[0][0], corners[1][0], corners[0][1], corners[1][1])
            draw = random.choice((pencil.rectangle, pencil.ellipse))
            draw(box, fill=random.choice(COLORS))
        path = f"media/p{index:03d}-{number}.png"
        image.save(folder / path)
        paths.append(path)
    return paths


def _write_sweep(folder: Path, index: int, random: Random) -> str:
    (folder / "media").mkdir(exist_ok=True)
    time = np.arange(int(RATE * random.uniform(0.3, 1.2))) / RATE
    low, high = random.uniform(100, 400), random.uniform(400, 2000)
    sweep = np.sin(2 * np.pi * (low + (high - low) * time / 2) * time) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * time))
    path = f"media/p{index:03d}.wav"
    with wave.open(str(folder / path), "wb") as file:
        file.setparams((1, 2, RATE, len(time), "NONE", "not compressed"))
        file.writeframes((sweep * 20_000).astype("<i2").tobytes())
    return path
