"""Recorded speech and described images: read from installed packages, made into fair items, left out where absent."""

from __future__ import annotations

import gzip
import io
import json
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from onptq.data.audio import read_audio
from onptq.errors import OnPTQError
from onptq.evaluate.answers import check_items
from onptq.models.family import AUDIO
from tools.zoo import real
from tools.zoo.real import (
    Material,
    described_images,
    image_items,
    normalise,
    real_items,
    recorded_speech,
    speech_items,
)

LISTING = """\
; Core Asterisk Sounds in English

activated: Activated.
beep: [this is a simple beep tone]
call-fwd-on-busy: Call-Forward on Busy.
digits/4: four
letters/at: at [@]
long: This one lasts too long.
never-recorded: Nobody said this.
silence/2: (2 seconds of silence)
vm-next: Press 6 to play the caller's next message.
"""
SECONDS = {"activated": 0.5, "beep": 0.2, "call-fwd-on-busy": 1.5, "digits/4": 0.4, "letters/at": 0.3}
SECONDS |= {"long": 4.25, "silence/2": 2, "vm-next": 4}
STAMPS = {
    "animals/frog": "A frog.",
    "animals/frog-2": "A green frog.",
    "food/apple": "A “Fuji” apple.",
    "town/house": "A house.",
    "town/church": "An old church!",
    "symbols/pawn": "Pawn. Can only move forward, unless capturing, and then diagonally one square.",
}


