"""The text of token ids, so that responses can be read where there is no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from onptq.files import read_json

SPACE = "▁"  # SentencePiece's
REPLACEMENT = "�"


class Tokenizer(Protocol):
    """The part of a tokenizer that says what its tokens are."""

    all_special_ids: Sequence[int]

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]: ...
    def decode(self, token_ids: list[int], **options: Any) -> str: ...


@dataclass(frozen=True)
class TokenTexts:
    """By id, the text of a token, or the bytes of one that is part of a character; and the ids that are no text."""

    texts: Mapping[int, str]
    parts: Mapping[int, bytes]
    special: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Iterable[int]) -> TokenTexts:
        texts, parts = {}, {}
        for token in sorted(set(ids)):
            one = _token(tokenizer, token)
            if isinstance(one, str):
                texts[token] = one
            else:
                parts[token] = one
        added = (token for token, one in tokenizer.added_tokens_decoder.items() if one.special)
        return cls(texts, parts, frozenset((*tokenizer.all_special_ids, *added)) & (texts.keys() | parts.keys()))

    @classmethod
    def read(cls, path: Path) -> TokenTexts:
        content = read_json(path)
        return cls(
            {int(token): text for token, text in content["texts"].items()},
            {int(token): bytes.fromhex(part) for token, part in content["bytes"].items()},
            frozenset(content["special"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of `tokens.json`."""
        parts = {token: part.hex() for token, part in self.parts.items()}
        return {"texts": dict(self.texts), "bytes": parts, "special": sorted(self.special)}

    @cached_property
    def ids(self) -> frozenset[int]:
        return frozenset(self.texts) | frozenset(self.parts)

    def __or__(self, other: TokenTexts) -> TokenTexts:
        return TokenTexts({**self.texts, **other.texts}, {**self.parts, **other.parts}, self.special | other.special)

    def shown(self, token: int) -> str:
        r"""The text of one token; \xe2 for a byte that is no character by itself, <12> where the token is not known."""
        if token in self.parts:
            return "".join(f"\\x{byte:02x}" for byte in self.parts[token])
        return self.texts.get(token, f"<{token}>")

    def text(self, ids: Iterable[int]) -> str:
        """What the tokens say together, without special ones."""
        pieces = [
            self.parts[token] if token in self.parts else _encoded(self.shown(token))
            for token in ids
            if token not in self.special
        ]
        return b"".join(pieces).decode("utf-8", errors="replace")


def ids_in(files: Mapping[Path, Sequence[str]]) -> set[int]:
    """The token ids in columns of parquet files; columns hold ids or lists of them."""
    ids: set[int] = set()
    for path, names in files.items():
        for column in pq.read_table(path, columns=list(names)).columns:
            flat = pc.list_flatten(column) if pa.types.is_list(column.type) else column
            ids.update(np.unique(flat.drop_null().to_numpy()).tolist())
    return ids


def _token(tokenizer: Tokenizer, token: int) -> str | bytes:
    piece = tokenizer.convert_ids_to_tokens([token])[0]
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if piece is None:
        return text
    if len(piece) == 6 and piece.startswith("<0x"):  # a byte of SentencePiece
        return _whole(bytes.fromhex(piece[3:5]))
    if piece.startswith(SPACE) and not text.startswith(" "):
        return " " + text
    if REPLACEMENT in text and all(character in BYTES for character in piece):
        return _whole(bytes(BYTES[character] for character in piece))
    return text


def _whole(part: bytes) -> str | bytes:
    try:
        return part.decode()
    except UnicodeDecodeError:
        return part


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")


def _byte_characters() -> dict[str, int]:
    """By character, the byte that byte-level vocabularies write as it: printable ones as they are, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_characters()
