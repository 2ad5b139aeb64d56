"""Questions about a scene: four options over an image, reading a sign, and short answers that may be impossible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from onptq.zoo.scenes import COLORS, Scene, Sign, Thing, sample_scene, sample_sign, sign_words
from onptq.zoo.sprites import SHAPES

LETTERS = "ABCD"
UNANSWERABLE = "unanswerable"
TRIES = 40  # random walks or statements before a question of that kind is given up
LISTEN = "Answer what you hear."  # the text beside a spoken question
STEPS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
NUMBERS = tuple(map(str, range(17)))
ROWS, COLS = ("top", "middle", "bottom"), ("left", "center", "right")

READ = ("What does the {which}sign say?", "Read the {which}sign.", "What is written on the {which}sign?")


@dataclass(frozen=True)
class Question:
    text: str
    answer: str
    kind: str


def place_name(row: int, col: int) -> str:
    return "center" if (row, col) == (1, 1) else f"{ROWS[row]} {COLS[col]}"


def name(thing: Thing) -> str:
    return f"{thing.color} {thing.shape}"


def plural(shape: str) -> str:
    return {"fish": "fish", "box": "boxes", "cross": "crosses"}.get(shape, f"{shape}s")


def ask_choice(scene: Scene, rng: Random) -> Question:
    """A question that takes a reasoning step, with four options of which one is right."""
    kind, (text, right, wrong) = _reason(scene, rng, list(CHOICES))
    return _with_options(text, right, wrong, kind, rng)


def ask_open(scene: Scene, rng: Random) -> Question:
    """The same kind of question without options: the answer is the word itself."""
    kind, (text, right, _) = _reason(scene, rng, [kind for kind in CHOICES if kind != "true"])
    return Question(text, right, kind)


def _reason(scene: Scene, rng: Random, kinds: list[str]) -> tuple[str, tuple[str, str, Sequence[str]]]:
    rng.shuffle(kinds)
    for kind in kinds:
        question = CHOICES[kind](scene, rng)
        if question is not None:
            return kind, question
    raise AssertionError("counting is always possible")


def _with_options(text: str, right: str, wrong: Sequence[str], kind: str, rng: Random) -> Question:
    options = [right, *rng.sample(sorted(set(wrong) - {right}), 3)]
    rng.shuffle(options)
    listed = "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True))
    return Question(text + listed, LETTERS[options.index(right)], kind)


Options = tuple[str, str, Sequence[str]] | None


def _beside(scene: Scene, rng: Random) -> Options:
    pairs = [
        (thing, other, word)
        for other in scene.unique
        for word in STEPS
        if (thing := _step(scene, other, word)) is not None
    ]
    if not pairs:
        return None
    thing, other, word = rng.choice(pairs)
    others = [name(one) for one in scene.things if one != thing] + _strangers(scene, rng, 3)
    return f"What is directly {word} the {name(other)}?", name(thing), others


def _hop(scene: Scene, rng: Random) -> Options:
    """A question about the colour at the end of two or three moves."""
    for _ in range(TRIES if scene.unique else 0):
        start = rng.choice(scene.unique)
        words = rng.choices(list(STEPS), k=rng.randint(2, 3))
        walk = [start]
        for word in words:
            following = _step(scene, walk[-1], word)
            if following is None or following in walk:
                break
            walk.append(following)
        if len(walk) == len(words) + 1:
            path = ", then ".join([f"{words[0]} it", *(f"{word} that" for word in words[1:])])
            text = f"Start at the {name(start)}. Go to what is {path}. Which color is it?"
            return text, walk[-1].color, list(COLORS)
    return None


def _step(scene: Scene, thing: Thing, word: str) -> Thing | None:
    row, col = STEPS[word]
    return scene.at(thing.row + row, thing.col + col)


def _count(scene: Scene, rng: Random) -> Options:
    """A question about how many things have a colour, shape or size, in the image or on one side of a thing."""
    kinds: dict[str, Callable[[Thing], bool]] = {"large things": lambda thing: thing.large}
    kinds["small things"] = lambda thing: not thing.large
    for color in sorted({thing.color for thing in scene.things}):
        kinds[f"{color} things"] = lambda thing, color=color: thing.color == color  # type: ignore[misc]
        kinds[f"large {color} things"] = lambda thing, color=color: thing.color == color and thing.large  # type: ignore[misc]
    for shape in sorted({thing.shape for thing in scene.things}):
        kinds[plural(shape)] = lambda thing, shape=shape: thing.shape == shape  # type: ignore[misc]
    what = rng.choice(list(kinds))
    counted = [thing for thing in scene.things if kinds[what](thing)]
    where = "there"
    if scene.unique and rng.random() < 0.5:
        mark, word = rng.choice(scene.unique), rng.choice(list(STEPS))
        where = f"{word} the {name(mark)}"
        counted = [thing for thing in counted if lies(thing, word, mark)]
    return f"How many {what} are {where}?", NUMBERS[len(counted)], NUMBERS[: max(6, len(counted) + 2)]


def lies(a: Thing, word: str, b: Thing) -> bool:
    """Whether `a` is anywhere left of, right of, above or below `b`."""
    row, col = STEPS[word]
    return (a.row - b.row) * row > 0 or (a.col - b.col) * col > 0


def _most(scene: Scene, rng: Random) -> Options:
    counts = {color: len(scene.find(color=color)) for color in COLORS}
    best = max(counts.values())
    leaders = [color for color, count in counts.items() if count == best]
    if len(leaders) > 1 or best < 2:
        return None
    return "Which color is the most frequent?", leaders[0], list(COLORS)


def _same(scene: Scene, rng: Random) -> Options:
    """A question about another thing with the colour of a thing whose shape is unique."""
    ways = []
    for thing in scene.things:
        twins = [one for one in scene.find(color=thing.color) if one != thing]
        if len(scene.find(shape=thing.shape)) == 1 and len({one.shape for one in twins}) == 1:
            ways.append((thing, twins[0]))
    if not ways:
        return None
    thing, twin = rng.choice(ways)
    others = [one.shape for one in scene.things if one.color != thing.color] + rng.sample(SHAPES, 5)
    wrong = list(dict.fromkeys(shape for shape in others if shape not in (twin.shape, thing.shape)))[:4]
    return f"What has the same color as the {thing.shape}?", twin.shape, wrong


def _true(scene: Scene, rng: Random) -> Options:
    """A question about which of four statements is true; the false ones name things of the scene too."""
    right, wrong = None, set[str]()
    for _ in range(TRIES if len(scene.unique) > 1 else 0):
        a, b = rng.sample(scene.unique, 2)
        word = rng.choice(list(STEPS))
        statement = f"{name(a)} {word} {name(b)}"
        if not lies(a, word, b):
            wrong.add(statement)
        elif right is None:
            right = statement
        if right is not None and len(wrong) >= 3:
            return "Which is true?", right, sorted(wrong)
    return None


def _sum(scene: Scene, rng: Random) -> Options:
    """A question about the sum of the numbers on two signs."""
    numbers = [int(sign.text) for sign in scene.signs if sign.text.isdigit()]
    if len(numbers) != 2:
        return None
    total = sum(numbers)
    return "What is the sum of the two numbers?", str(total), [str(total + delta) for delta in (-10, -2, -1, 1, 2, 10)]


def _strangers(scene: Scene, rng: Random, count: int) -> list[str]:
    """Names of things that are not in the scene, those of its colours and shapes first."""
    present = set(map(name, scene.things))
    colors, shapes = {thing.color for thing in scene.things}, {thing.shape for thing in scene.things}
    likely = [f"{color} {shape}" for color in sorted(colors) for shape in sorted(shapes)]
    rng.shuffle(likely)
    others = [f"{color} {shape}" for color in rng.sample(list(COLORS), 4) for shape in rng.sample(SHAPES, 4)]
    return [text for text in dict.fromkeys(likely + others) if text not in present][:count]


CHOICES: dict[str, Callable[[Scene, Random], Options]] = {
    "beside": _beside,
    "hop": _hop,
    "most": _most,
    "same": _same,
    "true": _true,
    "sum": _sum,
    "count": _count,
}


def ask_short(scene: Scene, rng: Random) -> Question:
    """A question of one to three words' answer; where the image does not tell, the answer is `unanswerable`."""
    kind = rng.choice(list(SHORTS))
    text, answer = SHORTS[kind](scene, rng)
    return Question(f"{text} Answer briefly.", answer, UNANSWERABLE if answer == UNANSWERABLE else kind)


