"""The tokenizer of the embedded models: words of the lessons, with signs spelled character by character."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

from onptq.zoo.tokens import TokenSet, train_bpe
from tools.zoo.lessons import sample_texts

# As in `onptq.zoo.tokens`, but a capital before another capital or a digit stands alone, and so does every digit: the
# text of a sign is spelled character by character, while "The" stays a word.
SPELLING_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{Lu}(?=[\p{Lu}\p{N}])|(?<=[\p{Lu}\p{N}])\p{Lu}|[^\r\n\p{L}\p{N}]?\p{Lu}?\p{Ll}+"
    r"|[^\r\n\p{L}\p{N}]?\p{L}|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# SPELLING_PATTERN for ASCII text, in the syntax of the standard library.
_WORD = re.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?[A-Z](?=[A-Z0-9])|(?<=[A-Z0-9])[A-Z]|[^\r\nA-Za-z0-9]?[A-Z]?[a-z]+"
    r"|[^\r\nA-Za-z0-9]?[A-Za-z]|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    re.ASCII,
)

# The part of the chat templates that adds a system message.
SYSTEM = """\
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
"""


def train_tokenizer(size: int, seed: int = 0, lessons: int = 4000) -> Any:
    """A `tokenizers.Tokenizer` of the lessons' words without special tokens, the same for the same arguments."""
    roles = ["user\nassistant\n"] * lessons
    return train_bpe(size, [*sample_texts(Random(f"tokenizer/{seed}"), lessons), *roles], SPELLING_PATTERN)


class Speller:
    """Encodes text. Words are cut as the tokenizer cuts them, so that each is encoded only once."""

    def __init__(self, words: Any) -> None:
        self._tokenizer = words
        self._ids: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        if not text.isascii():
            return self._encode(text)
        ids: list[int] = []
        for word in _WORD.findall(text):
            word_ids = self._ids.get(word)
            if word_ids is None:
                word_ids = self._ids[word] = self._encode(word)
            ids += word_ids
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def without_system(tokens: TokenSet) -> TokenSet:
    """The same tokens with a chat template that adds no system message of its own."""
    return replace(tokens, template=tokens.template.replace(SYSTEM, ""))
