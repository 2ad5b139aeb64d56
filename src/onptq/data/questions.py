"""Questions that can be asked about any image, and which of them is asked about which image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from onptq.data.media import read_file
from onptq.errors import OnPTQError

QUESTIONS = (
    "Describe this image in detail.",
    "Write a short caption for this image.",
    "What text can be read in this image? If there is none, say so.",
    "Which objects are in this image, and how many of each?",
    "Is anything in this image unusual or unexpected? Explain.",
    "Which colors dominate this image, and where are they?",
    "Describe the layout: what is on the left, in the middle and on the right?",
    "What is in the foreground, and what is in the background?",
    "What kind of image is this: a photo, a drawing, a chart, a screenshot, a document or something else?",
    "Where and when could this image have been made? Which details say so?",
    "What is happening in this image? What may have happened just before?",
    "Is there a person or an animal in this image? If so, what are they doing?",
    "What is the most important thing in this image, and why?",
    "Describe this image to someone who cannot see it, in at most three sentences.",
    "Ask three questions about this image that it answers, and answer them.",
    "List five keywords for this image, separated by commas.",
)


def read_questions(path: Path | None) -> Sequence[str]:
    """The questions of a text file, one per line, none twice; without a file, the built-in ones."""
    if path is None:
        return QUESTIONS
    expected = "expected a text file with one question per line"
    try:
        text = read_file(path).decode("utf-8-sig")
    except OSError as error:
        raise OnPTQError(f"cannot read the questions {path}: {error.strerror or error}; {expected}") from None
    except UnicodeDecodeError as error:
        raise OnPTQError(f"the questions {path} are not UTF-8 text (byte {error.start + 1}); {expected}") from None
    if "\0" in text:
        raise OnPTQError(f"the questions {path} are not text; {expected}")
    questions = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not questions:
        raise OnPTQError(f"{path} has no questions; {expected}")
    return questions


def pair_with_questions(images: int, questions: Sequence[str], seed: int) -> Iterator[tuple[int, str]]:
    """Every image, by its place, with every question once: first one question for each image, then a second for each.

    The seed gives the order. In each part of it all questions are asked about equally often.
    """
    rng = Random(f"{seed}/questions")
    deck = list(questions)
    rng.shuffle(deck)
    first = list(range(images))
    rng.shuffle(first)
    for turn in range(len(deck)):
        for image in range(images):
            yield image, deck[(first[image] + turn) % len(deck)]
