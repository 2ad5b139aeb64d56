"""The comparison: the dense model and its candidates on the same items and prompts, every result in one folder.

A killed comparison goes on after its finished results. A later one with the same dense model, items and prompts adds
candidates to those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from onptq.bank import States, read_trajectories, write_trajectories
from onptq.checkpoint.load import load_reader
from onptq.checkpoint.source import Source, choose_device, choose_dtype, find_source, open_checkpoint
from onptq.cycle.compare import compare as compare_states
from onptq.cycle.follow import follow
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.evaluate.answers import Questions, answer, write_answers
from onptq.evaluate.build import Cost, build, folder_bytes
from onptq.evaluate.candidates import (
    DENSE,
    Candidate,
    CheckpointCandidate,
    MethodCandidate,
    RunCandidate,
    folder_name,
    parse_candidates,
)
from onptq.evaluate.critical import joint_critical, margins_on
from onptq.evaluate.report import markdown
from onptq.evaluate.session import Session
from onptq.evaluate.statistics import REPLICATES, Resampler
from onptq.evaluate.store import (
    ANSWERS,
    COST,
    MARGINS,
    ROLLOUTS,
    STATES,
    THETA,
    check_same,
    is_complete,
    path_of,
    read_results,
    write_identity,
)
from onptq.evaluate.summary import Report, summarize
from onptq.evaluate.tasks import Item, check_items, items_digest
from onptq.files import atomically, file_sha256, to_json
from onptq.models.language_model import Side
from onptq.progress import QuietReporter, Reporter
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import INIT, Run
from onptq.version import __version__

REPORT_JSON, REPORT_TEXT = "report.json", "report.md"


def compare_models(
    dense: str | Path | Source,
    candidates: Sequence[Candidate | str],
    out: str | Path,
    *,
    items: Sequence[Item] = (),
    prompts: Sequence[Prompt] = (),
    calibration: Sequence[Prompt] = (),
    holdout: Sequence[Prompt] = (),
    origin: str = "",
    recipe: Recipe | None = None,
    critical: bool = False,
    replicates: int = REPLICATES,
    reporter: Reporter | None = None,
) -> Report:
    """The report over all results in `out`, those of `candidates` included.

    `items` are answered and graded; `prompts` are followed and compared with the dense model; `origin` says in the report
    where both come from. `calibration` and `holdout` are for candidates that are made here: the first so many of them as the
    candidate's recipe says. `recipe` gives the device, the length of a rollout, the seed, and what candidates follow that name
    no preset. With `critical`, margins are also taken on the joint-critical states of plain rounding, which then is a candidate
    too.
    """
    recipe, reporter = recipe or Recipe(), reporter or QuietReporter()
    if not items and not prompts:
        raise OnPTQError("there is nothing to compare by; expected items, prompts, or both")
    if items:
        check_items(items)
    parsed = [one if not isinstance(one, str) else parse_candidates([one], recipe)[0] for one in candidates]
    banks = _bank_candidates(parsed, recipe) if critical and prompts else {}
    parsed += [one for one in banks.values() if one.name not in {other.name for other in parsed}]
    source = dense if isinstance(dense, Source) else find_source(dense)
    prompts = [replace(prompt, ordinal=ordinal) for ordinal, prompt in enumerate(prompts)]
    records = {one.name: _record(one, source, calibration, holdout) for one in parsed}
    device = choose_device(recipe.compute.device)
    dtype = choose_dtype(recipe.compute.dtype, device, reporter.note)
    with reporter.phase("Hash the model", total=len(source.files), unit="files") as bar:
        identity = _identity(source, source.sha256(bar.advance), items, prompts, recipe, dtype)
    with Run.open(out, identity, warn=reporter.warn) as run:
        for name, record in records.items():
            check_same(run, name, record)
        for name, record in records.items():
            write_identity(run, name, record)
        session = Session(source, recipe, device, dtype, items, prompts, calibration, holdout, run, reporter)
        by_theta = [one for one in parsed if not isinstance(one, CheckpointCandidate)]
        build(by_theta, session)
        _measure(parsed, session)
        _measure_critical(by_theta, banks, session)
        results = read_results(run, bool(items), bool(prompts))
        ordinals = [prompt.ordinal for prompt in prompts]
        report = summarize(items, ordinals, results, Resampler(recipe.seed, replicates), source.name, origin)
        for name, text in ((REPORT_JSON, to_json(report.to_dict(), indent=2) + "\n"), (REPORT_TEXT, markdown(report))):
            with atomically(run.folder / name) as path:
                path.write_text(text, encoding="utf-8")
    return report


def _measure(candidates: Sequence[Candidate], session: Session) -> None:
    """Answers and states of the dense model and of every candidate that lacks some."""
    run = session.run
    waiting = [one for one in candidates if not is_complete(run, one.name, bool(session.items), bool(session.prompts))]
    by_theta = [one for one in waiting if not isinstance(one, CheckpointCandidate)]
    by_theta.sort(key=lambda one: str(one.scheme))
    if not run.has(DENSE, COST):
        if by_theta:
            session.policy(by_theta[0].scheme)
        if session.items:
            _answer(session, (DENSE, ANSWERS), DENSE, session.questions, "D")
        run.write_json(Cost(checkpoint_bytes=folder_bytes(session.source.shards)).to_dict(), DENSE, COST)
    for one in by_theta:
        _speak_as(one, session)
        if session.items:
            _answer(session, path_of(one.name, ANSWERS), one.name, session.questions, "Q")
        if session.prompts:
            _follow(session, one.name, session.prefixes())
    for checkpoint in (one for one in waiting if isinstance(one, CheckpointCandidate)):
        _measure_checkpoint(checkpoint, session)


def _measure_checkpoint(candidate: CheckpointCandidate, session: Session) -> None:
    source, run = open_checkpoint(candidate.folder), session.run
    with session.reporter.phase(f"Load {candidate.name}", total=1, unit="checkpoint") as bar:
        reader = load_reader(source, session.dtype, session.device, session.source.eos())
        bar.advance()
    dense = session.policy()
    if reader.vocabulary != dense.vocabulary:
        raise OnPTQError(
            f"{candidate.folder} has {reader.vocabulary} output tokens, the dense model {dense.vocabulary}; "
            "expected a quantized version of the same model"
        )
    name = candidate.name
    if session.items:
        encode = lambda: session.encode_items(reader, f"Encode items {name}")  # noqa: E731
        _answer(session, path_of(name, ANSWERS), name, encode, "Q")
    if session.prompts:
        encoded = session.encode_prompts(reader, session.prompts, f"Encode prompts {name}")
        _follow(session, name, session.prefixes(), session.batched(reader, encoded, 0))
    run.write_json(Cost(checkpoint_bytes=folder_bytes(source.shards)).to_dict(), *path_of(name, COST))


def _answer(session: Session, home: Sequence[str], name: str, questions: Callable[[], Questions], side: Side) -> None:
    """Commit a model's answers to every item, unless they are there."""
    if session.run.has(*home):
        return
    encoded = questions()
    with session.reporter.phase(f"Answer {name}", total=len(session.items), unit="items") as bar:
        answers = answer(encoded, side, bar.advance)
    with session.run.writing(*home) as path:
        write_answers({name: answers}, path)


