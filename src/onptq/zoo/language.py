"""Captions of a scene, in many wordings.

Every caption has one of four styles. A style prefers some words over their synonyms and decides how much is described and in
which order. The prompt does not name it, so the next token is rarely certain, and early tokens influence later ones.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from random import Random

from onptq.zoo.scenes import Scene, Thing, glosses

Synonyms = Mapping[str, tuple[str, ...]]

COLOR_WORDS: Synonyms = {
    "red": ("red", "crimson", "scarlet"),
    "orange": ("orange", "amber"),
    "yellow": ("yellow", "golden"),
    "green": ("green", "emerald"),
    "blue": ("blue", "azure", "navy"),
    "purple": ("purple", "violet"),
    "brown": ("brown", "chestnut"),
    "black": ("black", "dark"),
}
SHAPE_WORDS: Synonyms = {
    "circle": ("circle", "disc", "dot"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "heart": ("heart",),
    "cross": ("cross", "plus"),
    "diamond": ("diamond", "rhombus"),
    "ring": ("ring", "hoop"),
    "moon": ("moon", "crescent"),
    "arrow": ("arrow",),
    "house": ("house", "cottage", "hut"),
    "tree": ("tree", "pine"),
    "fish": ("fish",),
    "cup": ("cup", "mug"),
    "flag": ("flag", "banner"),
    "bolt": ("bolt", "lightning"),
}
SIZE_WORDS = {True: ("large", "big", "huge"), False: ("small", "little", "tiny")}
GROUND_WORDS: Synonyms = {
    "white": ("white", "plain white"),
    "gray": ("gray", "pale gray"),
    "pink": ("pink", "soft pink"),
    "cream": ("cream", "pale cream"),
    "mint": ("mint", "mint green"),
    "sky": ("sky blue", "pale blue"),
}
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

ROWS = (("top", "upper"), ("middle", "center"), ("bottom", "lower"))
COLS = ("left", "", "right")
PLACES = {  # by distance of a cell from the middle: 0 the middle, 1 an edge, 2 a corner
    2: ("in the {row} {col} corner", "at the {row} {col}", "in the {row} {col}", "near the {row} {col} corner"),
    1: ("at the {edge}", "on the {edge} side", "along the {edge} edge", "near the {edge}"),
    0: ("in the middle", "in the center", "at the center", "right in the middle"),
}

STYLES = ("plain", "vivid", "precise", "simple")
OPENERS = (
    "the picture shows",
    "here we see",
    "this is a picture of",
    "in this picture there is",
    "you can see",
    "look at",
)
FIRST = ("there is", "we find", "one sees", "one can see", "there stands", "you will notice")
VERBS = ("is", "sits", "stands", "appears", "rests", "can be seen", "lies")
LINKS = (", while", ", and", ";", ".")
BESIDE = {
    (0, 1): ("to the right of", "right of", "just right of"),
    (0, -1): ("to the left of", "left of", "just left of"),
    (1, 0): ("below", "under", "beneath"),
    (-1, 0): ("above", "over", "on top of"),
}
READS = ("a sign reads", "the sign says", "a plate carries the letters", "on a sign is written", "a label spells")
GROUNDED = ("the ground is", "all of it is set on", "behind everything is", "the background is", "everything lies on")
COUNTS = ("there are {n} things in all", "that makes {n} things", "{n} things can be counted", "in total {n} things")
MOODS = (
    "nothing else is there",
    "the rest is empty",
    "it looks like a page from a book for children",
    "the arrangement seems quite random",
    "it is a calm and simple scene",
    "the things do not touch each other",
    "one could tell a story about it",
    "somebody must have placed them with care",
)

INSTRUCTIONS = (
    "Describe the picture.",
    "What do you see?",
    "Write a caption for this picture.",
    "Tell me about the picture.",
    "Describe what is shown here.",
    "Give a full description of the picture.",
    "What is in the picture?",
    "Describe the scene in your own words.",
    "Explain what can be seen here.",
    "Write down everything you see.",
)


class Teller:
    """Chooses among synonyms by a random style: one word about half of the time, each further one about half as often."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.style = rng.choice(STYLES)

    def choose(self, options: tuple[str, ...]) -> str:
        order, weights = _preferences(self.style, options)
        return self.rng.choices(order, cum_weights=weights)[0]

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability


