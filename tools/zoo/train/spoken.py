"""Spoken lessons on the device: added while training runs, drawn at random, augmented at each draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tools.zoo.train.collate import Arrays, find_targets, frames_of, target_slots
from tools.zoo.train.forward import FRAMES, audio_tokens
from tools.zoo.train.mel import BINS, log_mel

GAIN = 0.1  # the features are log10 of the energy over 4, so this is 4 dB
WARP = 0.1  # largest relative change of frequencies
MASKED_FRAMES, MASKED_BINS = 24, 14  # the longest gaps

COLUMNS = ("ids", "answers", "sprites", "background", "kinds", "seen", "transcript", "words")


class AudioBank:
    """The latest `capacity` spoken lessons. Features lie on the device in 16 bits, everything else here."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.count = 0  # ever added
        self._device = device
        self._mel = torch.zeros(capacity, BINS, FRAMES, dtype=torch.float16, device=device)
        self._frames: NDArray[Any] = np.zeros(capacity, np.int64)
        self._columns: dict[str, NDArray[Any]] = {}
        self._slots: int | None = None  # for targets; the same for every draw

    def __len__(self) -> int:
        return min(self.count, self.capacity)

    def add(self, arrays: Arrays) -> None:
        size = len(arrays["ids"])
        places = (self.count + np.arange(size)) % self.capacity
        frames = np.array([frames_of(int(samples)) for samples in arrays["samples"]])
        wave = torch.from_numpy(arrays["wave"]).to(self._device, non_blocking=True).float() / 32768
        mel = silence_after(log_mel(wave)[..., :FRAMES], torch.from_numpy(frames).to(self._device))
        self._mel[torch.from_numpy(places).to(self._device)] = mel.half()
        self._frames[places] = frames
        for name in COLUMNS:
            if name not in self._columns:
                self._columns[name] = np.zeros((self.capacity, *arrays[name].shape[1:]), arrays[name].dtype)
            self._columns[name][places] = arrays[name]
        self.count += size

    def draw(self, size: int, rng: np.random.Generator) -> tuple[Arrays, Tensor, NDArray[Any]]:
        """A batch as `make_images` makes them with its transcripts, its features [size, bins, FRAMES], and their
        lengths."""
        chosen = rng.integers(len(self), size=size)
        arrays = {name: column[chosen] for name, column in self._columns.items()}
        if self._slots is None:
            self._slots = target_slots(self._columns["answers"][: len(self)], size)
        arrays |= find_targets(arrays["ids"], arrays.pop("answers"), self._slots)
        mel = self._mel[torch.from_numpy(chosen).to(self._device, non_blocking=True)].float()
        return arrays, mel, self._frames[chosen]


def silence_after(mel: Tensor, frames: Tensor) -> Tensor:
    """The features with zeros beyond each audio clip's end, as in the model's own code."""
    return mel * (torch.arange(mel.shape[-1], device=mel.device) < frames[:, None])[:, None]


def disguise(mel: Tensor, frames: Tensor) -> Tensor:
    """Augmented features: other loudness, stretched frequencies, and gaps in time and frequency."""
    batch, bins, steps = mel.shape
    device = mel.device
    spot = torch.arange(bins, device=device) * (1 + WARP * _uniform(batch, 1, device=device))  # [B, bins]
    spot = spot.clamp(0, bins - 1)
    low = spot.long().clamp(max=bins - 2)
    share = (spot - low)[..., None]
    index = low[..., None].expand(-1, -1, steps)
    warped = mel.gather(1, index) * (1 - share) + mel.gather(1, index + 1) * share
    louder = warped + GAIN * _uniform(batch, 1, 1, device=device)
    floor = louder.amin((1, 2), keepdim=True)
    gaps = _gap(batch, steps, MASKED_FRAMES, device)[:, None] | _gap(batch, bins, MASKED_BINS, device)[..., None]
    return silence_after(torch.where(gaps, floor, louder), frames)


def _gap(batch: int, size: int, longest: int, device: torch.device) -> Tensor:
    """One gap in each row, [batch, size], of any length up to the longest."""
    start = torch.rand(batch, 1, device=device) * size
    length = torch.rand(batch, 1, device=device) * longest
    place = torch.arange(size, device=device)
    return (place >= start) & (place < start + length)


def _uniform(*shape: int, device: torch.device) -> Tensor:
    return torch.rand(shape, device=device) * 2 - 1


class Transcriber(nn.Module):
    """A CTC head on the audio tokens, which teaches the audio tower to align. Not part of the model."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.blank = words
        self.head = nn.Linear(width, words + 1)

    def forward(self, audio: Tensor, frames: NDArray[Any], transcript: NDArray[Any], words: NDArray[Any]) -> Tensor:
        logits = F.linear(audio.float(), self.head.weight, self.head.bias).float()
        targets = torch.from_numpy(transcript.astype(np.int64)).to(audio.device, non_blocking=True)
        lengths = audio_tokens(torch.from_numpy(frames)), torch.from_numpy(words.astype(np.int64))
        log_probs = logits.log_softmax(-1).transpose(0, 1)
        losses = F.ctc_loss(log_probs, targets, *lengths, blank=self.blank, reduction="none", zero_infinity=True)
        return (losses / lengths[1].to(audio.device).clamp(min=1)).mean()
