"""Text that a server made of a chat by the model's template, as messages again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onptq.data.chat import ROLES
from onptq.data.collected import Excluded

WITHOUT_MEDIA = "their images or audio are not in the log"
UNKNOWN_TEMPLATE = "rendered by a chat template that is not known: expected ChatML (Qwen, SmolLM) or that of Llama 3"
WITH_TOOLS = "conversations with tools are not supported"
CUT_SHORT = "they are cut short in the log"
MEDIA_MARKS = (
    *("<|image_pad|>", "<|vision_start|>", "<|video_pad|>", "<|IMAGE|>", "<|VIDEO|>", "<|vision_bos|>"),  # Qwen
    *("<|AUDIO|>", "<|audio_bos|>", "<|audio_start|>", "<|image|>", "<image>"),
)
OTHER_MARKS = re.compile(r"<\|[\w-]+\|>|\[/?INST\]|<(?:start|end)_of_turn>|<｜")
LLAMA_DATES = re.compile(r"\A(?:Environment: ipython\n)?(?:Cutting Knowledge Date: .*\n)?Today Date: .*\n\n")


@dataclass(frozen=True)
class Template:
    """How a family of chat templates marks a message: `begin` ROLE `header` TEXT `end`."""

    begin: str
    header: str
    end: str


CHATML = Template("<|im_start|>", "\n", "<|im_end|>")
LLAMA_3 = Template("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>")


def read_rendered(text: str) -> Mapping[str, Any]:
    """A record with messages, or with the text where it shows no template. Without them it is an Excluded."""
    if any(mark in text for mark in MEDIA_MARKS):
        raise Excluded(WITHOUT_MEDIA)
    for template in (CHATML, LLAMA_3):
        if template.begin in text:
            return {"messages": _messages(text, template)}
    if OTHER_MARKS.search(text):
        raise Excluded(UNKNOWN_TEMPLATE)
    return {"text": text}


def _messages(text: str, template: Template) -> list[dict[str, str]]:
    before, *parts = text.split(template.begin)
    if before not in ("", "<|begin_of_text|>"):
        raise Excluded(UNKNOWN_TEMPLATE)
    turns = [part.partition(template.header) for part in parts]
    role, header, _ = turns.pop()  # the beginning of the answer
    if role != "assistant" or not header:
        raise Excluded(CUT_SHORT)
    messages: list[dict[str, str]] = []
    for role, _, body in turns:
        content, end, after = body.rpartition(template.end)
        if role in ("tool", "ipython") or "<tools>" in content or "<tool_response>" in content:
            raise Excluded(WITH_TOOLS)
        if role not in ROLES or not end or after.strip():
            raise Excluded(UNKNOWN_TEMPLATE)
        if role == "system":
            content = LLAMA_DATES.sub("", content)  # the template writes them again
        if content.strip() or role != "system":
            messages.append({"role": role, "content": content})
    return messages