@cache
def _preferences(style: str, options: tuple[str, ...]) -> tuple[list[str], list[float]]:
    order = sorted(options, key=lambda option: zlib.crc32(f"{style}/{option}".encode()))
    total, weights = 0.0, []
    for rank in range(len(order)):
        total += 0.55**rank
        weights.append(total)
    return order, weights


def tell(scene: Scene, rng: Random) -> str:
    """A random caption of the scene, of about 30 to 60 tokens."""
    teller = Teller(rng)
    things = list(scene.things)
    rng.shuffle(things)
    if teller.style == "precise" or teller.happens(0.25):
        things.sort(key=lambda thing: thing.cell)
    chosen = things[: 2 if len(things) > 3 and teller.style == "simple" else 4]
    text = _opening(teller, chosen[0]) if chosen else teller.choose(OPENERS[:2]) + " no things"
    for before, thing in pairwise(chosen):
        text += f"{teller.choose(LINKS)} {_clause(teller, thing, before)}"
    for extra in _extras(teller, scene, chosen):
        text += f"{teller.choose(('.', ';', ', and'))} {extra}"
    return _capitalize(text + ".")


def _opening(teller: Teller, thing: Thing) -> str:
    if teller.happens(0.6):
        return f"{teller.choose(OPENERS)} {_phrase(teller, thing)} {place(teller, thing)}"
    if teller.happens(0.5):
        return f"{place(teller, thing)} {teller.choose(FIRST)} {_phrase(teller, thing)}"
    return f"{_phrase(teller, thing)} {teller.choose(VERBS)} {place(teller, thing)}"


def _clause(teller: Teller, thing: Thing, before: Thing) -> str:
    step = (thing.row - before.row, thing.col - before.col)
    if step in BESIDE and teller.happens(0.6):
        other = f"the {teller.choose(COLOR_WORDS[before.color])} {teller.choose(SHAPE_WORDS[before.shape])}"
        return f"{_phrase(teller, thing)} {teller.choose(VERBS)} {teller.choose(BESIDE[step])} {other}"
    if teller.happens(0.35):
        return f"{place(teller, thing)} {teller.choose(FIRST)} {_phrase(teller, thing)}"
    return f"{_phrase(teller, thing)} {teller.choose(VERBS)} {place(teller, thing)}"


def _extras(teller: Teller, scene: Scene, chosen: list[Thing]) -> list[str]:
    extras = [f"{teller.choose(READS)} {sign.text}" for sign in scene.signs if teller.happens(0.9)]
    if len(chosen) == len(scene.things) and teller.happens(0.4):
        extras.append(teller.choose(COUNTS).format(n=NUMBERS[len(scene.things)]))
    if teller.happens(0.35 if teller.style != "vivid" else 0.7):
        extras.append(f"{teller.choose(GROUNDED)} {teller.choose(GROUND_WORDS[scene.ground])}")
    teller.rng.shuffle(extras)
    gloss = glosses().get(chosen[0].shape, {}).get("noun") if chosen else None
    if gloss and len(chosen) < 4 and teller.happens(0.25):
        extras.append(f"a {chosen[0].shape} is {gloss}")
    elif len(extras) + len(chosen) < 5 and teller.happens(0.8):
        extras.append(teller.choose(MOODS))
    return extras


def _phrase(teller: Teller, thing: Thing) -> str:
    size = f"{teller.choose(SIZE_WORDS[thing.large])} " if teller.happens(0.6) else ""
    noun = f"{size}{teller.choose(COLOR_WORDS[thing.color])} {teller.choose(SHAPE_WORDS[thing.shape])}"
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def place(teller: Teller, thing: Thing) -> str:
    distance = (thing.row != 1) + (thing.col != 1)
    edge = COLS[thing.col] or ROWS[thing.row][0]
    form = teller.choose(PLACES[distance])
    return form.format(row=teller.choose(ROWS[thing.row]), col=COLS[thing.col], edge=edge)


def _capitalize(text: str) -> str:
    return re.sub(r"(^|[.] )([a-z])", lambda match: match[1] + match[2].upper(), text)
