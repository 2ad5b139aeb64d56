"""From lessons to the rows of a batch as numpy arrays: token ids, a mask of answers, packed images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onptq.errors import OnPTQError
from onptq.zoo.speech import Utterance, speak
from onptq.zoo.tokens import TokenSet
from onptq.zoo.voices import sample_voice
from tools.zoo.lessons import MAKERS, SLOTS, SPOKEN, Lesson, make_lesson
from tools.zoo.train.forward import FRAMES, IMAGE_TOKENS, MEDIA_AT
from tools.zoo.train.mel import HOP
from tools.zoo.train.tokenizer import Speller

LENGTH = 160  # tokens of a row
SLACK = 3.5  # standard deviations by which a batch may have more targets than usual before some are left out
SAMPLES = FRAMES * HOP
TRANSCRIPT = 40  # tokens of the longest
KINDS = tuple(MAKERS)

Arrays = dict[str, NDArray[Any]]
Row = tuple[list[int], list[int]]  # ids, and for each of them how many tokens its answer has (0: not part of one)


@dataclass(frozen=True)
class Layout:
    """The family's special tokens around images, audio clips and turns."""

    spell: Speller
    pad: int
    user: list[int]
    assistant: list[int]
    end: int
    newline: list[int]
    image: list[int]
    audio: tuple[int, int, int] | None  # start, one token, end

    @classmethod
    def of(cls, words: Any, tokens: TokenSet) -> Layout:
        ids = {token: words.get_vocab_size(with_added_tokens=False) + i for i, token in enumerate(tokens.special)}
        spell, start = Speller(words), ids["<|im_start|>"]
        roles = tokens.roles or {
            "vision_bos_token": "<|vision_start|>",
            "image_token": "<|image_pad|>",
            "vision_eos_token": "<|vision_end|>",
        }
        first, patch, last = (ids[roles[name]] for name in ("vision_bos_token", "image_token", "vision_eos_token"))
        audio_ids = [
            ids[roles[name]] for name in ("audio_bos_token", "audio_token", "audio_eos_token") if name in roles
        ]
        layout = cls(
            spell,
            ids[tokens.pad],
            [start, *spell("user\n")],
            [start, *spell("assistant\n")],
            ids["<|im_end|>"],
            spell("\n"),
            [first, *[patch] * IMAGE_TOKENS, last],
            (audio_ids[0], audio_ids[1], audio_ids[2]) if audio_ids else None,
        )
        if len(layout.user) != MEDIA_AT - 1:
            raise OnPTQError(f"the tokenizer writes a user's turn as {layout.user}; expected {MEDIA_AT - 1} tokens")
        return layout

    def row(self, lesson: Lesson, length: int, audio: int = 0) -> Row | None:
        """Turns that do not fit are left out; None when not even the first does. `audio`: its number of tokens."""
        ids = list(self.user)
        if lesson.drawing is not None:
            ids += self.image
        if audio and self.audio is not None:
            start, token, end = self.audio
            ids += [start, *[token] * audio, end]
        answers = [0] * len(ids)
        for index, (question, answer) in enumerate(lesson.turns):
            question_ids = [*self.spell(question), self.end, *self.newline, *self.assistant]
            if index:
                question_ids = [*self.newline, *self.user, *question_ids]
            answer_ids = [*self.spell(answer), self.end]
            if len(ids) + len(question_ids) + len(answer_ids) > length:
                break
            ids += question_ids + answer_ids
            answers += [0] * len(question_ids) + [min(len(answer_ids), 255)] * len(answer_ids)
        return (ids, answers) if any(answers) else None


def make_images(layout: Layout, seed: int, step: int, size: int, targets: int, shares: Mapping[str, float]) -> Arrays:
    """The batch of one step with its `targets`, the same for the same seed and step in any process."""
    lessons, rows = _draw(layout, Random(f"{seed}/{step}"), size, shares)
    text = _rows(rows, layout.pad)
    return {"ids": text["ids"], **find_targets(**text, slots=targets), **_drawing_arrays(lessons)}


def count_targets(layout: Layout, size: int, shares: Mapping[str, float]) -> int:
    """A number of targets that nearly every batch of this size fits into: fixed, so that shapes do not change."""
    _, rows = _draw(layout, Random("targets"), 512, shares)
    return target_slots(_rows(rows, layout.pad)["answers"], size)