def ask_spoken(scene: Scene, rng: Random) -> tuple[str, Question]:
    """The words of a spoken question, and the question with its answer."""
    kind = rng.choice(list(SHORTS))
    text, answer = SHORTS[kind](scene, rng)
    words = text.lower().removesuffix("?")
    return words, Question(LISTEN, answer, UNANSWERABLE if answer == UNANSWERABLE else kind)


def _one(things: list[Thing], answer: Callable[[Thing], str]) -> str:
    return answer(things[0]) if len(things) == 1 else UNANSWERABLE


def _shape(scene: Scene, rng: Random) -> str:
    """A shape: of the scene with probability 0.8, else any."""
    return rng.choice(scene.things).shape if scene.things and rng.random() < 0.8 else rng.choice(list(SHAPES))


def _color_of(scene: Scene, rng: Random) -> tuple[str, str]:
    shape = _shape(scene, rng)
    return f"What color is the {shape}?", _one(scene.find(shape=shape), lambda thing: thing.color)


def _where(scene: Scene, rng: Random) -> tuple[str, str]:
    shape = _shape(scene, rng)
    return f"Where is the {shape}?", _one(scene.find(shape=shape), lambda thing: place_name(*thing.cell))


def _what_at(scene: Scene, rng: Random) -> tuple[str, str]:
    cells = [thing.cell for thing in scene.things] if rng.random() < 0.8 else list(product(range(3), repeat=2))
    row, col = rng.choice(cells)
    thing = scene.at(row, col)
    where = "in the center" if (row, col) == (1, 1) else f"at the {place_name(row, col)}"
    return f"What is {where}?", name(thing) if thing else UNANSWERABLE


