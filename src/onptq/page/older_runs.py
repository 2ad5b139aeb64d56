"""Texts and messages of runs of earlier versions, which hold token ids alone: read back by the checkpoint's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onptq.checkpoint.folder import CONFIG
from onptq.data.prompt_table import media_of
from onptq.data.prompts import Media, Prompt
from onptq.evaluate.details import Detail
from onptq.evaluate.token_texts import TokenTexts
from onptq.files import read_json
from onptq.page.stages import Answers, Stage
from onptq.registry import FAMILIES

MARK = "\ue000"  # a private character in the place of an image or clip, and the first letter of its kind behind it
KINDS = {"i": "image", "a": "audio"}
TURNS = (  # of chat templates: a mark, the role, what follows it, the text, a mark
    re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(?:<\|eot_id\|>|$)", re.DOTALL),
)
TURN_MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@dataclass(frozen=True)
class Reader:
    """The texts of the ids of a run, and by the text of a token that stands for it, `image` or `audio`."""

    texts: TokenTexts
    placeholders: Mapping[str, str]

    @classmethod
    def of(
        cls, family: str, checkpoint: Path, rows: Sequence[Mapping[str, Any]], stages: Sequence[Stage], dense: Answers
    ) -> Reader:
        """Without texts where the checkpoint is gone."""
        if not (checkpoint / "tokenizer_config.json").is_file():
            return cls(TokenTexts({}, {}), {})
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        texts = TokenTexts.of(tokenizer, _ids(rows, stages, dense))
        return cls(texts, _placeholders(family, checkpoint, texts))

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        media = media_of(row, "images"), media_of(row, "audios")
        return prompt_from(row["input_ids"], row["id"], row["ordinal"], media, self.texts, self.placeholders)


def _ids(rows: Sequence[Mapping[str, Any]], stages: Sequence[Stage], dense: Answers) -> set[int]:
    ids = {token for row in rows for token in row["input_ids"]}
    ids.update(token for one in dense.values() for token in one.tokens)
    for stage in stages:
        ids.update(token for one in stage.details.values() for token in _ids_of_detail(one))
        ids.update(token for one in stage.visit.trajectories.values() for token in one.tokens)
        for column in (stage.visit.states.reference, stage.visit.states.competitor, stage.visit.states.quantized):
            ids.update(np.unique(column).tolist())
    return ids


def _ids_of_detail(detail: Detail) -> Iterator[int]:
    yield from (token for token, _ in (*detail.dense, *detail.quantized))
    if detail.future is not None:
        yield from (*detail.future.reference, *detail.future.competitor)


def _placeholders(family: str, checkpoint: Path, texts: TokenTexts) -> dict[str, str]:
    if family not in FAMILIES:
        config = read_json(checkpoint / CONFIG) if (checkpoint / CONFIG).is_file() else {}
        ids = {kind: config.get(f"{kind}_token_id", config.get(f"{kind}_token_index")) for kind in ("image", "audio")}
        return {texts.shown(token): kind for kind, token in ids.items() if isinstance(token, int)}
    known = FAMILIES[family]
    both = ((known.image, "image"), (known.audio, "audio"))
    return {one.token: kind for one, kind in both if one is not None}


def prompt_from(
    ids: Sequence[int],
    identity: str,
    ordinal: int,
    media: tuple[tuple[Media, ...], tuple[Media, ...]],
    texts: TokenTexts,
    placeholders: Mapping[str, str],
) -> Prompt:
    """The prompt of these tokens. `placeholders`: by the text of the token that stands for it, `image` or `audio`."""
    text = "".join(_pieces(ids, texts, placeholders))
    turns_there = next((turns for pattern in TURNS if (turns := pattern.findall(text))), [("prompt", text)])
    messages = [{"role": role, "content": list(_parts(body))} for role, body in turns_there if body]
    return Prompt(ordinal, identity, messages, *media)


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
