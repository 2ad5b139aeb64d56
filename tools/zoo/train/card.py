"""README.md of an embedded model: the model, its training and its scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onptq.evaluate.scores import TaskScore

SCORES = "## Test split"
TITLES = {"qwen2.5-vl": "Qwen2.5-VL", "qwen3-vl": "Qwen3-VL", "qwen2.5-omni": "Qwen2.5-Omni"}
MEASURES = {
    "accuracy": "right answers",
    "facts": "right facts",
    "word errors": "word error rate, less is better",
}


def write_card(
    folder: Path,
    family: str,
    settings: Mapping[str, Any],
    steps: int,
    seconds: float,
    device: str,
    parameters: int,
) -> Path:
    """The card without scores; `add_scores` adds them."""
    audio = family == "qwen2.5-omni"
    tags = ["onptq", "synthetic", family]
    lines = [
        "---",
        "license: apache-2.0",
        "language: en",
        "library_name: transformers",
        f"pipeline_tag: {'any-to-any' if audio else 'image-text-to-text'}",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
        "",
        f"# A small {TITLES[family]} that comes with OnPTQ",
        "",
        f"A model of the {TITLES[family]} architecture with {parameters / 1e6:.1f} million parameters, trained from scratch on",
        "procedural lessons. It exists to show what quantization does to a model that really sees"
        + (", reads and hears" if audio else " and reads")
        + "; it knows",
        "nothing of the world beyond them. Weights are not derived from any published model.",
        "",
        "## Training",
        "",
        f"- Data: `tools/zoo/lessons.py`, train split, made on the fly: {_lessons(audio)}.",
        f"- {steps:,} steps of {settings['batch']} lessons, {seconds / 60:.1f} minutes on one {device}.",
        f"- AdamW, learning rate {settings['lr']:g} falling linearly to 0{_ending(settings)}, weight decay "
        f"{settings['decay']:g}, seed {settings['seed']}, bfloat16 products.",
        f"- Again: `python -m tools.zoo.train --family {family} --out DIR{_options(settings, audio)}`.",
    ]
    path = folder / "README.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def _lessons(audio: bool) -> str:
    drawn = "drawn scenes with captions, questions with four options, short answers and signs to read; word definitions"
    return f"{drawn}; synthetic speech to write down, and spoken questions about a scene" if audio else drawn


def _ending(settings: Mapping[str, Any]) -> str:
    if not settings.get("enough"):
        return ""
    learned = " and ".join(f"{kind} is at most {loss:g}" for kind, loss in settings["enough"].items())
    return f" (within {settings['settle']} steps once the loss of {learned})"


def _options(settings: Mapping[str, Any], audio: bool) -> str:
    names = ("minutes", "steps", "batch", "lr", "seed", *(("spoken_share",) if audio else ()))
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    return "".join(f" --{name.replace('_', '-')} {value}" for name, value in given.items())


def add_scores(folder: Path, scores: Mapping[str, TaskScore]) -> Path:
    """Scores on the test split by task, with the number of items, in place of any that the card has."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8").split(SCORES)[0].rstrip()
    rows = [
        f"| {task} | {MEASURES[score.measure]} | {score.percent:.1f}% | {score.items:,} |"
        for task, score in scores.items()
        if score.percent is not None
    ]
    lines = [text, "", SCORES, "", "| task | measure | score | items |", "| --- | --- | --- | --- |", *rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