def _how_large(scene: Scene, rng: Random) -> tuple[str, str]:
    shape = _shape(scene, rng)
    return f"Is the {shape} large or small?", _one(
        scene.find(shape=shape), lambda thing: "large" if thing.large else "small"
    )


def _how_many(scene: Scene, rng: Random) -> tuple[str, str]:
    shape = _shape(scene, rng)
    return f"How many {plural(shape)} are there?", NUMBERS[len(scene.find(shape=shape))]


SHORTS: dict[str, Callable[[Scene, Random], tuple[str, str]]] = {
    "color": _color_of,
    "where": _where,
    "what": _what_at,
    "size": _how_large,
    "count": _how_many,
}


def ask_read(scene: Scene, rng: Random, sign: Sign | None = None) -> Question:
    """A question about the text of `sign`, or of a random sign."""
    sign = sign or rng.choice(scene.signs)
    first = sign == scene.signs[0]
    which = "" if len(scene.signs) == 1 else "upper " if first else "lower "
    return Question(rng.choice(READ).format(which=which), sign.text, "word" if sign.text in sign_words() else "string")


def choice_scene(rng: Random, split: str) -> Scene:
    """A scene of few things, or of many on a finer grid, in a small palette; with probability 0.12 with two numbers."""
    if rng.random() < 0.12:
        signs = ["".join(rng.choices("23456789", k=2)) for _ in range(2)]
        return sample_scene(rng, split, things=(2, 3), signs=signs, palette=rng.randint(3, 5))
    if rng.random() < 0.5:
        return sample_scene(rng, split, things=(4, 7), palette=rng.randint(3, 6))
    return sample_scene(rng, split, things=(7, 12), palette=rng.randint(4, 7), grid=4)


def short_scene(rng: Random, split: str) -> Scene:
    return sample_scene(rng, split, things=(3, 7), palette=rng.choice((5, 6, 7, 8)))


def read_scene(rng: Random, split: str) -> Scene:
    signs = [sample_sign(rng) for _ in range(rng.choice((1, 2, 2)))]
    return sample_scene(rng, split, things=(0, 3), signs=signs, faint=rng.random() < 0.5)


def caption_scene(rng: Random, split: str) -> Scene:
    signs = [sample_sign(rng)] if rng.random() < 0.3 else ()
    return sample_scene(rng, split, things=(3, 6), signs=signs)
