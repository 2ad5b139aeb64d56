"""The page of a comparison, from the files in its folder alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onptq.bank import States as Bank
from onptq.bank import Trajectory
from onptq.data.prompt_table import read_prompts
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.answers import Answer as Graded
from onptq.evaluate.candidates import DENSE, shown
from onptq.evaluate.comparison import REPORT_JSON
from onptq.evaluate.damage import NEAR_TIE
from onptq.evaluate.details import read_details, scored
from onptq.evaluate.model_card import init_kept
from onptq.evaluate.previews import PREVIEWS, Previews, read_previews
from onptq.evaluate.report import caveats
from onptq.evaluate.statistics import Resampler
from onptq.evaluate.store import (
    ATTRIBUTION,
    DETAILS,
    IDENTITY,
    ITEMS,
    PROMPTS,
    TOKENS,
    path_of,
    read_results,
)
from onptq.evaluate.summary import Results
from onptq.evaluate.token_texts import TokenTexts
from onptq.files import read_json
from onptq.page.contract import (
    Answer,
    Candidate,
    Figure,
    Measure,
    Page,
    Question,
    Response,
    States,
)
from onptq.page.costs import COSTS, cost_figures, costs_of_run
from onptq.page.linear_plot import erosion_by_linear
from onptq.page.media import Album
from onptq.page.provenance import display, how_made, served_by
from onptq.page.responses import Details, respond, spoken
from onptq.page.verdict import flips_of, verdict
from onptq.page.worst import badness_of_item, badness_of_prompt
from onptq.plain_yaml import read_yaml
from onptq.recipe import Recipe
from onptq.run import HOME, RECORD, SUMMARY, Run
from onptq.version import __version__

WORDS = "word errors"  # a measure of items of which less is better
WITHOUT_LABEL = {"mismatch": "noise"}  # noise floors in reports of earlier versions
UNITS = {"kl": "nats", "js": "nats", "erosion": "logits", "first_fork": "tokens", "critical_erosion": "logits"}
NOTES = (
    f"An answer changes clearly if, where it leaves the dense model's, that model itself preferred its own token by at least "
    f"{NEAR_TIE} logits; below, it is a near tie. A short answer of other words, or one graded otherwise, says something else. "
    "Brackets are 95% intervals.",
    "Risk: the erosion of a decision's margin, amplified by its consequence where that was measured, plus the divergence of both "
    "models. Consequence: how far the dense model sees the next 16 tokens apart behind the two tokens, which count as one more; "
    "it continues both itself.",
)


@dataclass(frozen=True)
class Files:
    """The folder of a comparison, read."""

    folder: Path
    report: Mapping[str, Any]
    results: Mapping[str, Results]  # the dense model's first
    identities: Mapping[str, Mapping[str, Any]]
    prompts: Sequence[Prompt]
    items: Sequence[Prompt]
    texts: TokenTexts
    details: Mapping[str, Details]
    attributions: Mapping[str, Mapping[str, Any]]
    previews: Previews | None

    @classmethod
    def read(cls, folder: Path) -> Files:
        run = Run(folder, folder / HOME, None)
        for file in (folder / REPORT_JSON, run.file(RECORD)):
            if not file.is_file():
                raise OnPTQError(f"{folder} is no folder of a finished comparison: it has no {file.name}")
        report = read_json(folder / REPORT_JSON)
        missing = [
            name for name, count in ((PROMPTS, "prompts"), (ITEMS, "items")) if report[count] and not run.has(name)
        ]
        if missing or not run.has(TOKENS):
            raise OnPTQError(
                f"{folder} was written by an earlier onptq, without {' and '.join(missing or [TOKENS])}; the same "
                "`onptq compare` adds what is missing, and measures nothing twice"
            )
        results = read_results(run, bool(report["items"]), bool(report["prompts"]))
        read = {name: read_json(run.file(*path_of(name, IDENTITY))) for name in results if name != DENSE}
        candidates = sorted(
            read, key=lambda name: "theta" not in read[name]
        )  # first the run that the others are held against
        details = {name: run.file(*path_of(name, DETAILS)) for name in candidates}
        attributions = {name: run.file(*path_of(name, ATTRIBUTION)) for name in candidates}
        return cls(
            folder,
            report,
            results,
            {name: read[name] for name in candidates},
            read_prompts(run.file(PROMPTS)) if report["prompts"] else (),
            read_prompts(run.file(ITEMS)) if report["items"] else (),
            TokenTexts.read(run.file(TOKENS)),
            {name: read_details(file) for name, file in details.items() if file.is_file()},
            {name: read_json(file) for name, file in attributions.items() if file.is_file()},
            read_previews(run.file(PREVIEWS)),
        )


def collect(folder: Path) -> Page:
    """The page of the comparison in `folder`."""
    files = Files.read(folder)
    report, dense = files.report, files.results[DENSE]
    bootstrap = report["bootstrap"]
    resampler = Resampler(bootstrap["seed"], bootstrap["replicates"], bootstrap["confidence"])
    said = {one.prompt: one for one in dense.responses or ()}
    items = [_item(one, dense.answers) for one in files.items]
    bare = [_prompt(one, said[one.ordinal], files) for one in files.prompts]
    candidates = [_candidate(name, files, bare, items, said, resampler) for name in files.identities]
    album = Album(files.previews)
    prompts = [
        replace(one, turns=album.turns(source, badness_of_prompt(place, candidates)))
        for place, (one, source) in enumerate(zip(bare, files.prompts, strict=True))
    ]
    items = [
        replace(one, turns=album.turns(source, badness_of_item(one, place, candidates)))
        for place, (one, source) in enumerate(zip(items, files.items, strict=True))
    ]
    tasks: dict[str, int] = {}
    for one in items:
        tasks[one.task] = tasks.get(one.task, 0) + 1
    names = candidates[0].title if len(candidates) == 1 else f"{len(candidates)} quantized models"
    return Page(
        title=f"{report['dense']} and {names}",
        dense=report["dense"],
        origin=report["origin"],
        candidates=candidates,
        prompts=prompts,
        items=items,
        media=album.media(),
        tokens={token: files.texts.shown(token) for token in ids_of(prompts, candidates)},
        measures=measures_of(report) | COSTS,
        notes=[*NOTES, *caveats(tasks, len(prompts))],
        dense_bytes=dense.cost.get("checkpoint_bytes"),
        version=__version__,
    )


def measures_of(report: Mapping[str, Any]) -> dict[str, Measure]:
    """What the figures of a report are called."""
    return {
        name: Measure(
            label["name"],
            "%" if label["percent"] else _unit(name),
            label["less_is_better"],
            label.get("noise") or WITHOUT_LABEL.get(name, ""),
            label.get("noise_at_most", False),
        )
        for name, label in report["labels"].items()
    }


def ids_of(prompts: Iterable[Question], candidates: Iterable[Candidate]) -> list[int]:
    """Every token id that a page shows, in order."""
    ids: set[int] = set()
    for question in prompts:
        ids.update(question.dense.tokens or ())
    for response in (one for candidate in candidates for one in candidate.responses if one is not None):
        ids.update(response.answer.tokens or ())
        if response.states is not None:
            ids.update(_ids_of_states(response.states))
    return sorted(ids)


def _candidate(
    name: str,
    files: Files,
    prompts: Sequence[Question],
    items: Sequence[Question],
    said: Mapping[int, Trajectory],
    resampler: Resampler,
) -> Candidate:
    result, identity = files.results[name], _identity(name, files)
    graded = _by_id(result.answers)
    answers = [_graded(graded[one.id], one_asked.measure) for one, one_asked in zip(items, files.items, strict=True)]
    responses = _responses(name, files, said)
    content = {item.id for item, own in zip(items, answers, strict=True) if own.score != item.dense.score}
    responses = [
        replace(one, change="content") if one.fork is not None and prompt.id in content else one
        for prompt, one in zip(prompts, responses, strict=True)
    ]
    flips = flips_of(items, answers, resampler)
    figures = {
        key: Figure(one["value"], one["low"], one["high"])
        for key, one in _model(files.report, name).get("figures", {}).items()
    }
    scheme = identity.get("scheme", identity.get("stored"))
    plot = erosion_by_linear(files.attributions[name]) if name in files.attributions else None
    return Candidate(
        name,
        display(shown(name)) if "scheme" in identity else name,
        how_made(identity),
        verdict(responses, flips, resampler),
        figures | _costs(result.cost, name, files),
        scheme,
        result.cost.get("checkpoint_bytes"),
        served_by(scheme),
        flips,
        answers,
        responses,
        () if plot is None else (plot,),
    )


def _costs(cost: Mapping[str, Any], name: str, files: Files) -> dict[str, Figure]:
    """Seconds and peak memory of the candidate's calibration, where these are known."""
    if "theta" in files.identities[name] and (files.folder.parent / SUMMARY).is_file():
        return costs_of_run(files.folder.parent)
    return cost_figures(cost.get("seconds"), cost.get("peak_bytes"))


