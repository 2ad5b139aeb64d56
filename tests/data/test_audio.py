from __future__ import annotations

import io
import sys
import wave

import numpy as np
import pytest

from onptq.data.audio import read_audio
from onptq.errors import OnPTQError

RAMP = np.array([-1.0, -0.5, 0.0, 0.25, 0.5], np.float32)


def wav(samples: np.ndarray, width: int, rate: int = 16_000) -> bytes:
    """Samples [frames] or [frames, channels] in [-1, 1) as PCM WAV."""
    full = 2 ** (8 * width - 1)
    whole = np.round(samples.astype(np.float64) * full).astype(np.int64)
    raw = (whole + 128).astype(np.uint8) if width == 1 else whole.astype("<i8")
    data = raw.tobytes() if width == 1 else raw.reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1 if samples.ndim == 1 else samples.shape[1], width, rate, len(samples), "NONE", ""))
        file.writeframes(data)
    return buffer.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_pcm_of_every_width_gives_the_same_samples(width: int) -> None:
    read = read_audio(wav(RAMP, width), "a.wav", 16_000)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, RAMP)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_pcm_is_read_as_soundfile_reads_it(width: int) -> None:
    soundfile = pytest.importorskip("soundfile")
    data = wav(np.random.default_rng(0).uniform(-1, 0.99, 200), width)
    np.testing.assert_array_equal(read_audio(data, "a", 16_000), soundfile.read(io.BytesIO(data), dtype="float32")[0])


def test_channels_are_averaged() -> None:
    stereo = np.stack([RAMP, np.zeros_like(RAMP)], axis=1)
    np.testing.assert_array_equal(read_audio(wav(stereo, 2), "a.wav", 16_000), RAMP / 2)


def test_other_formats_are_read_with_soundfile() -> None:
    soundfile = pytest.importorskip("soundfile")
    buffer = io.BytesIO()
    soundfile.write(buffer, RAMP, 16_000, format="FLAC")
    np.testing.assert_allclose(read_audio(buffer.getvalue(), "a.flac", 16_000), RAMP, atol=1e-4)


def test_another_rate_is_resampled() -> None:
    pytest.importorskip("soxr")
    time = np.arange(8_000) / 8_000
    read = read_audio(wav(0.5 * np.sin(2 * np.pi * 200 * time), 2, 8_000), "a.wav", 16_000)
    assert read.shape == (16_000,)
    assert read.dtype == np.float32
    expected = 0.5 * np.sin(2 * np.pi * 200 * np.arange(16_000) / 16_000)
    np.testing.assert_allclose(read[500:-500], expected[500:-500], atol=2e-3)


@pytest.mark.parametrize(("missing", "data"), [("soundfile", b"fLaC not really"), ("soxr", wav(RAMP, 2, 8_000))])
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(
    missing: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(OnPTQError, match=r"sound b\.x.*" + missing + r': pip install "onptq\[audio\]"'):
        read_audio(data, "sound b.x", 16_000)


def test_plain_wav_needs_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "soxr", None)
    assert len(read_audio(wav(RAMP, 2), "a.wav", 16_000)) == len(RAMP)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"this is not a sound", "not readable audio"),
        (b"", "not readable audio"),
        (wav(RAMP, 2)[:-4], "cut short: its header promises 5 frames, 3 are there"),
        (wav(RAMP[:0], 2), "holds no samples"),
    ],
)
def test_unreadable_audio_is_named(data: bytes, complaint: str) -> None:
    pytest.importorskip("soundfile")
    with pytest.raises(OnPTQError, match=rf"^bad\.wav.*{complaint}"):
        read_audio(data, "bad.wav", 16_000)


def test_a_chunk_that_leads_out_of_the_file_is_named() -> None:
    pytest.importorskip("soundfile")
    data = wav(RAMP, 2).replace(b"fmt ", b"LIST")
    with pytest.raises(OnPTQError, match=r"^bad\.wav"):
        read_audio(data[:16] + b"\xf0\xff\xff\xff" + data[20:], "bad.wav", 16_000)


def test_samples_that_are_not_finite_are_named() -> None:
    soundfile = pytest.importorskip("soundfile")
    buffer = io.BytesIO()
    soundfile.write(buffer, np.array([0.0, np.nan, 0.5]), 16_000, format="WAV", subtype="FLOAT")
    with pytest.raises(OnPTQError, match=r"^nan\.wav holds samples that are NaN"):
        read_audio(buffer.getvalue(), "nan.wav", 16_000)


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_length_is_checked_before_anything_is_resampled(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile = pytest.importorskip("soundfile")
    monkeypatch.setitem(sys.modules, "soxr", None)  # whoever asks for it is told how to install it
    data = wav(np.zeros(31, np.float32), 2, rate=1)
    if form == "flac":
        buffer = io.BytesIO()
        soundfile.write(buffer, np.zeros(31 * 8000), 8000, format="FLAC")
        data = buffer.getvalue()
    with pytest.raises(OnPTQError, match=r"^slow lasts 31\.0 s; expected at most 30 s"):
        read_audio(data, "slow", 16_000, longest=30.0)


def test_a_length_that_the_writer_did_not_know_is_no_truncation() -> None:
    data = bytearray(wav(RAMP, 2))
    at = data.index(b"data") + 4
    data[at : at + 4] = b"\xff\xff\xff\xff"
    np.testing.assert_array_equal(read_audio(bytes(data), "streamed.wav", 16_000), RAMP)
