"""A small evaluation on real material: recorded human speech, and images with descriptions.

The speech is that of Asterisk's prompts, one woman's voice at a telephone's 8 kHz. The images are the stamps of Tux
Paint and, where its PNG files were unpacked, OpenMoji. The embedded models were not trained on such data: expect
choices near CHANCE and word error rates of 100% or more. The measurement is whether a quantized model gives the same
answers.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from onptq.data.audio import INSTALL
from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.tasks import Item, exact
from onptq.registry import FAMILIES
from onptq.zoo.questions import LETTERS
from onptq.zoo.sentences import TRANSCRIBE
from onptq.zoo.suite import SIDES, word_errors

AUDIO = Path("/usr/share/asterisk/sounds/en_US_f_Allison")
TRANSCRIPTS = Path("/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")
STAMPS = Path("/usr/share/tuxpaint/stamps")
OPENMOJI = "color/72x72"  # images of the OpenMoji repository, named after data/openmoji.json's hexcodes

RATE = 16_000  # Hz, what the audio towers take
SECONDS = 4.0  # of the longest audio clip in the training of the embedded models
WORDS = 8  # more would make prompts longer than any in the training of the embedded models
CHANCE = 1 / len(LETTERS)
QUESTION = "Which description fits the picture?"

REMARK = re.compile(r"\[.*?\]|<.*?>|\(.*?\)")  # in a transcript: about the audio, not spoken in it
SPOKEN_SIGNS = {"*": " star ", "#": " pound "}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Material:
    """Files with their words or descriptions; `missing` tells how to install absent ones."""

    items: Sequence[tuple[Path, str]]
    missing: str | None = None


def recorded_speech(folder: Path | None = None) -> Material:
    """WAV files of up to four seconds with their words, as Debian installs them or as Asterisk's archives unpack."""
    audio, listing = (AUDIO, TRANSCRIPTS) if folder is None else (folder, _listing(folder))
    if not listing.is_file():
        return Material(
            (), f"no transcripts at {listing}: install Debian's asterisk-core-sounds-en with its documentation"
        )
    recordings = [(audio / f"{name}.wav", words) for name, words in _transcripts(listing)]
    recordings = [(path, words) for path, words in recordings if path.is_file()]
    if not recordings:
        return Material((), f"no recorded speech in {audio}: install Debian's asterisk-core-sounds-en-wav")
    lengths = {path: _length(path) for path, _ in recordings}
    if find_spec("soxr") is None and any(rate != RATE for _, rate in lengths.values()):
        return Material((), f"the recordings in {audio} are not sampled at {RATE} Hz; resampling needs soxr: {INSTALL}")
    return Material(tuple((path, words) for path, words in recordings if 0 < lengths[path][0] <= SECONDS))


def described_images(stamps: Path | None = None, openmoji: Path | None = None) -> Material:
    """PNG files with a short description each: Tux Paint's stamps and, when its folder is given, OpenMoji."""
    stamps = STAMPS if stamps is None else stamps
    items = [*_stamps(stamps)]
    missing = [] if items else [f"no images in {stamps}: install Debian's tuxpaint-stamps-default"]
    if openmoji is not None:
        drawn = [*_openmoji(openmoji)]
        items += drawn
        missing += [] if drawn else [f"no PNG files in {openmoji / OPENMOJI}: OpenMoji's npm package has only SVG"]
    return Material(tuple(items), "; ".join(missing) or None)


def real_items(family: str, count: int | None = None, seed: int = 0) -> tuple[list[Item], list[str]]:
    """What is installed and a model of this family can be given, and messages about what is not there.

    With a `count`, so many of each kind."""
    if family not in SIDES:
        raise OnPTQError(f"the images are not cut to the size of {family!r}; expected one of {', '.join(SIDES)}")
    images = described_images()
    items, missing = image_items(images, SIDES[family], count, seed), [images.missing]
    if "audio" in FAMILIES[family].modalities:
        speech = recorded_speech()
        items, missing = items + speech_items(speech, count, seed), [*missing, speech.missing]
    return items, [message for message in missing if message]


def speech_items(material: Material, count: int | None = None, seed: int = 0) -> list[Item]:
    """Items to transcribe audio clips. A model's processor resamples them."""
    items = []
    for ordinal, (path, words) in enumerate(_sample(material.items, count, seed)):
        name = _name("recorded speech", path)
        media = Media(path, sha256(path.read_bytes()).hexdigest())
        prompt = Prompt(ordinal, name, _messages("audio", TRANSCRIBE[0]), audios=(media,))
        items.append(Item(name, "recorded speech", prompt, words, partial(word_errors, words), 40, "word errors"))
    return items


