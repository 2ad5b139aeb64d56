"""Written instructions for text models: disjoint splits, the same everywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from onptq.errors import OnPTQError
from onptq.zoo.instructions import FORMS, SHARES, TOPICS, instructions

COUNTS = {split: (end - first) * len(TOPICS) // 50 * len(FORMS) for split, (first, end) in SHARES.items()}


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    return messages[-1]["content"][0]["text"]


@pytest.mark.parametrize(
    ("split", "digest"),
    [("calibration", "3c4351ac1548ccde"), ("held-out", "35098a16deb47602"), ("test", "a64f677c9aeb4def")],
)
def test_instructions_are_the_same_everywhere(split: str, digest: str) -> None:
    texts = json.dumps([[prompt.id, prompt.messages] for prompt in instructions(split, 24)])
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == digest


def test_no_topic_is_in_two_splits_and_no_text_is_drawn_twice() -> None:
    topic_of = {form.format(topic): topic for topic in TOPICS for form in FORMS}
    topics = []
    for split, count in COUNTS.items():
        texts = [text_of(prompt.messages) for prompt in instructions(split, count)]
        assert len(set(texts)) == count
        topics.append({topic_of[text] for text in texts})
    assert sum(map(len, topics)) == len(set.union(*topics)) == len(TOPICS)


def test_a_shorter_list_is_the_beginning_of_a_longer_one() -> None:
    assert instructions("test", 5) == instructions("test", 30)[:5]
    assert [prompt.ordinal for prompt in instructions("test", 5)] == list(range(5))


def test_about_half_begin_with_a_system_message() -> None:
    roles = [prompt.messages[0]["role"] for prompt in instructions("calibration", 200)]
    assert 70 < roles.count("system") < 130


def test_too_many_and_other_splits_are_refused() -> None:
    most = COUNTS["held-out"]
    with pytest.raises(OnPTQError, match=f"expected at most {most}"):
        instructions("held-out", most + 1)
    with pytest.raises(OnPTQError, match="expected one of calibration, held-out, test"):
        instructions("train", 1)
