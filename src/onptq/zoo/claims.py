"""Claims of a caption, and whether its scene makes them true."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onptq.evaluate.tasks import Grade
from onptq.zoo.language import (
    BESIDE,
    COLOR_WORDS,
    GROUND_WORDS,
    GROUNDED,
    NUMBERS,
    READS,
    ROWS,
    SHAPE_WORDS,
    SIZE_WORDS,
    Synonyms,
)
from onptq.zoo.scenes import Scene


@dataclass(frozen=True)
class Claim:
    """One checkable statement of a caption: a thing with its colour, a size, a place, a relation, a sign, a count."""

    kind: str
    values: tuple[str, ...]


def _names(words: Synonyms) -> dict[str, str]:
    return {word: name for name, synonyms in words.items() for word in synonyms}


COLOR_OF, SHAPE_OF = _names(COLOR_WORDS), _names(SHAPE_WORDS)
GROUND_OF = _names(GROUND_WORDS)
SIZE_OF = {word: "large" if large else "small" for large, words in SIZE_WORDS.items() for word in words}


def _any(words: dict[str, str]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


NOUN = re.compile(rf"\b(?:({_any(SIZE_OF)}) )?({_any(COLOR_OF)}) ({_any(SHAPE_OF)})\b")
RELATION = re.compile(r"\b(right of|left of|below|under|beneath|above|over|on top of)\b")
PLACE = re.compile(
    r"\b(?:in|at|on|near|along) the (top|upper|bottom|lower|middle|center|left|right)(?: (left|right))?\b(?! of)"
)
SIGN = re.compile(rf"(?:{'|'.join(READS)}) ([A-Z0-9]+)", re.IGNORECASE)
COUNT = re.compile(rf"\b({'|'.join(NUMBERS)}) things\b")
GROUND = re.compile(rf"(?:{'|'.join(GROUNDED)}) ({_any(GROUND_OF)})\b")


def claims(caption: str) -> list[Claim]:
    """The statements of a caption that its scene can confirm or refute, read clause by clause."""
    made: list[Claim] = [Claim("sign", (text.upper(),)) for text in SIGN.findall(caption)]
    for clause in re.split(r"[.,;]", caption.lower()):
        nouns = list(NOUN.finditer(clause))
        for noun in nouns:
            size, color, shape = noun.groups()
            made.append(Claim("thing", (COLOR_OF[color], SHAPE_OF[shape])))
            if size:
                made.append(Claim("size", (COLOR_OF[color], SHAPE_OF[shape], SIZE_OF[size])))
        relation = RELATION.search(clause)
        if len(nouns) == 2 and relation:
            ends = [name for noun in nouns for name in (COLOR_OF[noun[2]], SHAPE_OF[noun[3]])]
            made.append(Claim("beside", (*ends, relation[1])))
        elif len(nouns) == 1 and (where := PLACE.search(clause)):
            color, shape = nouns[0].groups()[1:]
            made.append(Claim("place", (COLOR_OF[color], SHAPE_OF[shape], *_cell(where))))
        made += [Claim("count", (word,)) for word in COUNT.findall(clause)]
        made += [Claim("ground", (GROUND_OF[word],)) for word in GROUND.findall(clause)]
    return made


def _cell(where: re.Match[str]) -> tuple[str, str]:
    words = {where[1], where[2]}
    row = 0 if words & set(ROWS[0]) else 2 if words & set(ROWS[2]) else 1
    return str(row), str(0 if "left" in words else 2 if "right" in words else 1)


def holds(claim: Claim, scene: Scene) -> bool:
    """Whether the claim is true of the scene."""
    values = claim.values
    if claim.kind == "sign":
        return any(sign.text == values[0] for sign in scene.signs)
    if claim.kind == "count":
        return NUMBERS.index(values[0]) == len(scene.things)
    if claim.kind == "ground":
        return values[0] == scene.ground
    named = scene.find(color=values[0], shape=values[1])
    if claim.kind == "size":
        return any(thing.large == (values[2] == "large") for thing in named)
    if claim.kind == "place":
        return any(thing.cell == (int(values[2]), int(values[3])) for thing in named)
    if claim.kind == "beside":
        step = next(step for step, words in BESIDE.items() if values[4] in words)
        others = scene.find(color=values[2], shape=values[3])
        return any((a.row - b.row, a.col - b.col) == step for a in named for b in others)
    return bool(named)


def grade_caption(caption: str, scene: Scene) -> Grade:
    """The number of true claims out of all claims; a caption without claims scores 0."""
    made = claims(caption)
    return Grade(float(sum(holds(claim, scene) for claim in made)), float(max(1, len(made))))
