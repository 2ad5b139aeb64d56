"""Special tokens in the text of a prompt: a tokenizer makes control tokens of them, wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError

REFUSE, KEEP = "refuse", "keep"
_MARK = re.compile(r"[^\w\s].*[^\w\s]", re.DOTALL)


def marks_of(tokenizer: Any, except_for: Collection[int] = ()) -> re.Pattern[str] | None:
    """A pattern of the special tokens that look like marks, such as <|im_end|>, <s> or [INST]; None without any.

    A special token that is a word, a digit or white space is ordinary text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {one.content for id_, one in added.items() if one.special and id_ not in except_for}
    marks = sorted((one for one in special if _MARK.fullmatch(one)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks))) if marks else None


def require_text(prompt: Prompt, text: str, marks: re.Pattern[str] | None) -> None:
    """Refuse a special token in the text of a prompt."""
    found = None if marks is None else marks.search(text)
    if found is not None:
        raise OnPTQError(
            f"{prompt}: its text contains {found[0]}, a special token that the model would not read as text: expected text "
            "without it; --set data.special_tokens=keep takes it as servers do"
        )
