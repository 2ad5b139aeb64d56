"""The bank of a page as a data set that can be published: Parquet files and a card, in the layout of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onptq.bank import KINDS
from onptq.errors import OnPTQError, did_you_mean
from onptq.files import atomically
from onptq.page.contract import Candidate, Page, Question, Response, States
from onptq.plain_yaml import to_yaml

Row = dict[str, Any]
Columns = dict[str, tuple[Any, str]]  # Arrow type and meaning, by name

TEXTS: Mapping[str, str] = {
    "numbers": "no text and no token: nothing of a prompt or an answer can be read",
    "answers": "the tokens and texts of both models' answers too",
    "prompts": "the text of prompts and references too, without images and audio",
}
STATES: Columns = {
    "candidate": (pa.string(), "name of the quantized model"),
    "prompt": (pa.int32(), "number of the prompt"),
    "t": (pa.int32(), "number of the state in the response, from 0: it predicts token t"),
    "kind": (pa.string(), "agree, near_miss or mismatch"),
    "margin_dense": (
        pa.float32(),
        "logit of the dense model's choice minus that of its competitor, under the dense model",
    ),
    "margin_quant": (pa.float32(), "the same under the quantized model"),
    "erosion": (pa.float32(), "the margin that was lost"),
    "js": (pa.float32(), "JS divergence of the two next-token distributions, in nats"),
    "kl": (pa.float32(), "KL divergence of the quantized distribution from the dense one, in nats"),
    "consequence": (pa.float32(), "divergence of the futures behind the two tokens; null where nothing was branched"),
    "risk": (pa.float32(), "the risk of the state"),
    "critical": (pa.bool_(), "whether the state was selected"),
    "weight": (pa.float32(), "its weight in the objective"),
}
TOKENS: Columns = {
    "reference": (pa.string(), "the dense model's token"),
    "competitor": (pa.string(), "the token that competes with it"),
    "quantized": (pa.string(), "the quantized model's token"),
}
RESPONSES: Columns = {
    "candidate": (pa.string(), "name of the quantized model"),
    "prompt": (pa.int32(), "number of the prompt"),
    "task": (pa.string(), "its task"),
    "inputs": (pa.list_(pa.string()), "text, image, audio"),
    "change": (pa.string(), "same, reworded, clear or content"),
    "fork": (pa.int32(), "first token, from 0, in which the answers differ; null where none does"),
}
ANSWERS: Columns = {
    "dense": (pa.string(), "the dense model's answer"),
    "answer": (pa.string(), "the quantized model's answer"),
}
QUESTIONS: Columns = {
    "question": (pa.string(), "the text of the prompt"),
    "reference": (pa.string(), "the reference answer; null where there is none"),
}


def write_dataset(page: Page, folder: Path, texts: str) -> list[Path]:
    """Write the states and responses of all candidates, with as much text as `texts` says; return the files."""
    if texts not in TEXTS:
        raise OnPTQError(f"texts {texts!r}{did_you_mean(texts, TEXTS)}; expected one of {', '.join(TEXTS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OnPTQError(f"{folder} is not empty; expected a new folder for the data set")
    level = list(TEXTS).index(texts)
    states = STATES | (TOKENS if level >= 1 else {})
    responses = RESPONSES | (ANSWERS if level >= 1 else {}) | (QUESTIONS if level >= 2 else {})
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"states": (states, list(_states(page))), "responses": (responses, list(_responses(page)))}
    files = []
    for name, (columns, rows) in tables.items():
        schema = pa.schema([(column, kind) for column, (kind, _) in columns.items()])
        table = pa.Table.from_pylist([{column: row[column] for column in columns} for row in rows], schema=schema)
        files.append(folder / f"{name}.parquet")
        with atomically(files[-1]) as temporary:
            pq.write_table(table, temporary)
    files.append(folder / "README.md")
    with atomically(files[-1]) as temporary:
        temporary.write_text(_card(page, texts, tables), encoding="utf-8")
    return files


def _answered(page: Page) -> Iterator[tuple[Candidate, int, Question, Response]]:
    for candidate in page.candidates:
        for number, (question, response) in enumerate(zip(page.prompts, candidate.responses, strict=False)):
            if response is not None:
                yield candidate, number, question, response


def _states(page: Page) -> Iterator[Row]:
    for candidate, number, _, response in _answered(page):
        states = response.states
        if states is not None:
            for t in range(len(states.kind)):
                yield {"candidate": candidate.name, "prompt": number, "t": t, **_state(states, t, page.tokens)}


def _state(states: States, t: int, tokens: Mapping[int, str]) -> Row:
    row = {name: getattr(states, name)[t] for name in STATES if hasattr(states, name)}
    row["kind"] = KINDS[states.kind[t]]
    return row | {name: tokens.get(getattr(states, name)[t]) for name in TOKENS}


def _responses(page: Page) -> Iterator[Row]:
    for candidate, number, question, response in _answered(page):
        texts = [part.text for turn in question.turns for part in turn.parts if part.text]
        yield {
            "candidate": candidate.name,
            "prompt": number,
            "task": question.task,
            "inputs": list(question.kinds),
            "change": response.change,
            "fork": response.fork,
            "dense": question.dense.text,
            "answer": response.answer.text,
            "question": "\n".join(texts),
            "reference": question.reference,
        }


def _card(page: Page, texts: str, tables: Mapping[str, tuple[Columns, list[Row]]]) -> str:
    front = {
        "tags": ["onptq", "quantization"],
        "configs": [{"config_name": name, "data_files": f"{name}.parquet"} for name in tables],
    }
    lines = [f"---\n{to_yaml(front)}---\n", "# Decisions of a dense and quantized models\n"]
    lines.append(
        f"{len(page.candidates)} quantized models beside the dense one, on {len(page.prompts)} prompts, by OnPTQ {page.version}. "
        f"Level of text: {texts}, {TEXTS[texts]}.\n"
    )
    for name, (columns, rows) in tables.items():
        lines += [f"## {name}\n", f"{len(rows):,} rows.\n", "| column | meaning |", "|---|---|"]
        lines += [f"| `{column}` | {meaning} |" for column, (_, meaning) in columns.items()]
        lines.append("")
    return "\n".join(lines)
