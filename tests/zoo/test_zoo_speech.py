"""Synthetic speech: the same bytes always, speakers and sentences of the splits apart, features as transformers'."""

from __future__ import annotations

import io
import subprocess
import sys
import wave
from hashlib import sha256
from random import Random

import numpy as np
import pytest
import torch

from onptq.data.audio import read_audio
from onptq.errors import OnPTQError
from onptq.zoo.sentences import FORMS, VOCABULARY, WORDS, sentence_split, spoken_sentence
from onptq.zoo.speech import MARGIN, MAX_SECONDS, PEAK, RATE, Utterance, library_version, speak, to_wav
from onptq.zoo.splits import SPLITS
from onptq.zoo.voices import ACCENTS, OTHER_VARIANTS, RATES, TRAIN_VARIANTS, Voice, sample_voice
from tools.zoo.train.mel import log_mel

pytest.importorskip("espeakng_loader", reason="speech needs onptq[speech]")

RECORDED_WITH = "1.52.0"
RECORDED = {
    Utterance("please bring seven green cups to the kitchen", Voice("en-us", "m3", 170, 50, 50)): (
        "0fc118e432dd019d22f61a99c12a30a16870a3d9392be24b704db5d79ee3f252"
    ),
    Utterance("call maria at half past nine", Voice("en-gb-scotland", "f2", 150, 40, 60)): (
        "055a8d35f067af4bb0c6b4d7c31614bb2f11248ae60a8d86ff2760629edcc4f5"
    ),
    Utterance("is it foggy near the bakery", Voice("en-029", "klatt", 200, 60, 35)): (
        "a91d83e789e1683cfa65c074a69a81439ceb844947afe7676ba34606f76603ac"
    ),
    Utterance("anna likes bread and cheese", Voice("en", "sandro", 130, 35, 70)): (
        "31d917dd057e7f0f5cef0b22c76f755f18d0d5836885042af4525d9aeb94d231"
    ),
}
SENTENCE = "please bring seven green cups to the kitchen"


def fingerprint(utterance: Utterance) -> str:
    return sha256(to_wav(speak(utterance))).hexdigest()


def utterances(count: int, split: str = "train", seed: int = 0) -> list[Utterance]:
    rng = Random(seed)
    return [Utterance(spoken_sentence(rng, split), sample_voice(rng, split)) for _ in range(count)]


def test_speech_has_the_recorded_bytes() -> None:
    if library_version() != RECORDED_WITH:
        pytest.skip(f"recorded with eSpeak NG {RECORDED_WITH}, this is {library_version()}")
    assert {utterance.text: fingerprint(utterance) for utterance in RECORDED} == {
        utterance.text: recorded for utterance, recorded in RECORDED.items()
    }


@pytest.mark.parametrize("variant", ["m1", "f2", "klatt", "sandro"])  # flutter, breath, another synthesizer, noise
def test_speech_does_not_depend_on_earlier_speech(variant: str) -> None:
    utterance = Utterance(SENTENCE, Voice("en-us", variant, 170, 50, 50))
    alone = fingerprint(utterance)
    for other in utterances(5):
        speak(other)
        assert fingerprint(utterance) == alone


