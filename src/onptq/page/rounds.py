"""The page of a run alone: held-out prompts under each theta, and the calibration prompts of each round."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from onptq.checkpoint.folder import CONFIG
from onptq.data.prompts import Media as Source
from onptq.errors import OnPTQError
from onptq.evaluate.asked import Asked
from onptq.evaluate.damage import damage_measures
from onptq.evaluate.details import Detail, scored
from onptq.evaluate.metrics import behaviour_measures, labels
from onptq.evaluate.report import caveats
from onptq.evaluate.statistics import Resampler
from onptq.evaluate.token_texts import TokenTexts
from onptq.files import read_json
from onptq.page.chat import asked_from
from onptq.page.collect import NOTES, ids_of, kinds_of, measures_of
from onptq.page.contract import Answer, Candidate, Figure, MessagePart, Page, Question, Response, Turn
from onptq.page.costs import COSTS, costs_of_run
from onptq.page.media import BUDGET, Album
from onptq.page.provenance import how_made, served_by
from onptq.page.responses import respond, spoken
from onptq.page.stages import ROUND, Answers, Stage, became, dense_answers, detailed, stages_of
from onptq.page.verdict import verdict
from onptq.page.worst import badness_of_prompt, riskiest
from onptq.plain_yaml import read_yaml
from onptq.recipe import Recipe
from onptq.registry import FAMILIES
from onptq.run import RECORD, SUMMARY
from onptq.version import __version__

NOTE = (
    "The dense model's own answers are kept of held-out prompts. Where an answer to a calibration prompt leaves them is its "
    "first changed decision; up to there both models say the same."
)
MOST = 8192  # states of a round


def collect_run(home: Path, checkpoint: Path) -> Page:
    """The page of the run whose files are in `home` and whose checkpoint, with its tokenizer, is in `checkpoint`."""
    record = read_yaml(home / RECORD)
    if not (home / SUMMARY).is_file():
        raise OnPTQError(f"the run in {home} is not finished; the same `onptq quantize` goes on with it")
    recipe, summary = Recipe.model_validate(record["recipe"]), read_json(home / SUMMARY)
    stages = [detailed(stage, home) for stage in stages_of(home, recipe)]
    rows = pq.read_table(home / "prompts.parquet").to_pylist() if (home / "prompts.parquet").is_file() else []
    dense = dense_answers(home, recipe)
    texts = _texts(checkpoint, rows, stages, dense)
    placeholders = _placeholders(record["model"]["family"], checkpoint, texts)
    asked = [_asked(row, texts, placeholders) for row in rows]
    size = (summary.get("checkpoint") or {}).get("bytes")
    candidates = [_candidate(stage, recipe, asked, texts, size, dense) for stage in stages]
    candidates = candidates or [_unanswered(recipe, size, len(asked))]
    result = candidates[0]
    candidates[0] = replace(result, figures={**result.figures, **costs_of_run(home)})
    album = Album()
    prompts = [
        Question(
            one.id,
            one.task,
            kinds_of(one),
            album.turns(one, badness_of_prompt(place, candidates)),
            _spoken(one, dense, texts),
            one.reference,
        )
        for place, one in enumerate(asked)
    ]
    held_out = sum(row["role"] == "holdout" for row in rows)
    return Page(
        title=f"{record['model']['source']} in {recipe.scheme}",
        dense=record["model"]["source"],
        origin=f"{held_out} held-out prompts and {len(rows) - held_out} calibration prompts of the run",
        candidates=candidates,
        prompts=prompts,
        media=album.media(),
        tokens={token: texts.shown(token) for token in ids_of(prompts, candidates)},
        measures=measures_of({"labels": {name: asdict(label) for name, label in labels([]).items()}}) | COSTS,
        notes=[NOTE, *NOTES, *caveats({}, held_out)],
        dense_bytes=(summary.get("dense") or {}).get("bytes"),
        version=__version__,
    )


def with_rounds(page: Page, home: Path, checkpoint: Path) -> Page:
    """The page of a comparison, with the calibration prompts of every round of the run whose result it judges.

    These are prompts of their own, to which nobody kept the dense model's answers.
    """
    record = read_yaml(home / RECORD)
    file = home / "prompts.parquet"
    if not (home / SUMMARY).is_file() or not file.is_file():
        return page
    recipe = Recipe.model_validate(record["recipe"])
    stages = [stage for stage in stages_of(home, recipe) if stage.name.startswith(ROUND)]
    rows = [row for row in pq.read_table(file).to_pylist() if row["role"] == "calibration"]
    if not stages or not rows:
        return page
    dense = dense_answers(home, recipe)
    texts = _texts(checkpoint, rows, stages, dense)
    placeholders = _placeholders(record["model"]["family"], checkpoint, texts)
    asked = [_asked(row, texts, placeholders) for row in rows]
    rounds = [_candidate(stage, recipe, asked, texts, None, dense) for stage in stages]
    shown = [place for place in range(len(asked)) if any(one.responses[place] is not None for one in rounds)]
    album = Album(BUDGET - sum(len(one.src or "") for one in page.media))
    prompts = [
        Question(
            one.id,
            one.task,
            kinds_of(one),
            _behind(page, album.turns(one, badness_of_prompt(place, rounds))),
            _spoken(one, dense, texts),
            one.reference,
        )
        for place, one in ((place, asked[place]) for place in shown)
    ]
    before, behind = [None] * len(page.prompts), [None] * len(prompts)
    rounds = [replace(one, responses=[*before, *(one.responses[place] for place in shown)]) for one in rounds]
    left = f", {len(shown)} of them here: those with the highest risk" if len(shown) < len(asked) else ""
    return replace(
        page,
        origin=f"{page.origin}; rounds: {len(asked)} calibration prompts{left}",
        candidates=[*(replace(one, responses=[*one.responses, *behind]) for one in page.candidates), *rounds],
        prompts=[*page.prompts, *prompts],
        media=[*page.media, *album.media()],
        tokens={token: texts.shown(token) for token in ids_of(prompts, rounds)} | dict(page.tokens),
    )


def _behind(page: Page, turns: Sequence[Turn]) -> list[Turn]:
    """The turns, their media behind those that the page has."""
    return [replace(turn, parts=[_shifted(part, len(page.media)) for part in turn.parts]) for turn in turns]


def _shifted(part: MessagePart, by: int) -> MessagePart:
    return part if part.media is None else replace(part, media=part.media + by)


def _candidate(
    stage: Stage,
    recipe: Recipe,
    asked: Sequence[Asked],
    texts: TokenTexts,
    size: int | None,
    dense: Answers,
) -> Candidate:
    responses = [_response(stage, one.ordinal, texts, dense) for one in asked]
    said, is_round = verdict(responses, None, Resampler(recipe.seed)), stage.name.startswith(ROUND)
    if is_round:
        responses = riskiest(responses, MOST)
    states = stage.visit.states
    ordinals = sorted(stage.visit.rows)
    responses_there = [stage.visit.trajectories[prompt] for prompt in ordinals]
    measures = behaviour_measures(states, ordinals) | damage_measures(
        ordinals, states=states, responses=responses_there
    )
    resampler = Resampler(recipe.seed)
    found = {name: resampler.estimate(measure) for name, measure in measures.items()}
    is_result = stage.name == "result"
    return Candidate(
        stage.name,
        stage.name,
        stage.how,
        said,
        {name: Figure(one.value, one.low, one.high) for name, one in found.items()},
        recipe.scheme,
        None if is_round else size,  # held-out prompts are answered by models of one scheme
        served_by(recipe.scheme) if is_result else (),
        responses=responses,
        aside=is_round,
    )


def _unanswered(recipe: Recipe, size: int | None, prompts: int) -> Candidate:
    """The result of a run in which it answered none of the prompts."""
    return Candidate(
        "result",
        "result",
        how_made({"scheme": recipe.scheme, "method": recipe.init}),
        verdict((), None, Resampler()),
        {},
        recipe.scheme,
        size,
        served_by(recipe.scheme),
        responses=[None] * prompts,
    )


def _response(stage: Stage, prompt: int, texts: TokenTexts, dense: Answers) -> Response | None:
    """The response with its states; risk is that of the bank where it has some."""
    visit = stage.visit
    if prompt not in visit.rows:
        return None
    states = visit.states.take(visit.rows[prompt])
    states = states if states.risk.any() else scored(states, None)
    known = None if stage.name.startswith(ROUND) else dense.get(prompt)  # in a round it may be the response itself
    response = respond(known, visit.trajectories[prompt], states, stage.details, texts)
    if stage.later and response.states is not None:
        columns = became(visit, prompt, stage.later)
        response = replace(response, states=replace(response.states, became=columns))
    return response


def _texts(checkpoint: Path, rows: Sequence[Mapping[str, Any]], stages: Sequence[Stage], dense: Answers) -> TokenTexts:
    """The texts of all ids, from the tokenizer of the checkpoint; none where it is gone."""
    ids = {token for row in rows for token in row["input_ids"]}
    ids.update(token for one in dense.values() for token in one.tokens)
    for stage in stages:
        ids.update(token for one in stage.details.values() for token in _tokens_of(one))
        ids.update(token for one in stage.visit.trajectories.values() for token in one.tokens)
        for column in (stage.visit.states.reference, stage.visit.states.competitor, stage.visit.states.quantized):
            ids.update(np.unique(column).tolist())
    if not (checkpoint / "tokenizer_config.json").is_file():
        return TokenTexts({}, {})
    from transformers import AutoTokenizer

    return TokenTexts.of(AutoTokenizer.from_pretrained(checkpoint, local_files_only=True), ids)


def _tokens_of(detail: Detail) -> Iterator[int]:
    yield from (token for token, _ in (*detail.dense, *detail.quantized))
    if detail.future is not None:
        yield from (*detail.future.reference, *detail.future.competitor)


def _placeholders(family: str, checkpoint: Path, texts: TokenTexts) -> dict[str, str]:
    """By the text of a token that stands for it, image or audio."""
    if family not in FAMILIES:
        config = read_json(checkpoint / CONFIG) if (checkpoint / CONFIG).is_file() else {}
        ids = {kind: config.get(f"{kind}_token_id", config.get(f"{kind}_token_index")) for kind in ("image", "audio")}
        return {texts.shown(token): kind for kind, token in ids.items() if isinstance(token, int)}
    known = FAMILIES[family]
    both = ((known.image, "image"), (known.audio, "audio"))
    return {one.token: kind for one, kind in both if one is not None}


def _asked(row: Mapping[str, Any], texts: TokenTexts, placeholders: Mapping[str, str]) -> Asked:
    """The prompt of a row; runs of earlier versions kept its tokens alone."""
    images, audios = ([_media(one) for one in row.get(name) or ()] for name in ("images", "audios"))
    if row.get("messages") is not None:
        messages = json.loads(row["messages"])
        return Asked(row["id"], row["task"], messages, images, audios, row["reference"], row["ordinal"])
    return asked_from(row["input_ids"], row["id"], row["ordinal"], (images, audios), texts, placeholders)


def _media(row: Mapping[str, Any]) -> Source:
    return Source(None if row["path"] is None else Path(row["path"]), row["sha256"], row["bytes"])


def _spoken(asked: Asked, dense: Answers, texts: TokenTexts) -> Answer:
    """The dense model's answer; empty where nobody kept one."""
    return spoken(dense[asked.ordinal], texts) if asked.ordinal in dense else Answer("")
