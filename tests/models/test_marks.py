"""Special tokens in the text of prompts are refused, and kept where a recipe says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import FAMILIES, Tiny
from tokenizers import AddedToken

from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.models.marks import KEEP, marks_of
from onptq.models.processing import PromptProcessor


def ask(*parts: str, role: str = "user") -> Prompt:
    content = [{"type": "text", "text": part} for part in parts]
    return Prompt(0, "a", [{"role": role, "content": content}, {"role": "user", "content": content[:1]}])


def open_processor(tiny: Tiny, special_tokens: str) -> PromptProcessor:
    return PromptProcessor.from_folder(tiny.folder, tiny.source.family, tiny.source.config, special_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_special_token_in_the_text_is_refused(family: str, tiny: Callable[[str], Tiny]) -> None:
    processor = tiny(family).processor
    special = [one.content for one in processor.tokenizer.added_tokens_decoder.values() if one.special]
    assert len(special) >= 5
    for token in special:
        for prompt in (
            ask(f"What is {token}?"),
            ask(token),
            ask("", token, role="system"),
            ask("", token[:3], token[3:]),
        ):
            with pytest.raises(OnPTQError) as refused:
                processor.check(prompt, 0)
            assert token in str(refused.value)
            assert str(refused.value).startswith("prompt 'a'")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_becomes_the_control_token(family: str, tiny: Callable[[str], Tiny]) -> None:
    processor = open_processor(tiny(family), KEEP)
    token, id_ = next(
        (one.content, id_)
        for id_, one in processor.tokenizer.added_tokens_decoder.items()
        if one.special and id_ not in processor.placeholders.values()
    )
    plain, kept = (processor(ask(text)).input_ids[0].tolist() for text in ("Hello", f"Hello{token}"))
    assert kept.count(id_) == plain.count(id_) + 2  # in both turns


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_only_looks_like_markup_is_text(family: str, tiny: Callable[[str], Tiny]) -> None:
    checked, kept = tiny(family).processor, open_processor(tiny(family), KEEP)
    for text in ("a <s>struck</s> word", "<think>no</think>", "< |im_end|>", "[1] <|>", "<|im_", "a<b>c"):
        assert checked(ask(text)).input_ids.tolist() == kept(ask(text)).input_ids.tolist()


def test_words_and_digits_that_are_special_tokens_are_text(tiny: Callable[[str], Tiny]) -> None:
    names = {"<s>": True, "7": True, "/think": True, "\n\n": True, "[INST]": True, "<think>": False, "<s>2": True}
    added = {id_: AddedToken(name, special=special) for id_, (name, special) in enumerate(names.items())}
    marks = marks_of(SimpleNamespace(added_tokens_decoder=added))
    assert marks is not None
    assert [name for name in names if marks.fullmatch(name)] == ["<s>", "[INST]"]
    assert marks_of(SimpleNamespace(added_tokens_decoder={})) is None
    struck = replace(tiny("llama").processor, marks=marks)
    with pytest.raises(OnPTQError, match=r"contains <s>, a special token .*data\.special_tokens=keep"):
        struck(ask("a <s>struck word"))
