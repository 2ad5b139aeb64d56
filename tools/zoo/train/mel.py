"""Whisper's log-mel features of a batch of audio clips on any device, equal to those of transformers."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 128
RATE = 16_000
HOP = 160  # samples a frame
WINDOW = 400
FLOOR = 1e-10
DYNAMIC_RANGE = 8.0  # decades below the loudest point, beyond which all is silence


def log_mel(samples: Tensor) -> Tensor:
    """[B, N] samples in [-1, 1], zero beyond each audio clip's end, to [B, BINS, ceil(N / HOP)].

    The extractor pads every audio clip to 30 s. Only the first frames after the audio still see some of it; they take
    part in the search for the loudest point, and after them all is zero. So one window of zeros stands for all the
    rest.
    """
    frames = -(-samples.shape[-1] // HOP)
    padded = F.pad(samples.float(), (0, frames * HOP + 2 * WINDOW - samples.shape[-1]))
    window = torch.hann_window(WINDOW, device=samples.device)
    spectrum = torch.stft(padded, WINDOW, HOP, window=window, return_complex=True)
    energy = _filters().to(samples.device) @ spectrum.abs().square()  # [B, BINS, frames + some]
    decades = energy.clamp(min=FLOOR).log10()
    decades = torch.maximum(decades, decades.amax((1, 2), keepdim=True) - DYNAMIC_RANGE)
    return ((decades + 4.0) / 4.0)[..., :frames]


@cache
def _filters() -> Tensor:  # [BINS, WINDOW // 2 + 1]
    from transformers.audio_utils import mel_filter_bank

    bank = mel_filter_bank(WINDOW // 2 + 1, BINS, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(bank).float().T.contiguous()
