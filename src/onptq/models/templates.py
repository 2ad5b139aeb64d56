"""Chat templates: programs of the checkpoint's author, run for a limited time, whose errors say no more than text."""

from __future__ import annotations

import json
import mmap
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError, printable

DATE = "26 Jul 2024"  # Llama's default; newer templates of theirs write today's, and a run would differ tomorrow
LEGACY = "chat_template.json"  # of older processors; newer ones, too, prefer it to chat_template.jinja
SECONDS = 10.0  # that a template may take; a usual one takes a thousandth
BYTES = 2**30  # that a template may add to the process before it is stopped
LOOK_SECONDS = 0.05  # how often time and memory are looked at
LONGEST = 2**22  # characters of a prompt, more than the longest contexts take


def read_template(folder: Path, tokenizer: Any) -> str | None:
    """The chat template of a checkpoint; None where it has none."""
    template = tokenizer.chat_template
    legacy = folder / LEGACY
    if legacy.is_file():
        template = _read_legacy(legacy)
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


def render(tokenizer: Any, template: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text that a model is given for these messages. An OnPTQError says why a template gave none."""
    options = {"tokenize": False, "add_generation_prompt": True, "date_string": DATE}
    try:
        with _limited(SECONDS):
            text: str = tokenizer.apply_chat_template(messages, chat_template=template, **options)
    except Exception as error:  # a template may raise anything, with any text
        why = printable(str(error), also="\n")
        raise OnPTQError(f"the chat template refuses its messages: {why}") from error
    return text


def check_text_length(text: str) -> None:
    """Refuse a text that only takes time and memory to cut into tokens: no model has a context for it."""
    if len(text) > LONGEST:
        raise OnPTQError(f"its text has {len(text):,} characters; expected at most {LONGEST:,}")


def _read_legacy(path: Path) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OnPTQError(f"{path} is not readable JSON: {error}") from error
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str | dict):
        raise OnPTQError(f"{path} must be a JSON object with the text `chat_template`")
    return template


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise in a block that takes longer, or much memory. A signal looks, which only the main thread gets and nobody else
    may use."""
    if threading.current_thread() is not threading.main_thread() or any(signal.getitimer(signal.ITIMER_REAL)):
        yield
        return
    began, held = time.monotonic(), _held()

    def look(number: int, frame: object) -> None:
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"it takes more than {seconds:g} s")
        if _held() - held > BYTES:
            raise MemoryError(f"it takes more than {BYTES / 2**30:g} GiB of memory")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _held() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE if statm.is_file() else 0
