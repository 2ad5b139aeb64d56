"""Qwen2.5-Omni: the thinker of a full checkpoint, or a thinker saved alone."""

from __future__ import annotations

from onptq.models.family import AudioPlaceholder, Family, ImagePlaceholder


def pooled_frames(frames: int) -> int:
    """Tokens of an audio clip: the second convolution halves the mel frames, and the last pooling halves them again."""
    convolved = (frames - 1) // 2 + 1
    return (convolved - 2) // 2 + 1


QWEN2_5_OMNI = Family(
    name="qwen2.5-omni",
    model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
    model_class="Qwen2_5OmniThinkerForConditionalGeneration",
    image=ImagePlaceholder("<|IMAGE|>"),
    audio=AudioPlaceholder("<|AUDIO|>", pooled_frames),
    towers=(r".*visual\..*", r".*audio_tower\..*"),
    other_models=("talker.", "token2wav."),
)