def _follow(session: Session, name: str, dense: Prefixes, model: Prefixes | None = None) -> None:
    """Commit a candidate's rollouts and states, unless they are there; `model` where it is not a Q of the dense policy."""
    if session.run.has(*path_of(name, STATES)):
        return
    total = len(session.prompts)
    with session.reporter.phase(f"Follow {name}", total=total, unit="prompts") as bar:
        rollouts = follow(model or dense, advance=bar.advance)
    with session.reporter.phase(f"Compare {name}", total=total, unit="prompts") as bar:
        try:
            states = compare_states(dense, rollouts, quantized=model, advance=bar.advance)
        except OnPTQError as error:
            raise OnPTQError(f"{name}: {error}") from error
    with session.run.writing(*path_of(name, ROLLOUTS)) as path:
        write_trajectories(rollouts, path)
    with session.run.writing(*path_of(name, STATES)) as path:
        states.write(path)


def _bank_candidates(candidates: Sequence[Candidate], recipe: Recipe) -> dict[str, MethodCandidate]:
    """By scheme, plain rounding: the candidate whose states are the frozen bank.

    The paper judges variants of one initial checkpoint on that checkpoint's bank. Here methods of every kind are judged. A bank
    of any of them would hold the mistakes of just that one and of its descendants.
    """
    schemes = dict.fromkeys(str(one.scheme) for one in candidates if isinstance(one, MethodCandidate))
    parsed = parse_candidates([f"rtn:{scheme}" for scheme in schemes], recipe) if schemes else []
    return {str(one.scheme): one for one in parsed if isinstance(one, MethodCandidate)}


