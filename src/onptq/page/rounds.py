"""The page of a run alone: held-out prompts under each theta, and the calibration prompts of each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq

from onptq.data.prompt_table import prompt_of
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.damage import damage_measures
from onptq.evaluate.details import scored
from onptq.evaluate.metrics import behaviour_measures, labels
from onptq.evaluate.previews import PREVIEWS, read_previews
from onptq.evaluate.report import caveats
from onptq.evaluate.statistics import Resampler, Single
from onptq.evaluate.store import TOKENS
from onptq.evaluate.token_texts import TokenTexts
from onptq.files import read_json
from onptq.page.collect import NOTES, ids_of, measures_of
from onptq.page.contract import Answer, Candidate, Figure, MessagePart, Page, Question, Response, Turn
from onptq.page.costs import COSTS, costs_of_run
from onptq.page.media import BUDGET, Album
from onptq.page.older_runs import Reader
from onptq.page.provenance import how_made, served_by
from onptq.page.responses import respond, spoken
from onptq.page.stages import ROUND, Answers, Stage, became, dense_answers, detailed, stages_of
from onptq.page.verdict import verdict
from onptq.page.worst import badness_of_prompt, riskiest
from onptq.plain_yaml import read_yaml
from onptq.recipe import Recipe
from onptq.run import RECORD, SUMMARY
from onptq.version import __version__

NOTE = (
    "The run has the dense model's own answers to held-out prompts alone. Where an answer to a calibration prompt leaves them "
    "is its first changed decision; up to there both models say the same."
)
MOST = 8192  # states of a round
PROMPTS = "prompts.parquet"


@dataclass(frozen=True)
class RunFiles:
    """The folder of a finished run, read."""

    home: Path
    model: str
    recipe: Recipe
    stages: Sequence[Stage]
    dense: Answers
    roles: Sequence[str]  # of the prompts: calibration or holdout
    prompts: Sequence[Prompt]
    texts: TokenTexts

    @classmethod
    def read(cls, home: Path, checkpoint: Path) -> RunFiles:
        """Of a run of an earlier version, texts come from the tokenizer of its checkpoint."""
        record = read_yaml(home / RECORD)
        recipe = Recipe.model_validate(record["recipe"])
        stages = [detailed(stage, home) for stage in stages_of(home, recipe)]
        dense = dense_answers(home, recipe)
        rows = pq.read_table(home / PROMPTS).to_pylist() if (home / PROMPTS).is_file() else []
        if (home / TOKENS).is_file() and all(row.get("messages") is not None for row in rows):
            texts = TokenTexts.read(home / TOKENS)
            prompts = [prompt_of(row) for row in rows]
        else:
            reader = Reader.of(record["model"]["family"], checkpoint, rows, stages, dense)
            texts = reader.texts
            prompts = [prompt_of(row) if row.get("messages") is not None else reader.prompt(row) for row in rows]
        roles = [row["role"] for row in rows]
        return cls(home, record["model"]["source"], recipe, stages, dense, roles, prompts, texts)

    def album(self, budget: int = BUDGET) -> Album:
        return Album(read_previews(self.home / PREVIEWS), budget)

    def question(self, one: Prompt, turns: Sequence[Turn]) -> Question:
        """The prompt with the dense model's answer; that is empty where the run has none."""
        dense = spoken(self.dense[one.ordinal], self.texts) if one.ordinal in self.dense else Answer("")
        return Question(one.id, one.task, one.kinds, turns, dense, one.reference)


def collect_run(home: Path, checkpoint: Path) -> Page:
    """The page of the run whose files are in `home` and whose checkpoint is in `checkpoint`."""
    if not (home / SUMMARY).is_file():
        raise OnPTQError(f"the run in {home} is not finished; the same `onptq quantize` goes on with it")
    files, summary = RunFiles.read(home, checkpoint), read_json(home / SUMMARY)
    recipe, size = files.recipe, (summary.get("checkpoint") or {}).get("bytes")
    candidates = [_candidate(stage, files, files.prompts, size) for stage in files.stages]
    candidates = candidates or [_unanswered(recipe, size, len(files.prompts))]
    result = candidates[0]
    candidates[0] = replace(result, figures={**result.figures, **costs_of_run(home)})
    album = files.album()
    prompts = [
        files.question(one, album.turns(one, badness_of_prompt(place, candidates)))
        for place, one in enumerate(files.prompts)
    ]
    held_out = files.roles.count("holdout")
    return Page(
        title=f"{files.model} in {recipe.scheme}",
        dense=files.model,
        origin=f"{held_out} held-out prompts and {len(prompts) - held_out} calibration prompts of the run",
        candidates=candidates,
        prompts=prompts,
        media=album.media(),
        tokens={token: files.texts.shown(token) for token in ids_of(prompts, candidates)},
        measures=measures_of({"labels": {name: asdict(label) for name, label in labels([]).items()}}) | COSTS,
        notes=[NOTE, *NOTES, *caveats({}, held_out)],
        dense_bytes=(summary.get("dense") or {}).get("bytes"),
        version=__version__,
    )


