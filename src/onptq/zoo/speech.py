"""Synthetic speech: eSpeak NG from the `espeakng-loader` package, the same bytes for the same words and voice.

The library keeps state between utterances (noise, pitch flutter, phase) that neither a seed nor its own
re-initialisation resets: the same text gives other samples depending on the utterances before it. So it is loaded anew for
every utterance. That is about half of the five milliseconds of an utterance.
"""

from __future__ import annotations

import _ctypes
import ctypes
import io
import os
import re
import threading
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onptq.errors import OnPTQError
from onptq.zoo.voices import Voice

INSTALL = "pip install 'onptq[speech]'"
RATE = 16_000  # Hz, what the audio towers take
ESPEAK_RATE = 22_050
MAX_SECONDS = 4.0
MARGIN = RATE // 20  # silence before and after
PEAK = 26_000  # of 32,767
QUIET = 0.01  # of the peak: samples below it before and after the words are cut off

SYNCHRONOUS, KEEP_PROCESS, UTF8 = 2, 0x8000, 1  # espeak_AUDIO_OUTPUT, espeakINITIALIZE_DONT_EXIT, espeakCHARS_UTF8
SEED = 1  # of the noise in breath and consonants
SPEED, PITCH, SPREAD = 1, 3, 4  # espeak_PARAMETER
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
_SYNTH_ARGUMENTS = (  # text, size, position, its type, end position, flags, identifier, user data
    *(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int),
    *(ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p),
)
_SPEAKABLE = re.compile(r"[a-z]+( [a-z]+)*")
_lock = threading.Lock()  # one utterance at a time: ctypes lets other threads run meanwhile

Samples = NDArray[np.int16]


@dataclass(frozen=True)
class Utterance:
    """Words and the voice that speaks them."""

    text: str
    voice: Voice

    def __post_init__(self) -> None:
        if not _SPEAKABLE.fullmatch(self.text):
            raise OnPTQError(f"cannot speak {self.text!r}; expected words of a-z in lower case, one space between them")


def speak(utterance: Utterance) -> Samples:
    """Mono samples at 16 kHz of equal peak, with a twentieth of a second of silence before and after."""
    signal = _normalise(_resample(_synthesize(utterance)))
    if len(signal) > MAX_SECONDS * RATE:
        raise OnPTQError(
            f"{utterance.text!r} takes {len(signal) / RATE:.2f} s at {utterance.voice.rate} words a minute; expected at "
            f"most {MAX_SECONDS:g} s, so fewer words or a faster voice"
        )
    return signal


def to_wav(samples: Samples) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, RATE, len(samples), "NONE", "not compressed"))
        file.writeframes(samples.astype("<i2").tobytes())
    return data.getvalue()


def library_version() -> str:
    """The version of eSpeak NG, on which every sample depends."""
    with _lock, _library() as library:
        library.espeak_Info.restype = ctypes.c_char_p
        version: bytes = library.espeak_Info(None)
        return version.decode()


def _synthesize(utterance: Utterance) -> NDArray[np.float32]:
    pieces: list[bytes] = []

    def collect(samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    voice, text, callback = utterance.voice, utterance.text.encode() + b"\0", _Callback(collect)
    with _lock, _library() as library:
        library.espeak_SetSynthCallback(callback)
        if library.espeak_SetVoiceByName(voice.name.encode()) != 0:
            raise OnPTQError(f"eSpeak NG does not have the voice {voice.name}; reinstall it: {INSTALL}")
        for parameter, value in ((SPEED, voice.rate), (PITCH, voice.pitch), (SPREAD, voice.spread)):
            library.espeak_SetParameter(parameter, value, 0)
        library.espeak_Synth.argtypes = _SYNTH_ARGUMENTS
        status = library.espeak_Synth(text, len(text), 0, 0, 0, UTF8, None, None)
    if status != 0 or not pieces:
        raise OnPTQError(f"eSpeak NG cannot speak {utterance.text!r} as {voice.name} (status {status})")
    return np.frombuffer(b"".join(pieces), np.int16).astype(np.float32)


@contextmanager
def _library() -> Iterator[ctypes.CDLL]:
    """A freshly loaded library in its initial state, unloaded afterwards."""
    try:
        import espeakng_loader
    except ImportError:
        raise OnPTQError(f"speech needs the package espeakng-loader: {INSTALL}") from None
    path = espeakng_loader.get_library_path()
    if _is_loaded(path):
        raise OnPTQError(
            f"{path} is already loaded in this process, so its samples would depend on earlier utterances; expected a "
            "process in which nothing else uses eSpeak NG"
        )
    library = ctypes.CDLL(path)
    try:
        rate = library.espeak_Initialize(SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), KEEP_PROCESS)
        if rate != ESPEAK_RATE:
            raise OnPTQError(f"eSpeak NG does not start (sample rate {rate}); reinstall it: {INSTALL}")
        library.espeak_ng_SetRandSeed(ctypes.c_long(SEED))  # otherwise the clock
        yield library
        library.espeak_Terminate()
    finally:
        _unload(library)


def _is_loaded(path: str) -> bool:
    if not hasattr(os, "RTLD_NOLOAD"):  # Windows
        return False
    try:
        _unload(ctypes.CDLL(path, mode=os.RTLD_NOLOAD))
    except OSError:
        return False
    return True


def _unload(library: ctypes.CDLL) -> None:
    close = getattr(_ctypes, "dlclose" if hasattr(_ctypes, "dlclose") else "FreeLibrary")  # the latter on Windows
    close(library._handle)


def _resample(signal: NDArray[np.float32]) -> NDArray[np.float32]:
    try:
        import soxr
    except ImportError:
        raise OnPTQError(f"speech needs the package soxr: {INSTALL}") from None
    resampled: NDArray[np.float32] = soxr.resample(signal, ESPEAK_RATE, RATE, "HQ")
    return resampled


def _normalise(signal: NDArray[np.float32]) -> Samples:
    loudness = np.abs(signal)
    peak = loudness.max()
    audible = np.flatnonzero(loudness > QUIET * peak)
    # Zeros beyond both ends: eSpeak leaves less than the margin before a vowel.
    framed = np.pad(signal, MARGIN)[audible[0] : audible[-1] + 1 + 2 * MARGIN]
    samples: Samples = np.rint(framed * (PEAK / peak)).astype(np.int16)
    return samples