@pytest.mark.slow
def test_every_voice_is_the_same_in_a_fresh_process_in_any_order() -> None:
    rng = Random(3)
    voices = [(rng.choice(ACCENTS), variant, 180, 45, 60) for variant in (*TRAIN_VARIANTS, *OTHER_VARIANTS)]
    code = (
        "import ctypes; from hashlib import sha256; from onptq.zoo.speech import *\n"
        "ctypes.CDLL(None).rand()\n"  # the C library's own random numbers are not ours to reset
        f"for voice in {voices[::-1]!r}:\n"
        f"    print(sha256(to_wav(speak(Utterance({SENTENCE!r}, Voice(*voice))))).hexdigest())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert result[::-1] == [fingerprint(Utterance(SENTENCE, Voice(*voice))) for voice in voices]


def test_audio_is_speech_of_equal_loudness_between_short_silences() -> None:
    for utterance in utterances(12, "test"):
        samples = speak(utterance).astype(np.int32)
        assert abs(np.abs(samples).max() - PEAK) <= 1
        loud = np.flatnonzero(np.abs(samples) > 0.011 * PEAK)
        assert MARGIN <= loud[0] < MARGIN + 200
        assert MARGIN < len(samples) - loud[-1] < MARGIN + 200
        words = len(utterance.text.split())
        assert 0.15 * words < len(samples) / RATE < 0.7 * words
        spectrum = np.abs(np.fft.rfft(samples)) ** 2
        bands = np.add.reduceat(spectrum, np.array([100, 1000, 2500, 4000, 6000]) * len(samples) // RATE)
        assert (bands > 1e-5 * bands.sum()).all(), "every band of speech carries something"


def test_wav_files_are_read_back_unchanged() -> None:
    samples = speak(next(iter(RECORDED)))
    data = to_wav(samples)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
    assert np.array_equal(read_audio(data, "speech", RATE) * 32768, samples)


def test_speakers_of_training_are_apart_from_the_others() -> None:
    rng = Random(0)
    result = {split: {sample_voice(rng, split).variant for _ in range(800)} for split in SPLITS}
    assert result["train"] == set(TRAIN_VARIANTS)
    assert result["test"] == result["calibration"] == result["held-out"] == set(OTHER_VARIANTS)
    assert not result["train"] & result["test"]
    assert len(result["train"]) >= 25
    assert len(result["test"]) >= 6


def test_other_speakers_are_unlike_every_training_speaker() -> None:
    def features(variant: str) -> torch.Tensor:
        samples = speak(Utterance(SENTENCE, Voice("en-us", variant, 160, 50, 50)))
        mel = log_mel(torch.from_numpy(samples)[None] / 32768)
        return torch.nn.functional.interpolate(mel, 200)[0]

    known = torch.stack([features(variant) for variant in TRAIN_VARIANTS])
    unlike = torch.cdist(known.flatten(1), known.flatten(1)) / known[0].numel() ** 0.5
    unlike.fill_diagonal_(torch.inf)
    assert unlike.min() > 0.1, "two training variants are the same"
    for variant in OTHER_VARIANTS:
        nearest = (known - features(variant)).square().mean((1, 2)).sqrt().min()
        assert nearest > 0.17, variant


def test_no_sentence_is_in_two_splits() -> None:
    rng = Random(0)
    spoken = {split: {spoken_sentence(rng, split) for _ in range(1500)} for split in SPLITS}
    for split, sentences in spoken.items():
        assert len(sentences) > 1000
        assert {sentence_split(sentence) for sentence in sentences} == {split}
    assert sum(map(len, spoken.values())) == len(set().union(*spoken.values()))
    assert sentence_split(SENTENCE) == "test", "a sentence's split must never change"


def test_sentences_have_three_to_eight_words_of_the_vocabulary_and_use_all_of_it() -> None:
    rng = Random(1)
    spoken = [spoken_sentence(rng) for _ in range(4000)]
    assert {len(sentence.split()) for sentence in spoken} <= set(range(3, 9))
    assert {word for sentence in spoken for word in sentence.split()} == set(VOCABULARY)
    assert 180 <= len(VOCABULARY) <= 220


@pytest.mark.slow
def test_the_slowest_speaker_finishes_the_longest_sentences() -> None:
    slow = Voice("en-us", "m4", RATES[0], 50, 50)
    longest = {slot: max(words, key=lambda word: len(speak(Utterance(word, slow)))) for slot, words in WORDS.items()}
    for form in FORMS:
        assert len(speak(Utterance(form.format(**longest), slow))) <= MAX_SECONDS * RATE


def test_longer_speech_is_refused_by_its_text() -> None:
    text = "please bring seven green cups and forty wooden chairs to the kitchen of the old museum"
    with pytest.raises(OnPTQError, match=rf"{text}.* at most 4 s"):
        speak(Utterance(text, Voice("en-us", "m3", 140, 50, 50)))


@pytest.mark.parametrize("text", ["", "Hello", "six, seven", "room 7", "two  spaces", " edge", "naïve", "line\n"])
def test_text_that_is_not_plain_words_is_refused(text: str) -> None:
    with pytest.raises(OnPTQError, match="expected words of a-z"):
        Utterance(text, Voice("en-us", "m3", 170, 50, 50))


@pytest.mark.parametrize(("accent", "variant", "valid"), [("en-xx", "m3", "en-029"), ("en-us", "nobody", "sandro")])
def test_unknown_voices_are_refused_with_the_valid_ones(accent: str, variant: str, valid: str) -> None:
    with pytest.raises(OnPTQError, match=valid):
        Voice(accent, variant, 170, 50, 50)


@pytest.mark.parametrize("ask", [spoken_sentence, sample_voice])
def test_unknown_splits_are_refused(ask: object) -> None:
    with pytest.raises(OnPTQError, match="held-out"):
        ask(Random(0), "heldout")  # type: ignore[operator]


@pytest.mark.parametrize("package", ["espeakng_loader", "soxr"])
def test_a_missing_package_is_named_with_the_way_to_install_it(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from onptq.errors import OnPTQError\n"
        "from onptq.zoo.speech import *\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "try: speak(Utterance('hello', Voice('en-us', 'm3', 170, 50, 50)))\n"
        "except OnPTQError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'onptq[speech]'" in done.stdout


def test_a_library_that_someone_else_uses_is_not_shared() -> None:
    code = (
        "import espeakng_loader\n"
        "mine = espeakng_loader.load_library()\n"
        "from onptq.errors import OnPTQError\n"
        "from onptq.zoo.speech import *\n"
        "try: speak(Utterance('hello', Voice('en-us', 'm3', 170, 50, 50)))\n"
        "except OnPTQError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "already loaded in this process" in done.stdout


def test_features_equal_those_of_the_whisper_extractor() -> None:
    from transformers import WhisperFeatureExtractor

    spoken = [speak(utterance).astype(np.float32) / 32768 for utterance in utterances(4, "test")]
    cut = spoken[0][6000 : 6000 + 16_001]  # loud to the last sample, which the frames after it still see
    click = np.zeros(4150, np.float32)
    click[-25:] = 0.9  # the loudest frame is the one after the audio
    extractor = WhisperFeatureExtractor(feature_size=128)
    batches: list[list[np.ndarray]] = [[*spoken, cut, click, np.zeros(500, np.float32)], [cut], [click]]
    for recordings in batches:
        expected = extractor(
            recordings, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        batch = torch.zeros(len(recordings), max(map(len, recordings)))
        for row, samples in zip(batch, recordings, strict=True):
            row[: len(samples)] = torch.from_numpy(samples)
        features = log_mel(batch)
        assert features.shape[-1] == int(expected["attention_mask"].sum(-1).max())
        torch.testing.assert_close(features, expected["input_features"][..., : features.shape[-1]], atol=1e-4, rtol=0)
