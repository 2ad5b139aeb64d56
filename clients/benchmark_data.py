"""A few items for each of the eight benchmarks, in the benchmark's own columns: questions and pictures of the zoo, speech.

The real data sets are on the hub. These files have their columns and types, so that the same task files, the same
prompts and the same scoring run on them without a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onptq.evaluate.tasks import Item
from onptq.zoo.suite import items

VISION, OMNI = "qwen2.5-vl", "qwen2.5-omni"
CALIBRATION = 128  # OmniBench's first indices, which an evaluation leaves out
Row = dict[str, Any]


def write_benchmarks(folder: Path, count: int) -> None:
    """Write TASK.parquet for every task, with so many items."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (rows, media) in TASKS.items():
        table = pa.Table.from_pylist(list(rows(count)))
        if "image_2" in table.column_names:  # a column of nulls alone has no type
            kind = table.schema.field("image_1").type
            for number in range(2, 8):
                place = table.schema.get_field_index(f"image_{number}")
                table = table.set_column(place, f"image_{number}", pa.nulls(len(table), kind))
        features = {
            column: media.get(column) or _feature(table.schema.field(column).type) for column in table.column_names
        }
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(table.replace_schema_metadata(metadata), folder / f"{name}.parquet")


def _feature(kind: pa.DataType) -> Row:
    """The type of a column as `datasets` writes it."""
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    return {"dtype": str(kind), "_type": "Value"}


def _question(item: Item) -> str:
    return str(item.prompt.messages[0]["content"][-1]["text"])


def _image(item: Item) -> Row:
    return {"bytes": item.prompt.images[0].read(), "path": "image.png"}


def _audio(item: Item) -> Row:
    return {"bytes": item.prompt.audios[0].read(), "path": "speech.wav"}


def _choices(item: Item) -> tuple[str, list[str]]:
    question, *options = _question(item).splitlines()
    return question, [option.partition(". ")[2] for option in options]


def _mmmu(count: int) -> Iterator[Row]:
    for number, item in enumerate(items(VISION, "choice", "test", count), 1):
        question, options = _choices(item)
        yield {
            "id": f"validation_Math_{number}",
            "question": f"<image 1> {question}",
            "options": repr(options),
            "explanation": "",
            "image_1": _image(item),
            **{f"image_{place}": None for place in range(2, 8)},
            "img_type": "['Diagrams']",
            "answer": item.reference,
            "topic_difficulty": "Easy",
            "question_type": "multiple-choice",
            "subfield": "Geometry",
        }


def _ocrbench(count: int) -> Iterator[Row]:
    for item in items(VISION, "read", "test", count):
        yield {
            "dataset": "IIIT5K",
            "question": _question(item),
            "question_type": "Regular Text Recognition",
            "answer": [item.reference],
            "image": _image(item),
        }


def _vizwiz(count: int) -> Iterator[Row]:
    for number, item in enumerate(items(VISION, "answer", "test", count)):
        yield {
            "question_id": f"VizWiz_val_{number:08d}",
            "image": _image(item),
            "question": _question(item),
            "answers": [item.reference] * 10,
            "category": "other",
        }


def _scienceqa(count: int) -> Iterator[Row]:
    for item in items(VISION, "choice", "held-out", count):
        question, options = _choices(item)
        yield {
            "image": _image(item),
            "question": question,
            "choices": options,
            "answer": ord(item.reference) - ord("A"),
            "hint": "",
            "task": "closed choice",
            "grade": "grade2",
            "subject": "natural science",
            "topic": "shapes",
            "category": "Shapes",
            "skill": "Look at a picture",
            "lecture": "",
            "solution": "",
        }


def _textvqa(count: int) -> Iterator[Row]:
    for number, item in enumerate(items(VISION, "read", "held-out", count)):
        yield {
            "image_id": f"{number:016x}",
            "question_id": number,
            "question": _question(item),
            "question_tokens": _question(item).lower().split(),
            "image": _image(item),
            "image_width": 112,
            "image_height": 112,
            "flickr_original_url": "",
            "flickr_300k_url": "",
            "answers": [item.reference] * 10,
            "image_classes": ["Sign"],
            "set_name": "val",
            "ocr_tokens": [item.reference],
        }


def _librispeech(split: str) -> Callable[[int], Iterator[Row]]:
    def rows(count: int) -> Iterator[Row]:
        for number, item in enumerate(items(OMNI, "speech", split, count)):
            spoken = item.reference
            yield {"index": number, "audio": _audio(item), "gt": spoken, "source": "test", "task": "asr_en"}

    return rows


