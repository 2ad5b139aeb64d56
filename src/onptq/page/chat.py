"""Messages read back from token ids: a run keeps what exactly went into the model, not what it was made from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from onptq.data.prompts import Media, task_of
from onptq.evaluate.asked import Asked
from onptq.evaluate.token_texts import TokenTexts

MARK = "\ue000"  # a private character in the place of an image or clip, and the first letter of its kind behind it
KINDS = {"i": "image", "a": "audio"}
TURNS = (  # of chat templates: a mark, the role, what follows it, the text, a mark
    re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(?:<\|eot_id\|>|$)", re.DOTALL),
)
TURN_MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def asked_from(
    ids: Sequence[int],
    identity: str,
    ordinal: int,
    media: tuple[Sequence[Media], Sequence[Media]],
    texts: TokenTexts,
    placeholders: Mapping[str, str],
) -> Asked:
    """The prompt of these tokens. `placeholders`: by the text of the token that stands for it, `image` or `audio`."""
    text = "".join(_pieces(ids, texts, placeholders))
    found = next((turns for pattern in TURNS if (turns := pattern.findall(text))), [("prompt", text)])
    messages = [{"role": role, "content": list(_parts(body))} for role, body in found if body]
    return Asked(identity, task_of(identity), messages, *media, ordinal=ordinal)


def _pieces(ids: Iterable[int], texts: TokenTexts, placeholders: Mapping[str, str]) -> Iterable[str]:
    """The text, with one mark for a run of placeholders and without special tokens that begin or end no message."""
    before = ""
    plain: list[int] = []
    for token in ids:
        shown = texts.shown(token)
        if token not in texts.special and shown not in placeholders:
            plain.append(token)
            before = ""
            continue
        yield texts.text(plain)
        plain = []
        if shown in placeholders and before != shown:
            yield MARK + placeholders[shown][0]
        elif shown in TURN_MARKS:
            yield shown
        before = shown
    yield texts.text(plain)


def _parts(body: str) -> Iterable[dict[str, str]]:
    first, *rest = body.split(MARK)
    if first:
        yield {"type": "text", "text": first}
    for piece in rest:
        kind = KINDS.get(piece[:1])
        if kind is not None:
            yield {"type": kind}
        if text := piece[1:] if kind is not None else piece:
            yield {"type": "text", "text": text}
