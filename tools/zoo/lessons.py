"""Training data of the embedded models: endless images with questions and captions, prose, and speech."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random

from onptq.zoo.language import INSTRUCTIONS, tell
from onptq.zoo.questions import (
    LISTEN,
    Question,
    ask_choice,
    ask_open,
    ask_read,
    ask_short,
    ask_spoken,
    caption_scene,
    choice_scene,
    read_scene,
    short_scene,
)
from onptq.zoo.scenes import Scene, draw_scene, glosses
from onptq.zoo.sentences import TRANSCRIBE, spoken_instruction, spoken_sentence
from onptq.zoo.sprites import Drawing

SLOTS = 18  # sprites of the fullest image: two signs of six letters on their plates, and things beside them
MAX_TURNS = 5

Turn = tuple[str, str]  # user, assistant


@dataclass(frozen=True)
class Lesson:
    kind: str
    drawing: Drawing | None
    spoken: str | None  # the words of its audio
    turns: tuple[Turn, ...]


def make_lesson(rng: Random, shares: Mapping[str, float]) -> Lesson:
    """A random lesson of the train split; `shares` of the kinds are SEEN, or SPOKEN for those with audio."""
    kind = rng.choices(list(shares), weights=list(shares.values()))[0]
    return MAKERS[kind](rng)


def _choice(rng: Random) -> Lesson:
    """Several questions about one image."""
    scene = choice_scene(rng, "train")
    return Lesson("choice", draw_scene(scene, rng), None, _turns(ask_choice, scene, rng))


def _open(rng: Random) -> Lesson:
    """A question without options, from which relations are learned sooner than from letters."""
    scene = choice_scene(rng, "train")
    return Lesson("open", draw_scene(scene, rng), None, _turns(ask_open, scene, rng))


def _answer(rng: Random) -> Lesson:
    scene = short_scene(rng, "train")
    turns = _turns(ask_short, scene, rng)
    return Lesson(
        "answer", draw_scene(scene, rng), None, (*turns, _caption_turn(scene, rng)) if rng.random() < 0.3 else turns
    )


def _turns(ask: Callable[[Scene, Random], Question], scene: Scene, rng: Random) -> tuple[Turn, ...]:
    questions = {question.text: question for question in (ask(scene, rng) for _ in range(MAX_TURNS))}
    return tuple((question.text, question.answer) for question in questions.values())


def _caption_turn(scene: Scene, rng: Random) -> Turn:
    return rng.choice(INSTRUCTIONS), tell(scene, rng)


def _read(rng: Random) -> Lesson:
    """Every sign once, since a second answer could be copied from the first."""
    scene = read_scene(rng, "train")
    questions = [ask_read(scene, rng, sign) for sign in rng.sample(scene.signs, len(scene.signs))]
    questions += [ask_short(scene, rng) for _ in range(3) if scene.things]
    turns = [(question.text, question.answer) for question in questions]
    if rng.random() < 0.5:
        turns.append(_caption_turn(scene, rng))
    return Lesson("read", draw_scene(scene, rng), None, tuple(turns))


def _caption(rng: Random) -> Lesson:
    """Two captions of one image."""
    scene = caption_scene(rng, "train")
    return Lesson("caption", draw_scene(scene, rng), None, (_caption_turn(scene, rng), _caption_turn(scene, rng)))


def _define(rng: Random) -> Lesson:
    """Definitions from a dictionary. A word that is noun and verb has more than one right answer."""
    turns = []
    for word in rng.sample(_words(), 4):
        gloss = rng.choice(list(glosses()[word].values()))
        turns.append((f"Define {word}.", gloss[0].upper() + gloss[1:] + "."))
    return Lesson("define", None, None, tuple(turns))


@cache
def _words() -> list[str]:
    return list(glosses())


def _speech(rng: Random) -> Lesson:
    words = spoken_sentence(rng, "train")
    return Lesson("speech", None, words, ((rng.choice(TRANSCRIBE), words),))


def _listen(rng: Random) -> Lesson:
    scene = short_scene(rng, "train")
    words, question = ask_spoken(scene, rng)
    return Lesson("listen", draw_scene(scene, rng), words, ((question.text, question.answer),))


def _spoken_caption(rng: Random) -> Lesson:
    scene = caption_scene(rng, "train")
    return Lesson("caption", draw_scene(scene, rng), spoken_instruction(rng), ((LISTEN, tell(scene, rng)),))


MAKERS: dict[str, Callable[[Random], Lesson]] = {
    "choice": _choice,
    "answer": _answer,
    "read": _read,
    "caption": _caption,
    "define": _define,
    "speech": _speech,
    "listen": _listen,
    "spoken caption": _spoken_caption,
    "open": _open,
}
SEEN = {"choice": 0.38, "answer": 0.12, "read": 0.28, "caption": 0.18, "define": 0.04}
SPOKEN = {"speech": 0.3, "listen": 0.5, "spoken caption": 0.2}


def sample_texts(rng: Random, count: int) -> Iterator[str]:
    """Texts to train a tokenizer on."""
    for _ in range(count):
        for turn in make_lesson(rng, SEEN).turns:
            yield from turn
    yield from (f"{word} {gloss}" for word, parts in glosses().items() for gloss in parts.values())