def _wenetspeech(split: str) -> Callable[[int], Iterator[Row]]:
    """English, which is all that the embedded model understands; lmms-eval counts its words as it counts characters."""

    def rows(count: int) -> Iterator[Row]:
        for number, item in enumerate(items(OMNI, "speech", split, count, first=1000)):
            yield {"audio": _audio(item), "text": item.reference, "segment_id": f"Y{number:07d}"}

    return rows


def _omni_bench(count: int) -> Iterator[Row]:
    """Spoken questions about a picture with four options, and so many before them that calibrate."""
    spoken = list(items(OMNI, "listen", "test", CALIBRATION + count))
    answers = sorted({item.reference for item in spoken})
    for number, item in enumerate(spoken):
        wrong = [one for one in answers if one != item.reference][number % 5 :][:3]
        options = [*wrong[: number % 4], item.reference, *wrong[number % 4 :]]
        yield _omni_row(number, item, item, _question(item), options, item.reference)


def _omni_bench_known(count: int) -> Iterator[Row]:
    """Written questions about a picture with four options, beside speech: the embedded model gives letters to no others."""
    total = CALIBRATION + count
    pairs = zip(items(OMNI, "choice", "test", total), items(OMNI, "speech", "test", total), strict=True)
    for number, (item, spoken) in enumerate(pairs):
        question, options = _choices(item)
        yield _omni_row(number, item, spoken, question, options, options[ord(item.reference) - ord("A")])


def _omni_row(number: int, seen: Item, heard: Item, question: str, options: list[str], answer: str) -> Row:
    return {
        "index": number,
        "task type": "Object Identification and Description",
        "audio type": "speech",
        "question": question,
        "audio content": "",
        "image content": "",
        "audio": _audio(heard),
        "image": _image(seen),
        "audio_path": f"{number}.wav",
        "image_path": f"{number}.png",
        "answer": answer,
        "options": options,
    }


PICTURE, SOUND = {"_type": "Image"}, {"_type": "Audio"}
IMAGE, AUDIO = {"image": PICTURE}, {"audio": SOUND}
TASKS: dict[str, tuple[Callable[[int], Iterator[Row]], dict[str, Row]]] = {
    "mmmu_val": (_mmmu, {f"image_{number}": PICTURE for number in range(1, 8)}),
    "ocrbench": (_ocrbench, IMAGE),
    "vizwiz_vqa_val": (_vizwiz, IMAGE),
    "scienceqa_img": (_scienceqa, IMAGE),
    "textvqa_val": (_textvqa, IMAGE),
    "librispeech_test_clean": (_librispeech("test"), AUDIO),
    "librispeech_test_other": (_librispeech("held-out"), AUDIO),
    "wenet_speech_test_net": (_wenetspeech("test"), AUDIO),
    "wenet_speech_test_meeting": (_wenetspeech("held-out"), AUDIO),
    "omni_bench": (_omni_bench, {**IMAGE, **AUDIO}),
    "omni_bench_known": (_omni_bench_known, {**IMAGE, **AUDIO}),
}


def write_text_task(folder: Path, name: str) -> int:
    """Write a task file of lm-evaluation-harness with its data; returns how many items it has."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.jsonl"
    rows = []
    for number, (question, choices) in enumerate(CHOICES.items()):
        first = number % len(choices)
        turned = choices[-first:] + choices[:-first] if first else choices
        rows.append({"question": question, "choices": turned, "answer": turned.index(choices[0])})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.absolute())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return len(rows)


CHOICES = {  # the first one is right
    "What colour is grass?": ["green", "red", "blue", "pink"],
    "What colour is snow?": ["white", "black", "red", "brown"],
    "What colour is a ripe banana?": ["yellow", "blue", "black", "purple"],
    "What colour is coal?": ["black", "white", "yellow", "green"],
    "What colour is the sky on a clear day?": ["blue", "green", "brown", "black"],
    "What colour is blood?": ["red", "green", "white", "yellow"],
    "What colour is a carrot?": ["orange", "blue", "black", "white"],
    "What colour is chocolate?": ["brown", "blue", "green", "white"],
    "What is the opposite of hot?": ["cold", "warm", "tall", "loud"],
    "What is the opposite of up?": ["down", "over", "left", "near"],
    "How many legs does a dog have?": ["four", "two", "six", "eight"],
    "Which animal barks?": ["dog", "cat", "cow", "bird"],
}