def image_items(material: Material, side: int, count: int | None = None, seed: int = 0) -> list[Item]:
    """Items with an image on a white square of `side` pixels, its description and those of three others."""
    descriptions = {description: _long_words(description) for _, description in material.items}
    items = []
    for ordinal, (path, description) in enumerate(_sample(material.items, count, seed)):
        name = _name("described pictures", path)
        rng = Random(f"{seed}/{name}")
        options = [description, *_others(descriptions, description, rng)]
        rng.shuffle(options)
        listed = "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True))
        data, right = _on_white(path, side), LETTERS[options.index(description)]
        media = Media(None, sha256(data).hexdigest(), data)
        prompt = Prompt(ordinal, name, _messages("image", QUESTION + listed), images=(media,))
        items.append(Item(name, "described pictures", prompt, right, exact(right), 4))
    return items


def normalise(transcript: str) -> str:
    """The spoken words, in lower case of a to z; empty where they are not known, as for long numbers."""
    text = REMARK.sub(" ", transcript).lower().replace("'", "")
    for sign, word in SPOKEN_SIGNS.items():
        text = text.replace(sign, word)
    text = re.sub(r"\b\d\b", lambda digit: DIGITS[int(digit[0])], text)
    return "" if re.search(r"\d", text) else " ".join(re.findall("[a-z]+", text))


def _listing(folder: Path) -> Path:
    plain = folder / TRANSCRIPTS.stem
    return plain if plain.is_file() else folder / TRANSCRIPTS.name


def _transcripts(listing: Path) -> Iterator[tuple[str, str]]:
    """Names and words of the lines `name: words`."""
    raw = listing.read_bytes()
    for line in (gzip.decompress(raw) if listing.suffix == ".gz" else raw).decode("utf-8").splitlines():
        name, colon, text = line.partition(":")
        words = normalise(text)
        if colon and words:
            yield name.strip(), words


def _length(path: Path) -> tuple[float, int]:
    """Seconds, and samples per second."""
    try:
        with wave.open(str(path)) as file:
            return file.getnframes() / file.getframerate(), file.getframerate()
    except (wave.Error, EOFError, ZeroDivisionError) as error:
        raise OnPTQError(f"{path} cannot be read ({error}); expected a PCM WAV file") from error


def _stamps(folder: Path) -> Iterator[tuple[Path, str]]:
    """Stamps with the first line of the text file beside each, which is English; translations follow there."""
    for path in sorted(folder.rglob("*.png")):
        text = path.with_suffix(".txt")
        if text.is_file():  # mirrored stamps have none
            yield from _described(path, text.read_text(encoding="utf-8").partition("\n")[0])


def _openmoji(folder: Path) -> Iterator[tuple[Path, str]]:
    listing = folder / "data" / "openmoji.json"
    for entry in json.loads(listing.read_text(encoding="utf-8")) if listing.is_file() else []:
        path = folder / OPENMOJI / f"{entry['hexcode']}.png"
        if not entry["skintone"] and path.is_file():  # the same image again, in other colours
            yield from _described(path, entry["annotation"])


def _described(path: Path, description: str) -> Iterator[tuple[Path, str]]:
    description = description.strip().removesuffix(".")
    if 0 < len(description.split()) <= WORDS:
        yield path, description


def _sample(items: Sequence[tuple[Path, str]], count: int | None, seed: int) -> Sequence[tuple[Path, str]]:
    return items if count is None or count >= len(items) else Random(seed).sample(items, count)


def _others(descriptions: Mapping[str, set[str]], right: str, rng: Random) -> list[str]:
    """Three descriptions that share no long word with the right one, so that they are not right too."""
    others = sorted(
        other for other, words in descriptions.items() if other != right and not words & descriptions[right]
    )
    if len(others) < len(LETTERS) - 1:
        raise OnPTQError(
            f"{len(others)} descriptions differ from {right!r}; expected at least {len(LETTERS) - 1} to choose from"
        )
    return rng.sample(others, len(LETTERS) - 1)


def _long_words(description: str) -> set[str]:
    words = re.findall(r"\w+", description.lower())
    return {word.removesuffix("s") for word in words if len(word) > 3} or set(words)


def _on_white(path: Path, side: int) -> bytes:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            image = file.convert("RGBA")
    except (UnidentifiedImageError, OSError) as error:
        raise OnPTQError(f"{path} cannot be read as an image: {error}") from error
    white = Image.new("RGBA", image.size, "white")
    square = ImageOps.pad(Image.alpha_composite(white, image).convert("RGB"), (side, side), color="white")
    png = io.BytesIO()
    square.save(png, "PNG")
    return png.getvalue()


def _name(task: str, path: Path) -> str:
    return f"{task}/{path.parent.name}/{path.stem}"


def _messages(kind: str, text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}]
