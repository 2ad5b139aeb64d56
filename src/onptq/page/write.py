"""The page as one file: its data, compressed, in a document that shows them."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError
from onptq.files import atomically
from onptq.page.contract import Page
from onptq.page.fit import fitted

ASSET = "page.html"  # in this package
DATA, TITLE = "@@PAGE-DATA@@", "@@PAGE-TITLE@@"
LIMIT = 9_900_000  # bytes of a page: under 10 MB
DIGITS = 5  # significant ones of a number


def write_page(page: Page, path: Path) -> int:
    """Write the page and return its size in bytes, which details and media are fitted to; the same data give the same bytes."""
    empty = asset()
    document = fill(empty, page, fitted(page, LIMIT - len(empty.encode()), packed)).encode()
    with atomically(path) as temporary:
        temporary.write_bytes(document)
    return len(document)


def fill(document: str, page: Page, data: str | None = None) -> str:
    """The document with the page's title and its data, packed: nothing in them can be read as HTML."""
    for marker in (DATA, TITLE):
        if marker not in document:
            raise OnPTQError(f"the document of the page has no {marker}; expected it where that belongs")
    data = packed(page) if data is None else data
    before, _, after = document.partition(DATA)
    title = html.escape(page.title.encode("utf-8", errors="replace").decode())
    return before.replace(TITLE, title) + data + after.replace(TITLE, title)


def asset() -> str:
    file = resources.files("onptq.page").joinpath(ASSET)
    if not file.is_file():
        raise OnPTQError(
            f"this onptq has no {ASSET}, which is built before it is packaged: see page/README.md, or install a release"
        )
    return file.read_text(encoding="utf-8")


def packed(page: Page) -> str:
    """The data of the page, as base64 of gzip of JSON."""
    return base64.b64encode(gzip.compress(to_bytes(page), compresslevel=6, mtime=0)).decode()


def to_bytes(page: Page) -> bytes:
    """The page as JSON, with numbers of 5 digits. A lone surrogate, which no file can hold, becomes a question mark."""
    text = json.dumps(plain(page), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="replace")


def plain(value: Any) -> Any:
    """The value as JSON has it; None for what is not finite."""
    if isinstance(value, float):
        return shortened(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    return plain(value.tolist())  # of numpy


def shortened(value: float) -> float | int | None:
    """The number with 5 significant digits, without a point where it needs none."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
