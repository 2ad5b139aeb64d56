"""Requests of lmms-eval as batches: text, images and audio of each, with the settings they share."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

RATE = 16_000  # Hz, what the audio towers take
PINNED = {"do_sample", "max_new_tokens", "num_beams", "temperature", "top_p", "until"}

Audio = NDArray[np.float32]  # [samples] in [-1, 1] at RATE


@dataclass(frozen=True)
class Question:
    """One request: media in the order of the task, then the text."""

    place: int  # among the requests
    text: str
    media: tuple[Image.Image | Audio, ...]
    max_tokens: int
    until: tuple[str, ...]

    @property
    def images(self) -> list[Image.Image]:
        return [one for one in self.media if isinstance(one, Image.Image)]

    @property
    def audios(self) -> list[Audio]:
        return [one for one in self.media if not isinstance(one, Image.Image)]

    def cut(self, answer: str) -> str:
        """The answer up to the first of the task's stop texts."""
        for stop in self.until:
            answer = answer.split(stop)[0]
        return answer


def questions(requests: Sequence[Any], task_dict: Mapping[str, Any]) -> Iterator[Question]:
    for place, request in enumerate(requests):
        text, settings, to_media, number, task, split = request.args
        given = to_media(task_dict[task][split][number]) or []
        yield Question(place, text, tuple(map(read, given)), *_limits(task, settings))


def read(media: Any) -> Image.Image | Audio:
    """An image in RGB, or mono samples."""
    if isinstance(media, Image.Image):
        return media.convert("RGB")
    if isinstance(media, dict) and "array" in media:
        return _mono(np.asarray(media["array"], np.float32).T, media["sampling_rate"])
    if isinstance(media, dict) and (media.get("bytes") or media.get("path")):
        import soundfile

        return _mono(*soundfile.read(io.BytesIO(media["bytes"]) if media.get("bytes") else media["path"]))
    if hasattr(media, "get_all_samples"):  # torchcodec's decoder, as `datasets` gives audio
        samples = media.get_all_samples()
        return _mono(samples.data.cpu().numpy().T, samples.sample_rate)
    raise ValueError(f"a task gave {type(media).__name__} as media; expected an image or audio")


def _mono(samples: NDArray[Any], rate: int) -> Audio:  # [frames] or [frames, channels]
    mono = np.asarray(samples if samples.ndim == 1 else samples.mean(axis=1), np.float32)
    if rate == RATE:
        return mono
    import librosa

    return np.asarray(librosa.resample(mono, orig_sr=rate, target_sr=RATE), np.float32)


def _limits(task: str, settings: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """The most tokens of an answer, and the texts that end it. Decoding is greedy, whatever the task says of sampling."""
    if settings.get("do_sample") or settings.get("temperature") or settings.get("num_beams", 1) != 1:
        raise ValueError(
            f"task {task} samples or searches ({settings}); expected greedy decoding, which all arms share"
        )
    if unknown := set(settings) - PINNED:
        raise ValueError(f"task {task} has generation settings that no arm is given: {', '.join(sorted(unknown))}")
    if "max_new_tokens" not in settings:
        raise ValueError(f"task {task} has no max_new_tokens; expected a limit, which all arms share")
    until = settings.get("until") or []
    return int(settings["max_new_tokens"]), tuple([until] if isinstance(until, str) else until)