def target_slots(answers: NDArray[Any], size: int) -> int:
    counts = (answers > 0).sum(1)
    usual = counts.mean() * size + SLACK * counts.std() * size**0.5
    return min(-(-int(usual) // 64) * 64, size * LENGTH)


def _draw(layout: Layout, rng: Random, size: int, shares: Mapping[str, float]) -> tuple[list[Lesson], list[Row]]:
    lessons: list[Lesson] = []
    rows: list[Row] = []
    while len(rows) < size:
        lesson = make_lesson(rng, shares)
        row = layout.row(lesson, LENGTH)
        if row is not None:
            lessons.append(lesson)
            rows.append(row)
    return lessons, rows


def make_audio(layout: Layout, seed: int, part: int, size: int) -> Arrays:
    """Lessons with audio, spoken by voices of the train split; `wave` is int16 [size, SAMPLES], `samples` its
    lengths."""
    rng = Random(f"{seed}/sound/{part}")
    lessons: list[Lesson] = []
    rows: list[Row] = []
    waves, transcripts = [], []
    while len(rows) < size:
        lesson = make_lesson(rng, SPOKEN)
        spoken = lesson.spoken or ""
        try:
            wave = speak(Utterance(spoken, sample_voice(rng, "train")))
        except OnPTQError:  # a slow voice needs more than the model's four seconds for some sentences
            continue
        transcript = layout.spell(spoken)[:TRANSCRIPT]
        row = layout.row(lesson, LENGTH, _tokens(len(wave)))
        if row is not None:
            lessons.append(lesson)
            rows.append(row)
            waves.append(wave)
            transcripts.append(transcript)
    arrays = _rows(rows, layout.pad) | _drawing_arrays(lessons)
    arrays["wave"] = _padded(waves, SAMPLES, np.int16, 0)
    arrays["samples"] = np.array([len(wave) for wave in waves], np.int32)
    arrays["transcript"] = _padded(transcripts, TRANSCRIPT, np.int16, 0)
    arrays["words"] = np.array([len(transcript) for transcript in transcripts], np.int32)
    return arrays


def frames_of(samples: int) -> int:
    """Mel frames of an audio clip, as the Whisper feature extractor's mask counts them."""
    return -(-samples // HOP)


def _tokens(samples: int) -> int:
    return (frames_of(samples) + 1) // 2 // 2


def _rows(rows: Sequence[Row], pad: int) -> Arrays:
    return {
        "ids": _padded([ids for ids, _ in rows], LENGTH, np.int16, pad),
        "answers": _padded([answers for _, answers in rows], LENGTH, np.uint8, 0),
    }


def find_targets(ids: NDArray[Any], answers: NDArray[Any], slots: int) -> Arrays:
    """Where the loss is taken: `spots` [room] in the flattened batch, the `next` token there and its answer's length.

    Spots left over have length 0 and all are distinct, so that no gradient is added twice to one place.
    """
    following = np.zeros_like(answers)
    following[:, :-1] = answers[:, 1:]
    wanted = following.ravel() > 0
    spots = np.concatenate([np.flatnonzero(wanted), np.flatnonzero(~wanted)])[:slots]
    return {
        "spots": spots.astype(np.int32),
        "next": np.roll(ids.ravel(), -1)[spots],
        "lengths": following.ravel()[spots],
    }


def _padded(rows: Sequence[Any], length: int, dtype: Any, fill: int) -> NDArray[Any]:
    array = np.full((len(rows), length), fill, dtype)
    for index, row in enumerate(rows):
        array[index, : len(row)] = row
    return array


def _drawing_arrays(lessons: Sequence[Lesson]) -> Arrays:
    """`sprites.pack` for the whole batch at once."""
    sprites = np.zeros((len(lessons), SLOTS, 8), np.int16)
    sprites[..., 0] = -1
    background = np.zeros((len(lessons), 3), np.uint8)
    places, values = [], []
    for index, lesson in enumerate(lessons):
        if lesson.drawing is not None:
            background[index] = lesson.drawing.background
            painted = lesson.drawing.sprites
            places += [(index, slot) for slot in range(len(painted))]
            values += [(one.cell, one.x, one.y, one.w, one.h, *one.rgb) for one in painted]
    if places:
        rows, slots = np.array(places).T
        sprites[rows, slots] = values
    kinds = np.array([KINDS.index(lesson.kind) for lesson in lessons], np.uint8)
    seen = np.array([lesson.drawing is not None for lesson in lessons])
    return {"sprites": sprites, "background": background, "kinds": kinds, "seen": seen}
