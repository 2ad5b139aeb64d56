"""Text instructions for models without images: every topic in every form. No two splits share a topic."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from onptq.data.prompts import Prompt
from onptq.zoo import instructions as instruction_texts

FORMS, TOPICS = instruction_texts.FORMS[:8], instruction_texts.TOPICS[:40]  # those of the published figures


def instructions(first_topic: int, last_topic: int) -> list[Prompt]:
    """Prompts about topics `first_topic` to `last_topic` - 1: one form of all topics, then the next form."""
    pairs = [(form, topic) for form in range(len(FORMS)) for topic in range(first_topic, last_topic)]
    return [
        Prompt(
            ordinal, f"{topic}-{form}", [{"role": "user", "content": [{"type": "text", "text": _text(form, topic)}]}]
        )
        for ordinal, (form, topic) in enumerate(pairs)
    ]


def _text(form: int, topic: int) -> str:
    return FORMS[form].format(TOPICS[topic])


def main(argv: Sequence[str] = ()) -> None:
    """`python -m benchmarks.suite.instructions DIR`: manifests to calibrate on and to compare on, by different
    topics."""
    [folder] = map(Path, argv or sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    half = len(TOPICS) // 2
    for name, topics in (("calibration", (0, half)), ("test", (half, len(TOPICS)))):
        lines = [json.dumps({"id": one.id, "messages": one.messages}) for one in instructions(*topics)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