def _measure_critical(
    candidates: Sequence[MethodCandidate | RunCandidate], banks: Mapping[str, MethodCandidate], session: Session
) -> None:
    """Margins on the bank of its scheme, of every candidate that has none yet."""
    run = session.run
    for scheme, visiting in banks.items():
        same = [one for one in candidates if str(one.scheme) == scheme]
        waiting = [one for one in same if not run.has(*path_of(one.name, MARGINS))]
        if not waiting:
            continue
        rollouts = read_trajectories(run.file(*path_of(visiting.name, ROLLOUTS)))
        home = ("critical", f"{folder_name(visiting.name)}.parquet")
        if not run.has(*home):
            states = States.read(run.file(*path_of(visiting.name, STATES)))
            _speak_as(visiting, session)
            with session.reporter.phase(f"Branch {visiting.name}", total=len(states), unit="states") as bar:
                bank = joint_critical(session.prefixes(), rollouts, states, advance=bar.advance)
            with run.writing(*home) as path:
                bank.write(path)
        bank = States.read(run.file(*home))
        for one in waiting:
            _speak_as(one, session)
            with session.reporter.phase(f"Margins {one.name}", total=len(session.prompts), unit="prompts") as bar:
                margins = margins_on(session.prefixes(), rollouts, bank, bar.advance)
            with run.writing(*path_of(one.name, MARGINS)) as path:
                margins.write(path)


def _speak_as(one: MethodCandidate | RunCandidate, session: Session) -> None:
    session.policy(one.scheme)
    session.speak_as(Theta.load(session.run.file(*path_of(one.name, THETA)), session.device))


def _identity(
    source: Source, sha256: str, items: Sequence[Item], prompts: Sequence[Prompt], recipe: Recipe, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "comparison": {
            "max_tokens": recipe.follow.max_tokens,
            "batch_tokens": recipe.compute.batch_tokens,
            "dtype": str(dtype).removeprefix("torch."),
        },
        "model": {"source": source.name, "family": source.family.name, "sha256": sha256},
        "items": {"sha256": items_digest(items), "count": len(items)},
        "prompts": {"sha256": manifest_digest(prompts), "count": len(prompts)},
        "versions": {"onptq": __version__, **{name: version(name) for name in ("torch", "transformers")}},
    }


def _record(
    candidate: Candidate, dense: Source, calibration: Sequence[Prompt], holdout: Sequence[Prompt]
) -> dict[str, Any]:
    """The facts by which results are known to be this candidate's."""
    if isinstance(candidate, RunCandidate):
        scheme = str(candidate.scheme)
        return {"name": candidate.name, "theta": file_sha256(candidate.theta), "scheme": scheme}
    if isinstance(candidate, CheckpointCandidate):
        source = open_checkpoint(candidate.folder)
        if source.family != dense.family:
            raise OnPTQError(
                f"{candidate.folder} is a {source.family.name} model, the dense one is {dense.family.name}; expected a "
                "quantized version of the same model"
            )
        return {"name": candidate.name, "checkpoint": source.sha256()}
    recipe, data = candidate.recipe, candidate.recipe.data
    used = calibration[: data.prompts] if recipe.needs_prompts else []
    if recipe.needs_prompts and not used:
        raise OnPTQError(f"{candidate.name} needs calibration prompts to be built; give a manifest (JSONL or parquet)")
    record: dict[str, Any] = {"name": candidate.name, "method": recipe.method, "scheme": str(candidate.scheme)}
    record["calibration"] = manifest_digest(used)
    if recipe.init_steps is not None:
        record["init_steps"] = recipe.init_steps
    if recipe.rounds:
        settings = recipe.model_dump(exclude={"compute"})
        if candidate.init_run is not None:
            record["init"] = file_sha256(candidate.init_run / INIT)
        return record | {"holdout": manifest_digest(holdout[: data.holdout]), "recipe": settings}
    return record
