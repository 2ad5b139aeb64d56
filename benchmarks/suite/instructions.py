"""Text instructions for models without eyes: every topic in every form. Splits are by topic, so nothing is shared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from onptq.data.prompts import Prompt

FORMS = (
    "Explain {} to a curious child.",
    "Write a short poem about {}.",
    "List three surprising facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write the opening paragraph of a story about {}.",
    "Give step-by-step advice to someone who is new to {}.",
    "Summarize the history of {} in a few sentences.",
    "Write a dialogue between two friends who disagree about {}.",
)
TOPICS = (
    "bread baking", "lighthouses", "volcanoes", "chess", "beekeeping", "solar power", "old maps", "jazz music",
    "tide pools", "bicycles", "desert plants", "night trains", "libraries", "origami", "earthquakes", "tea",
    "street markets", "telescopes", "rain forests", "sailing", "glass making", "public parks", "coral reefs", "clocks",
    "mountain climbing", "radio", "paper money", "winter", "robots", "marathon running", "vegetable gardens", "bridges",
    "migrating birds", "film photography", "castles", "board games", "rivers", "knitting", "space stations", "cheese",
)  # fmt: skip


def instructions(first_topic: int, last_topic: int) -> list[Prompt]:
    """Prompts about topics first_topic..last_topic-1, all forms of a topic spread evenly over the list."""
    pairs = [(form, topic) for form in range(len(FORMS)) for topic in range(first_topic, last_topic)]
    return [
        Prompt(
            ordinal, f"{topic}-{form}", [{"role": "user", "content": [{"type": "text", "text": _text(form, topic)}]}]
        )
        for ordinal, (form, topic) in enumerate(pairs)
    ]


def _text(form: int, topic: int) -> str:
    return FORMS[form].format(TOPICS[topic])


def main() -> None:
    """`python -m benchmarks.suite.instructions DIR`: manifests to calibrate on and to compare on, by different topics."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    half = len(TOPICS) // 2
    for name, topics in (("calibration", (0, half)), ("test", (half, len(TOPICS)))):
        lines = [json.dumps({"id": one.id, "messages": one.messages}) for one in instructions(*topics)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