def _identity(name: str, files: Files) -> Mapping[str, Any]:
    """The record of a candidate; of the run that the comparison belongs to, with the recipe that made it."""
    identity, run = files.identities[name], files.folder.parent / RECORD
    if "theta" not in identity or not run.is_file():
        return identity
    recipe = Recipe.model_validate(read_yaml(run)["recipe"])
    if not recipe.rounds or init_kept(files.folder.parent):
        return {**identity, "method": recipe.init}
    return {**identity, "method": recipe.method, "recipe": recipe.model_dump()}


def _responses(name: str, files: Files, said: Mapping[int, Trajectory]) -> list[Response]:
    result = files.results[name]
    if result.states is None:
        return []
    states = scored(result.states, result.mismatches)
    rows = states.rows_by_prompt()
    own = {one.prompt: one for one in result.responses or ()}
    details = files.details.get(name, {})
    return [
        respond(said[one.ordinal], own[one.ordinal], _taken(states, rows, one.ordinal), details, files.texts)
        for one in files.prompts
    ]


def _taken(states: Bank, rows: Mapping[int, Any], prompt: int) -> Bank | None:
    return states.take(rows[prompt]) if prompt in rows else None


def _model(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A candidate's part of a report; of one seed of several, that seed's."""
    models: Mapping[str, Any] = report["models"]
    for one in models.values():
        if name in one.get("seeds", {}):
            return one["seeds"][name]  # type: ignore[no-any-return]
    return models.get(name, {})  # type: ignore[no-any-return]


def _prompt(prompt: Prompt, dense: Trajectory, files: Files) -> Question:
    """A prompt without its messages; the item of the same name says what the right answer is."""
    item = next((one for one in files.items if one.id == prompt.id), None)
    reference = item.reference if item is not None and prompt.reference is None else prompt.reference
    return Question(prompt.id, prompt.task, prompt.kinds, (), spoken(dense, files.texts), reference)


def _item(prompt: Prompt, dense: Sequence[Graded]) -> Question:
    answer = _graded(_by_id(dense)[prompt.id], prompt.measure)
    return Question(prompt.id, prompt.task, prompt.kinds, (), answer, prompt.reference)


def _graded(answer: Graded, measure: str | None) -> Answer:
    """An answer with its points; it is right or wrong where the task says so."""
    share = answer.points / answer.total if answer.total else None
    if measure == WORDS and share is not None:
        share = max(0.0, 1 - share)
    right = answer.points == answer.total if measure == "accuracy" else None
    return Answer(answer.text, right=right, score=share)


def _by_id(answers: Sequence[Graded]) -> dict[str, Graded]:
    return {one.item: one for one in answers}


def _unit(name: str) -> str:
    return UNITS.get(name) or next((unit for key, unit in UNITS.items() if name.startswith(f"{key}_")), "")


def _ids_of_states(states: States) -> Iterable[int]:
    yield from (*states.reference, *states.competitor, *states.quantized)
    for top in states.top:
        if top is not None:
            yield from (token for token, _ in (*top.dense, *top.quantized))
    for futures in states.futures:
        if futures is not None:
            yield from (*futures.reference, *futures.competitor)
