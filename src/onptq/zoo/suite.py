"""The embedded tasks: fixed, disjoint splits of items, drawn and spoken on demand from their numbers alone.

Item `index` of a task and split is made from a generator seeded with exactly that, so it is the same to the byte on
every machine; and what a scene or sentence says decides which split it may belong to, so no two splits share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from random import Random

from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.tasks import Grade, Item, Scoring, exact
from onptq.zoo.claims import grade_caption
from onptq.zoo.language import INSTRUCTIONS, tell
from onptq.zoo.questions import (
    LISTEN,
    Question,
    ask_choice,
    ask_read,
    ask_short,
    ask_spoken,
    caption_scene,
    choice_scene,
    read_scene,
    short_scene,
)
from onptq.zoo.scenes import Scene, draw_scene
from onptq.zoo.sentences import TRANSCRIBE, spoken_instruction, spoken_sentence
from onptq.zoo.splits import check_split
from onptq.zoo.sprites import to_png

EDITION = "onptq-zoo-1"  # another one would be another suite
SIDES = {"qwen2.5-vl": 112, "qwen3-vl": 128, "qwen2.5-omni": 112}  # pixels: 8 x 8 patches of each family
CAPTION_TOKENS = 64
KINDS = ("mix", "captions")  # of embedded prompts


@dataclass(frozen=True)
class Task:
    """A kind of question, its measure, and the size of its test split."""

    make: Callable[[Random, str, int], Item]  # random, split, pixels
    says: str
    test_items: int
    measure: Scoring = "accuracy"
    audio: bool = False


def tasks_of(family: str) -> list[str]:
    """The tasks that a model of this family can be given."""
    if family not in SIDES:
        raise OnPTQError(f"the embedded tasks are not made for {family!r}; expected one of {', '.join(SIDES)}")
    return [name for name, task in TASKS.items() if family == "qwen2.5-omni" or not task.audio]


def items(family: str, task: str, split: str, count: int | None = None, first: int = 0) -> Iterator[Item]:
    """Items `first`, `first` + 1, ... of a split; without a count, the whole test split's number."""
    check_split(split)
    if task not in tasks_of(family):
        raise OnPTQError(f"unknown task {task!r} for {family}; expected one of {', '.join(tasks_of(family))}")
    for index in range(first, first + (TASKS[task].test_items if count is None else count)):
        rng = Random(f"{EDITION}/{task}/{split}/{index}")
        item = TASKS[task].make(rng, split, SIDES[family])
        identity = f"{task}/{split}/{index}"
        yield replace(item, id=identity, prompt=replace(item.prompt, id=identity, ordinal=index))


def prompts(family: str, split: str, count: int, kind: str = "mix") -> list[Prompt]:
    """Prompts of every task in turn (`mix`), or those that ask for captions, written and spoken in turn (`captions`)."""
    if kind not in KINDS:
        raise OnPTQError(f"unknown kind of embedded prompts {kind!r}; expected one of {', '.join(KINDS)}")
    tasks = [task for task in tasks_of(family) if kind == "mix" or task.endswith("caption")]
    each = [list(items(family, task, split, -(-count // len(tasks)))) for task in tasks]
    in_turn = [one for turn in zip(*each, strict=True) for one in turn][:count]
    return [replace(item.prompt, ordinal=ordinal) for ordinal, item in enumerate(in_turn)]


def _choice(rng: Random, split: str, side: int) -> Item:
    return _question("choice", choice_scene, ask_choice, 4, rng, split, side)


def _answer(rng: Random, split: str, side: int) -> Item:
    return _question("answer", short_scene, ask_short, 12, rng, split, side)


def _read(rng: Random, split: str, side: int) -> Item:
    return _question("read", read_scene, ask_read, 12, rng, split, side)


def _question(
    task: str,
    sample: Callable[[Random, str], Scene],
    ask: Callable[[Scene, Random], Question],
    max_tokens: int,
    rng: Random,
    split: str,
    side: int,
) -> Item:
    scene = sample(rng, split)
    question = ask(scene, rng)
    prompt = _prompt(question.text, _image(scene, rng, side))
    return Item("", task, prompt, question.answer, exact(question.answer), max_tokens, kind=question.kind)


def _caption(rng: Random, split: str, side: int) -> Item:
    scene = caption_scene(rng, split)
    prompt = _prompt(rng.choice(INSTRUCTIONS), _image(scene, rng, side))
    return Item("", "caption", prompt, tell(scene, rng), partial(grade_caption, scene=scene), CAPTION_TOKENS, "facts")


def _spoken_caption(rng: Random, split: str, side: int) -> Item:
    scene = caption_scene(rng, split)
    prompt = _prompt(LISTEN, _image(scene, rng, side), _audio(spoken_instruction(rng), rng, split))
    grade = partial(grade_caption, scene=scene)
    return Item("", "spoken caption", prompt, tell(scene, rng), grade, CAPTION_TOKENS, "facts")


def _listen(rng: Random, split: str, side: int) -> Item:
    scene = short_scene(rng, split)
    words, question = ask_spoken(scene, rng)
    prompt = _prompt(question.text, _image(scene, rng, side), _audio(words, rng, split))
    return Item("", "listen", prompt, question.answer, exact(question.answer), 12, kind=question.kind)


def _speech(rng: Random, split: str, side: int) -> Item:
    words = spoken_sentence(rng, split)
    prompt = _prompt(rng.choice(TRANSCRIBE), audio=_audio(words, rng, split))
    return Item("", "speech", prompt, words, partial(word_errors, words), 40, "word errors")


def word_errors(reference: str, transcript: str) -> Grade:
    """Words inserted, deleted or replaced, out of the spoken ones."""
    from jiwer import process_words

    counts = process_words(reference, " ".join(transcript.lower().replace(".", " ").split()))
    return Grade(counts.substitutions + counts.deletions + counts.insertions, len(reference.split()))


TASKS: dict[str, Task] = {
    "choice": Task(_choice, "four options about an image", 2000),
    "read": Task(_read, "text in an image, exactly", 2000),
    "answer": Task(_answer, "short answers, some impossible", 2000),
    "caption": Task(_caption, "long descriptions", 500, "facts"),
    "listen": Task(_listen, "spoken questions about an image", 2000, audio=True),
    "speech": Task(_speech, "transcription of unseen voices", 1000, "word errors", audio=True),
    "spoken caption": Task(_spoken_caption, "long descriptions, asked for by voice", 500, "facts", audio=True),
}


def _image(scene: Scene, rng: Random, side: int) -> Media:
    return _media(to_png(draw_scene(scene, rng), side))


def _audio(words: str, rng: Random, split: str) -> Media:
    from onptq.zoo.speech import Utterance, speak, to_wav
    from onptq.zoo.voices import sample_voice

    return _media(to_wav(speak(Utterance(words, sample_voice(rng, split)))))


def _media(data: bytes) -> Media:
    return Media(None, sha256(data).hexdigest(), data)


def _prompt(text: str, image: Media | None = None, audio: Media | None = None) -> Prompt:
    parts: list[dict[str, str]] = [{"type": "image"}] if image else []
    parts += [{"type": "audio"}] if audio else []
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return Prompt(0, "", messages, (image,) if image else (), (audio,) if audio else ())
