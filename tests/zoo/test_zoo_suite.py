"""The embedded tasks: the same to the byte everywhere, disjoint, with right references, graded by the image."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from PIL import Image

from onptq.errors import OnPTQError
from onptq.evaluate.tasks import exact
from onptq.zoo import questions
from onptq.zoo.claims import Claim, claims, grade_caption, holds
from onptq.zoo.language import COLOR_WORDS, GROUND_WORDS, SHAPE_WORDS, tell
from onptq.zoo.questions import (
    UNANSWERABLE,
    Question,
    ask_choice,
    ask_read,
    ask_short,
    choice_scene,
    read_scene,
    short_scene,
)
from onptq.zoo.scenes import COLORS, GROUNDS, SHARES, Scene, Sign, Thing, draw_scene, in_split, sample_scene, sign_words
from onptq.zoo.splits import SPLITS
from onptq.zoo.sprites import SHAPES, pack
from onptq.zoo.suite import TASKS, items, prompts, tasks_of, word_errors
from tools.zoo.lessons import MAKERS, SEEN, SLOTS, make_lesson

DRAWN = [task for task, made in TASKS.items() if not made.audio]

# The first 8 test items of each task at both image sizes: text, answer and the pixels of the image.
DIGESTS = {
    "qwen2.5-vl/choice": "e19871ca2e973b58",
    "qwen2.5-vl/read": "800f883bd196aa6f",
    "qwen2.5-vl/answer": "d9b9201f9d7880ac",
    "qwen2.5-vl/caption": "4acf3c449d7a7cc3",
    "qwen3-vl/choice": "4503f05b1711bbd2",
    "qwen3-vl/read": "22d3b923bacdf0ff",
    "qwen3-vl/answer": "d2afd4e5772b408d",
    "qwen3-vl/caption": "e898b2ae096c09ae",
}


def digest(family: str, task: str, split: str = "test", count: int = 8) -> str:
    digest = hashlib.sha256()
    for item in items(family, task, split, count):
        digest.update(repr((item.id, item.prompt.messages, item.reference, item.kind)).encode())
        for image in item.prompt.images:  # its pixels: how a PNG is packed depends on the zlib that Pillow brings
            digest.update(Image.open(io.BytesIO(image.read())).tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize(("family", "task"), [(f, t) for f in ("qwen2.5-vl", "qwen3-vl") for t in DRAWN])
def test_splits_are_the_same_to_the_byte_everywhere(family, task):
    assert digest(family, task) == DIGESTS[f"{family}/{task}"]


def test_an_item_does_not_depend_on_which_others_are_made():
    whole = list(items("qwen2.5-vl", "choice", "test", 6))
    (alone,) = items("qwen2.5-vl", "choice", "test", 1, first=5)
    assert (alone.prompt, alone.reference, alone.id) == (whole[5].prompt, whole[5].reference, whole[5].id)


def test_no_scene_is_in_two_splits():
    for seed in range(300):
        scene = sample_scene(Random(seed), "train", things=(0, 6))
        assert [split for split in SPLITS if in_split(repr(scene), split)] == ["train"]
    shares = [share for parts in SHARES.values() for share in parts]
    assert sorted(shares) == list(range(16))


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_has_scenes_of_its_own(split):
    assert all(in_split(repr(choice_scene(Random(seed), split)), split) for seed in range(20))


def test_unknown_names_are_refused_with_the_valid_ones():
    with pytest.raises(OnPTQError, match="choice"):
        next(items("qwen2.5-vl", "chess", "test", 1))
    with pytest.raises(OnPTQError, match="held-out"):
        next(items("qwen2.5-vl", "choice", "validation", 1))
    with pytest.raises(OnPTQError, match="qwen3-vl"):
        tasks_of("llama")


def test_only_families_with_audio_get_spoken_tasks():
    assert "listen" not in tasks_of("qwen2.5-vl")
    assert {"listen", "speech"} <= set(tasks_of("qwen2.5-omni"))


def test_closed_choice_has_two_thousand_test_items():
    assert TASKS["choice"].test_items >= 2000
    assert TASKS["listen"].test_items >= 2000


def test_prompts_are_of_all_tasks_in_turn():
    drawn = prompts("qwen2.5-vl", "calibration", 6)
    assert [prompt.ordinal for prompt in drawn] == list(range(6))
    tasks = ["choice", "read", "answer", "caption"]
    assert [prompt.id for prompt in drawn] == [
        *(f"{task}/calibration/0" for task in tasks),
        *(f"{task}/calibration/1" for task in tasks[:2]),
    ]
    assert len({prompt.images[0].sha256 for prompt in drawn}) == 6


def test_prompts_that_ask_for_captions_are_written_and_spoken_in_turn():
    drawn = prompts("qwen2.5-vl", "calibration", 3, "captions")
    assert [prompt.id for prompt in drawn] == [f"caption/calibration/{n}" for n in range(3)]
    pytest.importorskip("espeakng_loader")
    drawn = prompts("qwen2.5-omni", "held-out", 3, "captions")
    assert [prompt.id for prompt in drawn] == [
        "caption/held-out/0", "spoken caption/held-out/0", "caption/held-out/1",
    ]  # fmt: skip
    assert [len(prompt.audios) for prompt in drawn] == [0, 1, 0]


def test_every_image_fits_into_the_sprite_slots_of_training():
    rng = Random(0)
    drawings = [lesson.drawing for lesson in (make_lesson(rng, SEEN) for _ in range(400)) if lesson.drawing]
    assert max(len(drawing.sprites) for drawing in drawings) <= SLOTS
    assert pack(drawings[0].sprites, SLOTS).shape == (SLOTS, 8)


@pytest.mark.parametrize("kind", list(SEEN))
def test_every_kind_of_lesson_has_answers(kind):
    lesson = MAKERS[kind](Random(3))
    assert lesson.kind == kind
    assert lesson.turns
    assert all(user and assistant for user, assistant in lesson.turns)


STEPS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}


def right_option(question):
    options = dict(re.findall(r"\n([A-D])\. (.+)", question.text))
    assert len(set(options.values())) == 4
    return options[question.answer], [text for letter, text in options.items() if letter != question.answer]


def find(scene: Scene, name: str) -> list[Thing]:
    color, shape = name.split()
    return [thing for thing in scene.things if (thing.color, thing.shape) == (color, shape)]


def groups(match: re.Match[str] | None) -> tuple[str, ...]:
    assert match is not None
    return match.groups()


def questions_of(kind: str, count: int = 40) -> Iterator[tuple[Scene, Question]]:
    """Scenes with a question of the kind."""
    stream = (
        (scene, ask_choice(scene, Random(seed)))
        for seed in range(20_000)
        for scene in [choice_scene(Random(seed), "test")]
    )
    return islice(((scene, question) for scene, question in stream if question.kind == kind), count)


def test_beside_names_the_neighbour():
    for scene, question in questions_of("beside"):
        word, start = groups(re.match(r"What is directly (.+?) the (\w+ \w+)\?", question.text))
        (other,) = find(scene, start)
        right, wrong = right_option(question)
        step = STEPS[word]
        there = scene.at(other.row + step[0], other.col + step[1])
        assert there is not None
        assert f"{there.color} {there.shape}" == right
        assert right not in wrong


def test_hops_end_where_the_colour_is_asked():
    lengths = set()
    for scene, question in questions_of("hop", 60):
        (start,) = groups(re.match(r"Start at the (\w+ \w+)\. Go to what is ", question.text))
        words = re.findall(r"(left of|right of|above|below) (?:it|that)", question.text)
        lengths.add(len(words))
        (thing,) = find(scene, start)
        for word in words:
            reached = scene.at(thing.row + STEPS[word][0], thing.col + STEPS[word][1])
            assert reached is not None
            thing = reached
        assert thing.color == right_option(question)[0]
    assert lengths == {2, 3}


def side(a: Thing, word: str, b: Thing) -> bool:
    return {"left of": a.col < b.col, "right of": a.col > b.col, "above": a.row < b.row, "below": a.row > b.row}[word]


def test_counting_counts():
    places = set()
    for scene, question in questions_of("count", 80):
        what, where = groups(re.match(r"How many (.+) are (.+)\?", question.text))
        counted = list(scene.things)
        if " the " in where:
            word, mark = where.split(" the ")
            (other,) = find(scene, mark)
            counted = [thing for thing in counted if side(thing, word, other)]
        if what.startswith(("large", "small")):
            counted = [thing for thing in counted if thing.large == what.startswith("large")]
            what = what.split(maxsplit=1)[1]
        if what.endswith(" things"):
            counted = [thing for thing in counted if thing.color == what.split()[0]]
        elif what != "things":
            counted = [thing for thing in counted if questions.plural(thing.shape) == what]
        assert int(right_option(question)[0]) == len(counted)
        places.add(where.split(" the ")[0])
    assert places == {"there", *STEPS}


def test_exactly_one_statement_is_true():
    for scene, question in questions_of("true"):
        right, wrong = right_option(question)

        def truth(statement: str, scene: Scene = scene) -> bool:
            a, word, b = groups(re.match(r"(\w+ \w+) (left of|right of|above|below) (\w+ \w+)", statement))
            (one,), (other,) = find(scene, a), find(scene, b)
            return side(one, word, other)

        assert truth(right)
        assert not any(map(truth, wrong))


def test_most_frequent_colour_and_same_colour_and_sum():
    for scene, question in questions_of("most"):
        colors = [thing.color for thing in scene.things]
        right, wrong = right_option(question)
        assert all(colors.count(right) > colors.count(color) for color in wrong)
    for scene, question in questions_of("same"):
        (named,) = groups(re.search(r"color as the (\w+)", question.text))
        (thing,) = scene.find(shape=named)
        right, wrong = right_option(question)
        shared = {one.shape for one in scene.find(color=thing.color)}
        assert right in shared
        assert not shared & set(wrong)
    for scene, question in questions_of("sum", 10):
        assert int(right_option(question)[0]) == sum(int(sign.text) for sign in scene.signs)


def test_letters_of_right_options_are_spread_evenly():
    letters = [ask_choice(choice_scene(Random(seed), "test"), Random(seed)).answer for seed in range(800)]
    assert all(150 < letters.count(letter) < 250 for letter in "ABCD")


def test_a_question_without_one_answer_is_unanswerable():
    star = Thing("red", "star", True, 0, 0)
    twins = Scene((star, replace(star, col=1, color="blue")), (), "white")
    answers: dict[str, str] = {}
    for seed in range(2000):
        question = ask_short(twins, Random(seed))
        answers.setdefault(question.text, question.answer)
    assert answers["What color is the star? Answer briefly."] == UNANSWERABLE
    assert answers["How many stars are there? Answer briefly."] == "2"
    assert answers["What is at the top left? Answer briefly."] == "red star"
    absent = [text for text in answers if "cup" in text and "How many" not in text]
    assert absent
    assert all(answers[text] == UNANSWERABLE for text in absent)


def test_short_answers_are_mostly_possible():
    kinds = [ask_short(short_scene(Random(seed), "test"), Random(seed)).kind for seed in range(500)]
    assert 0.15 < kinds.count(UNANSWERABLE) / 500 < 0.45


def test_reading_asks_for_the_sign_that_is_meant():
    for seed in range(60):
        scene = read_scene(Random(seed), "test")
        question = ask_read(scene, Random(seed))
        rows = {"upper": 0, "lower": -1}
        which = next((rows[word] for word in rows if word in question.text), 0)
        assert question.answer == sorted(scene.signs, key=lambda sign: sign.row)[which].text


def test_signs_are_words_and_strings_of_legible_letters():
    assert len(sign_words()) > 500
    assert not any(set(word) & set("IO01") for word in sign_words())


def test_every_claim_of_a_drawn_caption_is_true():
    for seed in range(400):
        rng = Random(seed)
        scene = questions.caption_scene(rng, "train")
        grade = grade_caption(tell(scene, rng), scene)
        assert grade.points == grade.total


def test_the_claims_of_a_caption_fail_on_another_image():
    right = total = 0.0
    for seed in range(200):
        rng = Random(seed)
        caption = tell(questions.caption_scene(rng, "train"), rng)
        grade = grade_caption(caption, questions.caption_scene(Random(seed + 1000), "train"))
        right, total = right + grade.points, total + grade.total
    assert right / total < 0.15


SCENE = Scene(
    (Thing("red", "star", True, 0, 0), Thing("blue", "cup", False, 0, 1), Thing("green", "fish", True, 2, 2)),
    (Sign("K7Q", 1),),
    "pink",
)


@pytest.mark.parametrize(
    ("caption", "wrong"),
    [
        ("A big crimson star sits at the top left.", []),
        ("A small red star.", [Claim("size", ("red", "star", "small"))]),
        ("A red star is in the lower left corner.", [Claim("place", ("red", "star", "2", "0"))]),
        ("A navy mug rests to the right of the red star, while a fish.", []),
        ("A blue cup is left of the red star.", [Claim("beside", ("blue", "cup", "red", "star", "left of"))]),
        (
            "A violet hoop is in the middle.",
            [Claim("thing", ("purple", "ring")), Claim("place", ("purple", "ring", "1", "1"))],
        ),
        ("The sign says K7Q; the ground is soft pink; there are three things in all.", []),
        ("A label spells K7Z.", [Claim("sign", ("K7Z",))]),
        ("That makes four things.", [Claim("count", ("four",))]),
        ("That makes two things.", [Claim("count", ("two",))]),
        ("That makes three things.", []),
        ("The background is mint.", [Claim("ground", ("mint",))]),
    ],
)
def test_wrong_claims_do_not_hold(caption, wrong):
    assert claims(caption)
    assert [claim for claim in claims(caption) if not holds(claim, SCENE)] == wrong


def test_a_caption_that_claims_nothing_earns_nothing():
    assert grade_caption("Nothing else is there.", SCENE).points == 0
    assert grade_caption("", SCENE).total == 1


def test_the_lexicon_covers_every_colour_shape_and_ground():
    assert set(COLOR_WORDS) == set(COLORS)
    assert set(SHAPE_WORDS) == set(SHAPES)
    assert set(GROUND_WORDS) == set(GROUNDS)
    for table in (COLOR_WORDS, SHAPE_WORDS, GROUND_WORDS):
        words = [word for synonyms in table.values() for word in synonyms]
        assert len(words) == len(set(words))


def test_tellings_of_one_scene_differ():
    scene = questions.caption_scene(Random(5), "train")
    captions = [tell(scene, Random(seed)) for seed in range(20)]
    assert len(set(captions)) == 20
    assert len({text.split()[0] for text in captions}) >= 4


def test_images_of_one_scene_differ_but_its_things_stay():
    one, other = (draw_scene(SCENE, Random(seed)) for seed in (1, 2))
    assert one != other
    assert [sprite.cell for sprite in one.sprites[:3]] == [sprite.cell for sprite in other.sprites[:3]]


def test_answers_are_compared_but_for_case_spaces_and_full_stop():
    grade = exact("red star")
    assert grade(" Red star. ").points == 1
    assert grade("red stars").points == 0


def test_word_errors_are_counted_per_word_said():
    pytest.importorskip("jiwer")
    assert word_errors("call maria at ten", "call maria at ten").points == 0
    grade = word_errors("call maria at ten", "call anna ten now")
    assert (grade.points, grade.total) == (3, 4)
