"""A small byte-level BPE tokenizer with the special tokens and the chat template of a family."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The text that merges are learned from: enough words for a thousand tokens.
TEXT = """
The picture shows a red circle above a blue square, and a green line runs from the left corner to the right. How many
shapes are there, and which of them is the largest? Describe the colors of the image and say what stands in the
middle. A quantized model answers with its own words: every token it chooses changes the question that it must answer
next. Where the margin between the best token and its strongest rival is small, a little noise is enough to take
another path, and two paths that part early seldom meet again. So the states that matter are those the model really
visits, not those that somebody else once wrote down. What do you hear in this sound? A low tone rises for a second,
stops, and begins again a little higher. Listen once more and count the pulses between the first and the last of them.
Explain in one short sentence why the sky is blue, how long a day lasts on the moon, and when water begins to boil in
the mountains. Please write the numbers from one to twelve: one, two, three, four, five, six, seven, eight, nine, ten,
eleven, twelve. Then compare both answers, think about the difference, and tell me whether the second is better than
the first. Yes, no, maybe. An old sailor kept a small boat near the harbour and went out each morning before the sun
came up. His daughter learned to read the wind from the colour of the water; when she was older she drew maps of every
rock and every current. People asked her for advice in the winter storms, because her maps were right where others had
only guessed. In the library of the town there is still a shelf with her notebooks, written in a clear hand, with
dates, depths and weather. She used to say that a good map does not show everything; it shows what would otherwise
surprise you. Could you summarize this story for a child? Use simple sentences, keep the order of events, and finish
with a question. List three facts, one opinion and a possible title. If something is missing from the text, do not
invent it but say that it is unknown. Translate the last sentence into plain language; check the result, correct
mistakes, give reasons, and mark what remains uncertain. Yesterday the baker sold forty loaves before noon, half of
them with seeds. Seven customers paid by card, nobody returned anything, and the oven cooled slowly through the quiet
afternoon. Outside, bicycles leaned against yellow walls; a tall woman photographed the church clock, whose hands have
pointed at twenty past nine since the great flood. Machines measure temperature, pressure, humidity and brightness
every minute. Engineers plot these curves, remove obvious errors, estimate trends and publish monthly reports that
almost everyone finds useful. Which figure would convince you to change the plan?
"""

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ 'IMAGE_PART' }}
{%- elif part['type'] == 'audio' %}{{ 'AUDIO_PART' }}
{%- elif 'text' in part %}{{ part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_CHAT = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""


@dataclass(frozen=True)
class TokenSet:
    """The special tokens of a family in the order of their ids, the last of the vocabulary, and their roles."""

    special: tuple[str, ...]
    stops: tuple[str, str]  # tokens that end a response; the first is the tokenizer's eos_token
    pad: str
    template: str
    tokenizer_class: str = "Qwen2Tokenizer"
    bos: str | None = None
    roles: Mapping[str, str] | None = None  # attributes that an Omni processor reads from its tokenizer


QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

QWEN = TokenSet(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *QWEN_VISION),
    stops=("<|im_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
    template=CHATML.replace("IMAGE_PART", "<|vision_start|><|image_pad|><|vision_end|>").replace("AUDIO_PART", ""),
)

OMNI_ROLES = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

OMNI = TokenSet(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *OMNI_ROLES.values()),
    stops=("<|im_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
    template=CHATML.replace("IMAGE_PART", "<|vision_bos|><|IMAGE|><|vision_eos|>").replace(
        "AUDIO_PART", "<|audio_bos|><|AUDIO|><|audio_eos|>"
    ),
    roles=OMNI_ROLES,
)

LLAMA = TokenSet(
    special=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    stops=("<|eot_id|>", "<|end_of_text|>"),
    pad="<|end_of_text|>",
    template=LLAMA_CHAT,
    tokenizer_class="PreTrainedTokenizerFast",
    bos="<|begin_of_text|>",
)


def write_tokenizer(folder: Path, tokens: TokenSet, size: int) -> dict[str, int]:
    """Write a tokenizer of at most `size` tokens and its chat template; return the ids of the special tokens."""
    return save_tokenizer(folder, tokens, train_bpe(size - len(tokens.special), [TEXT.replace("\n", " ")], PATTERN))


def save_tokenizer(folder: Path, tokens: TokenSet, tokenizer: Any) -> dict[str, int]:
    """Add the special tokens, write tokenizer and chat template, and return the ids of the special tokens."""
    from tokenizers import AddedToken

    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens.special])
    ids = {token: tokenizer.token_to_id(token) for token in tokens.special}
    if tokens.bos is not None:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens.bos} $A", pair=f"{tokens.bos} $A $B", special_tokens=[(tokens.bos, ids[tokens.bos])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(tokens, ids), indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(tokens.template, encoding="utf-8")
    return ids


def train_bpe(size: int, texts: Iterable[str], pattern: str) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of `size` tokens without special ones; `pattern` cuts the texts into words."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=1, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _config(tokens: TokenSet, ids: Mapping[str, int]) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(ids[token]): {"content": token} | flags for token in tokens.special},
        "bos_token": tokens.bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens.stops[0],
        "model_max_length": 4096,
        "pad_token": tokens.pad,
        "tokenizer_class": tokens.tokenizer_class,
    } | ({"extra_special_tokens": dict(tokens.roles)} if tokens.roles else {})
