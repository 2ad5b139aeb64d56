"""Mutations of bytes: what disks, networks and strangers make of a file."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

MOST = 4  # mutations of one file
WORD = re.compile(rb'"(?:[^"\\]|\\.){0,40}"|[\w.+-]{1,40}|[{}\[\]:,<%]')
WORDS = (  # that readers of text stumble over
    *(
        b"null",
        b"true",
        b"-1",
        b"0",
        b"1e999",
        b"NaN",
        b"-0.0",
        b"9" * 5000,
        b"18446744073709551616",
        b'""',
        b"{}",
        b"[]",
    ),
    *(
        b'"\\ud800"',
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\0",
        b"[" * 3000,
        b'{"a":' * 3000,
        b'"../../etc/passwd"',
        b'"/dev/zero"',
    ),
    *(
        b"*a",
        b"&a [*a]",
        b"!!python/name:os.system",
        b"{% for a in range(10**9) %}",
        b"{{ 'a' * 10**9 }}",
        b"\n",
        b"\x1b[2J",
    ),
    *(b'"<|im_end|>"', b"1.0", b'"F64"', b"~", b"- ", b'"text"', b'"image"', b"\xe2\x80\xae", b'"a" ' * 200),
)
NUMBERS = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
VALUES: tuple[Any, ...] = (  # that stand for another one in JSON
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**64,
        10**9,
        1e308,
        0.5,
        "",
        "a",
        "../../etc/passwd",
        "https://a.b/c",
        "F64",
        "\0",
    ),
    *("\ud800", "<|im_end|>", "a" * 70_000, [], {}, [[]], [0], [-1, -1], [None], ["a"], {"a": 1}, {"type": "image"}),
)
KINDS = ("flip", "set", "cut", "repeat", "insert", "end", "number", "word", "swap", "value")


class Mutation(NamedTuple):
    kind: str
    place: float  # of the file, in [0, 1)
    value: int


def mutated(data: bytes, mutations: Sequence[Mutation]) -> bytes:
    for mutation in mutations:
        data = _mutated(data, *mutation)
    return data


def drawn(rng: random.Random) -> list[Mutation]:
    return [
        Mutation(rng.choice(KINDS), rng.random() ** rng.choice((1, 1, 4)), rng.getrandbits(32))  # headers come first
        for _ in range(rng.choice((1, 1, 1, 2, 3, MOST)))
    ]


def _mutated(data: bytes, kind: str, place: float, value: int) -> bytes:
    at = int(place * len(data))
    size = 1 + value % 64
    rest = data[at + size :]
    match kind:
        case "flip" if data:
            return data[:at] + bytes([data[at] ^ (1 << value % 8)]) + data[at + 1 :]
        case "set" if data:
            return data[:at] + bytes([value % 256]) + data[at + 1 :]
        case "cut":
            return data[:at] + rest
        case "repeat":
            return data[:at] + data[at : at + size] * (2 + value % 7) + rest
        case "insert":
            return data[:at] + random.Random(value).randbytes(size) + data[at:]
        case "end":
            return data[:at]
        case "number":
            width, order = (1, 2, 4, 8)[value % 4], ("little", "big")[value // 4 % 2]
            number = NUMBERS[value // 8 % len(NUMBERS)] % 2 ** (8 * width)
            return data[:at] + number.to_bytes(width, order) + data[at + width :]  # type: ignore[arg-type]
        case "value":
            return _with_value(data, place, value)
        case "word" | "swap":
            return _with_word(data, place, value, other=kind == "swap")
    return data


def _with_word(data: bytes, place: float, value: int, other: bool) -> bytes:
    """A word of the text replaced by one that readers stumble over, or by another word of the text."""
    words = list(WORD.finditer(data))
    if not words:
        return data
    word = words[int(place * len(words))]
    new = words[value % len(words)][0] if other else WORDS[value % len(WORDS)]
    return data[: word.start()] + new + data[word.end() :]


def _with_value(data: bytes, place: float, value: int) -> bytes:
    """JSON, or one of its lines, with another value in one place; text that is none has another word."""
    lines = data.split(b"\n")
    at = 0 if data.startswith(b"{\n") else int(place * len(lines))
    try:
        content = json.loads(data if at == 0 and data.startswith(b"{\n") else lines[at])
        slots = list(_slots([content]))
    except (ValueError, RecursionError):
        return _with_word(data, place, value, other=False)
    holder, key = slots[value // len(VALUES) % len(slots)]
    holder[key] = VALUES[value % len(VALUES)]
    text = json.dumps(content).encode()
    return text if data.startswith(b"{\n") else b"\n".join((*lines[:at], text, *lines[at + 1 :]))


def _slots(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value inside lists and mappings."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            yield from _slots(value)
        yield node, key
