"""Sentences to be spoken: short, without homophones, with words that cannot be guessed from one another."""

from __future__ import annotations

import re
from hashlib import sha256
from random import Random

from onptq.zoo.language import INSTRUCTIONS
from onptq.zoo.splits import check_split

TRANSCRIBE = ("Write down what you hear.", "Transcribe the speech.", "What is being said?")
SLOTS = {
    "name": "maria peter anna david susan robert emma thomas julia oliver sophie daniel laura victor helen george",
    "number": "three five six seven nine ten eleven twelve twenty thirty forty fifty",
    "colour": "red green blue yellow orange purple black white brown pink silver golden",
    "things": "cups books chairs apples keys boxes letters candles bottles pencils shoes tickets baskets buttons plates",
    "thing": "lamp radio window door table bicycle camera umbrella guitar blanket mirror suitcase ladder basket clock",
    "place": "kitchen garden station library market office hospital bridge school museum airport village bakery hotel",
    "animals": "dogs cats horses sheep rabbits birds ducks goats monkeys elephants",
    "food": "bread cheese rice soup honey coffee lemon pasta butter chocolate salad potatoes",
    "weather": "sunny rainy windy cloudy foggy cold warm frozen stormy dry",
    "day": "monday tuesday wednesday thursday friday saturday sunday tomorrow tonight",
    "hour": "three five six seven nine ten eleven twelve",
    "minutes": "half quarter ten twenty",
    "size": "small large heavy broken empty old new wooden clean dirty",
    "act": "open shut wash move repair paint find sell hide follow",
    "person": "mother father brother sister teacher doctor cousin uncle",
    "where": "near behind under above beside",
    "job": "sing dance swim cook travel rest wait study",
}
FORMS = (
    "please bring {number} {colour} {things} to the {place}",
    "call {name} at {minutes} past {hour}",
    "{name} has {number} {size} {things}",
    "the {colour} {thing} is {where} the {place}",
    "{act} the {size} {thing} {day}",
    "{name} and {name} visit the {place} {day}",
    "it will be {weather} and {weather} {day}",
    "we saw {number} {animals} {where} the {place}",
    "{name} likes {food} and {food}",
    "my {person} stands {where} the {place}",
    "tell {name} to {act} the {thing}",
    "where is the {size} {colour} {thing}",
    "{number} {animals} and {number} {animals}",
    "buy {food} {food} and {number} {things}",
    "your {person} will {job} {day} with {name}",
    "wake me {day} at {minutes} past {hour}",
    "is it {weather} {where} the {place}",
    "{name} can {job} and {job}",
)
WORDS = {slot: tuple(words.split()) for slot, words in SLOTS.items()}
VOCABULARY = tuple(
    sorted({word for form in FORMS for word in form.split() if "{" not in word}.union(*(WORDS.values())))
)
_SLOT = re.compile(r"\{(\w+)\}")
# Of ten sentences one is for calibration, one held out, one for the test; the rest is for training.
_SHARES = {0: "calibration", 1: "held-out", 2: "test"}


def spoken_sentence(rng: Random, split: str = "train") -> str:
    """A sentence of three to eight lower-case words. No sentence of one split occurs in another."""
    check_split(split)
    while True:
        sentence = _fill(rng, rng.choice(FORMS))
        if sentence_split(sentence) == split:
            return sentence


def sentence_split(sentence: str) -> str:
    """The split that a sentence belongs to, from its letters alone."""
    return _SHARES.get(int.from_bytes(sha256(sentence.encode()).digest()[:4], "big") % 10, "train")


def _fill(rng: Random, form: str) -> str:
    """The form with words in its slots, none of them twice: the second of "anna and anna" could be guessed."""
    used: set[str] = set()

    def choose(slot: re.Match[str]) -> str:
        word = rng.choice([word for word in WORDS[slot[1]] if word not in used])
        used.add(word)
        return word

    return _SLOT.sub(choose, form)


def spoken_instruction(rng: Random) -> str:
    """A request for a caption in the letters that `speech` takes."""
    return re.sub("[^a-z ]", "", rng.choice(INSTRUCTIONS).lower())
