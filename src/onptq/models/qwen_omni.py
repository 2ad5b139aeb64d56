"""Qwen2.5-Omni and Qwen3-Omni: the thinker of a full checkpoint, or a thinker saved alone."""

from __future__ import annotations

from onptq.models.family import AudioPlaceholder, Family, ImagePlaceholder

CHUNK, CHUNK_TOKENS = 100, 13  # mel frames that Qwen3-Omni's audio tower reads at once, and the tokens it makes of them


def pooled_frames(frames: int) -> int:
    """Tokens of Qwen2.5-Omni: the second convolution halves the mel frames, and the last pooling halves them again."""
    convolved = (frames - 1) // 2 + 1
    return (convolved - 2) // 2 + 1


def chunked_frames(frames: int) -> int:
    """Tokens of Qwen3-Omni: three convolutions each halve the frames of a chunk and round up."""
    chunks, rest = divmod(frames, CHUNK)
    return chunks * CHUNK_TOKENS + -(-rest // 8)


QWEN2_5_OMNI = Family(
    name="qwen2.5-omni",
    model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
    model_class="Qwen2_5OmniThinkerForConditionalGeneration",
    image=ImagePlaceholder("<|IMAGE|>"),
    audio=AudioPlaceholder("<|AUDIO|>", pooled_frames),
    towers=(r".*visual\..*", r".*audio_tower\..*"),
    other_models=("talker.", "token2wav."),
)
QWEN3_OMNI = Family(
    name="qwen3-omni",
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    model_class="Qwen3OmniMoeThinkerForConditionalGeneration",
    image=ImagePlaceholder("<|image_pad|>"),
    audio=AudioPlaceholder("<|audio_pad|>", chunked_frames, whole=False),
    towers=(r".*visual\..*", r".*audio_tower\..*"),
    other_models=("talker.", "code2wav."),
    sparse=True,
)
