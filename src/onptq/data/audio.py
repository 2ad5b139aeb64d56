"""Reading audio: PCM WAV with the standard library, everything else with what `onptq[audio]` installs."""

from __future__ import annotations

import io
import math
import wave

import numpy as np
from numpy.typing import NDArray

from onptq.errors import OnPTQError

INSTALL = 'pip install "onptq[audio]"'
STREAMED_BYTES = 0xFFFF0000  # a data size from here on means that the writer did not know the length, not truncation

Waveform = NDArray[np.float32]


def read_audio(data: bytes, name: str, rate: int, longest: float = math.inf) -> Waveform:
    """Mono samples in [-1, 1] at `rate` Hz, of at most `longest` seconds. `name` is how an error calls the file."""
    try:
        samples, own_rate = _read_wav(data, name, longest)
    except (wave.Error, EOFError, RuntimeError):  # the last one where the size of a chunk leads out of the file
        samples, own_rate = _read_other(data, name, longest)
    if samples.size == 0:
        raise OnPTQError(f"{name} holds no samples; expected audio")
    if not np.isfinite(samples).all():
        raise OnPTQError(f"{name} holds samples that are NaN or infinite; expected finite ones")
    mono: Waveform = np.ascontiguousarray(samples.mean(axis=1, dtype=np.float32))
    return mono if own_rate == rate else _resample(mono, name, own_rate, rate)


def _read_wav(data: bytes, name: str, longest: float) -> tuple[Waveform, int]:  # [frames, channels]
    with wave.open(io.BytesIO(data)) as file:
        channels, width, rate, declared, *_ = file.getparams()
        raw = file.readframes(declared)
    frame = channels * width
    if len(raw) < declared * frame < STREAMED_BYTES:
        raise OnPTQError(f"{name} is cut short: its header promises {declared} frames, {len(raw) // frame} are there")
    if width not in (1, 2, 3, 4) or rate <= 0:
        raise OnPTQError(f"{name} has {8 * width}-bit samples at {rate} Hz; expected 8, 16, 24 or 32 bits and a rate")
    _check_length(len(raw) // frame, rate, name, longest)
    return _from_pcm(raw[: len(raw) // frame * frame], width).reshape(-1, channels), rate


def _check_length(frames: int, rate: int, name: str, longest: float) -> None:
    if frames > longest * rate:
        raise OnPTQError(
            f"{name} lasts {frames / rate:.1f} s; expected at most {longest:g} s, the longest the model takes"
        )


def _from_pcm(raw: bytes, width: int) -> Waveform:
    if width == 1:  # the one unsigned width
        return (np.frombuffer(raw, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if width == 3:  # shifted into the upper bytes of 32 bits, so that the sign is right
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        raw, width = wide.tobytes(), 4
    full = np.float32(2 ** (8 * width - 1))
    return np.frombuffer(raw, f"<i{width}").astype(np.float32) / full


def _read_other(data: bytes, name: str, longest: float) -> tuple[Waveform, int]:  # [frames, channels]
    try:
        import soundfile
    except ImportError:
        raise OnPTQError(f"{name} is not a PCM WAV file; other formats need soundfile: {INSTALL}") from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate = file.samplerate
            _check_length(file.frames, rate, name, longest)
            samples = file.read(dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError) as error:
        why = getattr(error, "error_string", error)
        raise OnPTQError(f"{name} is not readable audio ({why}); expected WAV, FLAC, OGG, MP3 or AIFF") from error
    return samples, rate


def _resample(samples: Waveform, name: str, own_rate: int, rate: int) -> Waveform:
    try:
        import soxr
    except ImportError:
        raise OnPTQError(f"{name} is sampled at {own_rate} Hz, not {rate}; resampling needs soxr: {INSTALL}") from None
    resampled: Waveform = soxr.resample(samples, own_rate, rate).astype(np.float32)
    return resampled