def play(path: Path, seconds: float, rate: int = 8000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = 8000 * np.sin(np.arange(round(seconds * rate)) * 2 * np.pi * 440 / rate)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


@pytest.fixture
def audio(tmp_path):
    for name, seconds in SECONDS.items():
        play(tmp_path / f"{name}.wav", seconds)
    (tmp_path / "core-sounds-en.txt").write_text(LISTING, encoding="utf-8")
    return tmp_path


@pytest.fixture
def stamps(tmp_path):
    """Half transparent images, whose hidden pixels are black, with descriptions in two languages."""
    for name, description in STAMPS.items():
        path = tmp_path / "stamps" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGBA", (40, 20), (0, 0, 0, 0))
        image.paste((200, 30, 30, 255), (0, 0, 20, 20))
        image.save(path)
        path.with_suffix(".txt").write_text(f"{description}\nde.utf8=Etwas.\n", encoding="utf-8")
    Image.new("RGBA", (8, 8)).save(tmp_path / "stamps" / "food" / "apple_mirror.png")
    return tmp_path / "stamps"


def options(item):
    (message,) = item.prompt.messages
    question, *listed = message["content"][1]["text"].split("\n")
    assert question == real.QUESTION
    return dict(line.split(". ", 1) for line in listed)


@pytest.mark.parametrize(
    ("transcript", "words"),
    [
        ("Thank you.  Please hold!", "thank you please hold"),
        ("Call-Forward on No Answer.", "call forward on no answer"),
        ("I'm afraid i don't know", "im afraid i dont know"),
        ("press * to toggle pause, press # or 0", "press star to toggle pause press pound or zero"),
        ("dollar [$]", "dollar"),
        ('IAX (note: does not say "2")', "iax"),
        ("<beep ascending>", ""),
        ("dial 500 now", ""),  # five hundred, or five zero zero?
        ("H.323", ""),
        ("3D audio", ""),
    ],
)
def test_transcripts_become_the_spoken_words(transcript, words):
    assert normalise(transcript) == words


def test_speech_needs_words_a_file_and_at_most_four_seconds(audio):
    material = recorded_speech(audio)
    assert material.missing is None
    assert {path.relative_to(audio).as_posix(): words for path, words in material.items} == {
        "activated.wav": "activated",
        "call-fwd-on-busy.wav": "call forward on busy",
        "digits/4.wav": "four",
        "letters/at.wav": "at",
        "vm-next.wav": "press six to play the callers next message",
    }


def test_packed_transcripts_are_read_as_well(audio):
    plain = recorded_speech(audio)
    listing = audio / "core-sounds-en.txt"
    (audio / "core-sounds-en.txt.gz").write_bytes(gzip.compress(listing.read_bytes()))
    listing.unlink()
    assert recorded_speech(audio) == plain


def test_without_packages_the_message_names_them(tmp_path):
    speech = recorded_speech(tmp_path)
    assert not speech.items
    assert "asterisk-core-sounds-en with" in str(speech.missing)
    (tmp_path / "core-sounds-en.txt").write_text(LISTING, encoding="utf-8")
    assert "asterisk-core-sounds-en-wav" in str(recorded_speech(tmp_path).missing)
    images = described_images(tmp_path / "nowhere")
    assert not images.items
    assert "tuxpaint-stamps-default" in str(images.missing)


def test_without_a_resampler_telephone_speech_is_left_out(audio, monkeypatch):
    monkeypatch.setattr(real, "find_spec", lambda name: None)
    material = recorded_speech(audio)
    assert not material.items
    assert "soxr" in str(material.missing)
    for name, seconds in SECONDS.items():
        play(audio / f"{name}.wav", seconds, real.RATE)
    assert len(recorded_speech(audio).items) == 5


def test_a_broken_audio_file_is_named(audio):
    (audio / "activated.wav").write_bytes(b"RIFF")
    with pytest.raises(OnPTQError, match=r"activated\.wav cannot be read"):
        recorded_speech(audio)


def test_a_transcript_is_graded_word_by_word(audio):
    items = speech_items(recorded_speech(audio))
    check_items(items)
    item = next(item for item in items if item.id.endswith("vm-next"))
    assert item.prompt.messages[0]["content"][0] == {"type": "audio"}
    assert item.measure == "word errors"
    assert item.grade("Press six to play the callers next message.").points == 0
    missed = item.grade("press sick to play the next message")
    assert (missed.points, missed.total) == (2, 8)


def test_telephone_speech_is_resampled_for_the_model(audio, tiny):
    item = next(item for item in speech_items(recorded_speech(audio)) if item.id.endswith("vm-next"))
    assert len(read_audio(item.prompt.audios[0].read(), "vm-next", real.RATE)) == 4 * real.RATE
    inputs = tiny("qwen2.5-omni").processor(item.prompt)
    assert int((inputs.modality == AUDIO).sum()) == 4 * 25  # tokens a second


def test_images_are_those_with_a_short_description(stamps):
    material = described_images(stamps)
    assert material.missing is None
    assert {path.relative_to(stamps).with_suffix("").as_posix(): words for path, words in material.items} == {
        "animals/frog": "A frog",
        "animals/frog-2": "A green frog",
        "food/apple": "A “Fuji” apple",
        "town/house": "A house",
        "town/church": "An old church!",
    }


def test_openmoji_is_taken_where_there_are_png_files(stamps, tmp_path):
    (tmp_path / "data").mkdir()
    entries = [
        {"hexcode": "1F600", "annotation": "grinning face", "skintone": ""},
        {"hexcode": "1F44B", "annotation": "waving hand", "skintone": ""},
        {"hexcode": "1F44B-1F3FB", "annotation": "waving hand: light skin tone", "skintone": "1"},
    ]
    (tmp_path / "data" / "openmoji.json").write_text(json.dumps(entries), encoding="utf-8")
    vectors = described_images(stamps, tmp_path)
    assert len(vectors.items) == 5
    assert "SVG" in str(vectors.missing)
    (tmp_path / "color" / "72x72").mkdir(parents=True)
    for name in ("1F600", "1F44B-1F3FB"):
        Image.new("RGBA", (72, 72)).save(tmp_path / "color" / "72x72" / f"{name}.png")
    drawn = described_images(stamps, tmp_path)
    assert drawn.missing is None
    assert [words for _, words in drawn.items[5:]] == ["grinning face"]


def test_the_right_letter_stands_before_the_description_and_no_other_option_fits(stamps):
    described = {path.stem: words for path, words in described_images(stamps).items}
    letters = set()
    for seed in range(8):
        for item in image_items(described_images(stamps), 112, seed=seed):
            listed = options(item)
            name = item.id.rpartition("/")[2]
            assert list(listed) == ["A", "B", "C", "D"]
            assert len(set(listed.values())) == 4
            assert listed[item.reference] == described[name]
            assert "frog" not in name or sum("frog" in option for option in listed.values()) == 1
            assert item.grade(f" {item.reference.lower()}.").points == 1
            assert sum(item.grade(letter).points for letter in listed) == 1
            letters.add(item.reference)
    assert letters == set("ABCD")


def test_too_few_descriptions_to_choose_from_are_refused(stamps):
    few = Material(described_images(stamps).items[:4])  # two frogs, so two others
    with pytest.raises(OnPTQError, match="expected at least 3"):
        image_items(few, 112)


def test_images_stand_whole_on_a_white_square(stamps):
    item = image_items(described_images(stamps), 112)[0]
    image = Image.open(io.BytesIO(item.prompt.images[0].read()))
    assert (image.size, image.mode) == ((112, 112), "RGB")
    assert image.getpixel((20, 56)) == (200, 30, 30)
    assert image.getpixel((90, 56)) == (255, 255, 255)  # transparent in the file
    assert image.getpixel((20, 5)) == (255, 255, 255)  # above the image


def test_the_same_seed_draws_the_same_items_and_another_seed_others(stamps):
    material = described_images(stamps)

    def questions(seed, count=3):
        return [(item.id, options(item), item.reference) for item in image_items(material, 112, count, seed)]

    assert questions(0) == questions(0)
    assert questions(0) != questions(1)
    assert len(questions(0)) == 3
    assert len(questions(0, 99)) == 5


def test_a_family_without_images_of_its_own_size_is_refused():
    with pytest.raises(OnPTQError, match=r"expected one of qwen2\.5-vl"):
        real_items("llama")


def test_items_are_made_of_installed_speech():
    material = recorded_speech()
    if material.missing:
        pytest.skip(material.missing)
    items = speech_items(material)
    check_items(items)
    assert len(items) > 400
    by_name = {item.id.rpartition("/")[2]: item for item in items}
    assert by_name["vm-goodbye"].reference == "goodbye"
    lengths = [len(read_audio(item.prompt.audios[0].read(), item.id, real.RATE)) / real.RATE for item in items[::40]]
    assert 0.2 < min(lengths) < max(lengths) <= real.SECONDS


def test_items_are_made_of_installed_images():
    material = described_images()
    if material.missing:
        pytest.skip(material.missing)
    assert len(material.items) > 600
    items = image_items(material, 128, count=40)
    check_items(items)
    assert {item.reference for item in items} == set("ABCD")
    described = {description for _, description in material.items}
    assert all(set(options(item).values()) <= described for item in items)
    assert all(Image.open(io.BytesIO(item.prompt.images[0].read())).size == (128, 128) for item in items)


def test_all_installed_material_is_used_and_the_rest_is_named(audio, stamps, monkeypatch):
    monkeypatch.setattr(real, "AUDIO", audio)
    monkeypatch.setattr(real, "TRANSCRIPTS", audio / "nowhere.txt")
    monkeypatch.setattr(real, "STAMPS", stamps)
    chosen, missing = real_items("qwen2.5-omni", count=2)
    assert [item.task for item in chosen] == ["described pictures"] * 2
    assert [message for message in missing if "asterisk-core-sounds-en with" in message] == missing != []
    monkeypatch.setattr(real, "TRANSCRIPTS", audio / "core-sounds-en.txt")
    chosen, missing = real_items("qwen2.5-omni", count=2)
    assert [item.task for item in chosen] == ["described pictures"] * 2 + ["recorded speech"] * 2
    assert missing == []
    chosen, missing = real_items("qwen3-vl", count=2)  # a family without audio
    assert ([item.task for item in chosen], missing) == (["described pictures"] * 2, [])
    monkeypatch.setattr(real, "STAMPS", stamps / "nowhere")
    chosen, missing = real_items("qwen3-vl")
    assert (chosen, len(missing)) == ([], 1)
    assert "tuxpaint-stamps-default" in missing[0]