def with_rounds(page: Page, home: Path, checkpoint: Path) -> Page:
    """The page of a comparison, with the calibration prompts of every round of the run whose result it judges.

    These are prompts of their own; the run has no answers of the dense model to them.
    """
    if not (home / SUMMARY).is_file() or not (home / PROMPTS).is_file():
        return page
    files = RunFiles.read(home, checkpoint)
    stages = [stage for stage in files.stages if stage.name.startswith(ROUND)]
    calibration = [one for one, role in zip(files.prompts, files.roles, strict=True) if role == "calibration"]
    if not stages or not calibration:
        return page
    rounds = [_candidate(stage, files, calibration, None) for stage in stages]
    shown = [place for place in range(len(calibration)) if any(one.responses[place] is not None for one in rounds)]
    album = files.album(BUDGET - sum(len(one.src or "") for one in page.media))
    prompts = [
        files.question(
            calibration[place], _behind(page, album.turns(calibration[place], badness_of_prompt(place, rounds)))
        )
        for place in shown
    ]
    before, behind = [None] * len(page.prompts), [None] * len(prompts)
    rounds = [replace(one, responses=[*before, *(one.responses[place] for place in shown)]) for one in rounds]
    left = f", {len(shown)} of them here: those with the highest risk" if len(shown) < len(calibration) else ""
    return replace(
        page,
        origin=f"{page.origin}; rounds: {len(calibration)} calibration prompts{left}",
        candidates=[*(replace(one, responses=[*one.responses, *behind]) for one in page.candidates), *rounds],
        prompts=[*page.prompts, *prompts],
        media=[*page.media, *album.media()],
        tokens={token: files.texts.shown(token) for token in ids_of(prompts, rounds)} | dict(page.tokens),
    )


def _behind(page: Page, turns: Sequence[Turn]) -> list[Turn]:
    """The turns, their media behind those that the page has."""
    return [replace(turn, parts=[_shifted(part, len(page.media)) for part in turn.parts]) for turn in turns]


def _shifted(part: MessagePart, by: int) -> MessagePart:
    return part if part.media is None else replace(part, media=part.media + by)


def _candidate(stage: Stage, files: RunFiles, prompts: Sequence[Prompt], size: int | None) -> Candidate:
    recipe, resampler = files.recipe, Resampler(files.recipe.seed)
    responses = [_response(stage, one.ordinal, files) for one in prompts]
    is_round = stage.name.startswith(ROUND)
    figures = {name: resampler.estimate(one) for name, one in _measures(stage, files, is_round).items()}
    return Candidate(
        stage.name,
        stage.name,
        stage.how,
        verdict(responses, None, resampler),
        {name: Figure(one.value, one.low, one.high) for name, one in figures.items()},
        recipe.scheme,
        None if is_round else size,  # held-out prompts are answered by models of one scheme
        served_by(recipe.scheme) if stage.name == "result" else (),
        responses=riskiest(responses, MOST) if is_round else responses,
        aside=is_round,
        selects=is_round and recipe.selects,
    )


def _measures(stage: Stage, files: RunFiles, is_round: bool) -> dict[str, Single]:
    """What can be said of the states of a stage. Tokens that were drawn, or that the dense model wrote, are no noise."""
    states, ordinals, follow = stage.visit.states, sorted(stage.visit.rows), files.recipe.follow
    responses = [stage.visit.trajectories[prompt] for prompt in ordinals]
    dense = [files.dense[prompt] for prompt in ordinals if prompt in files.dense]
    measures = behaviour_measures(states, ordinals) | damage_measures(
        ordinals,
        states=states,
        responses=responses,
        dense_responses=dense if len(dense) == len(ordinals) and not is_round else None,
    )
    greedy = follow.policy == "quantized" and follow.sampling == "greedy"
    return {name: one for name, one in measures.items() if greedy or not is_round or not name.startswith("noise")}


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


def _response(stage: Stage, prompt: int, files: RunFiles) -> Response | None:
    """The response with its states; risk is that of the bank where it has some."""
    visit = stage.visit
    if prompt not in visit.rows:
        return None
    states = visit.states.take(visit.rows[prompt])
    states = states if states.risk.any() else scored(states, None)
    known = (
        None if stage.name.startswith(ROUND) else files.dense.get(prompt)
    )  # in a round it may be the response itself
    response = respond(known, visit.trajectories[prompt], states, stage.details, files.texts)
    if stage.later and response.states is not None:
        columns = became(visit, prompt, stage.later)
        response = replace(response, states=replace(response.states, became=columns))
    return response
