"""`compare`: the dense model and its candidates on the same items and held-out prompts, every result kept in one folder.

A candidate's answers and states are files of their own, written when they are whole. So a killed comparison goes on after
them, and a later one with the same dense model, items and prompts adds candidates beside those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from onptq import __version__
from onptq.bank import write_trajectories
from onptq.checkpoint.load import load_reader
from onptq.checkpoint.source import Source, choose_device, choose_dtype, find_source, open_checkpoint
from onptq.cycle.follow import follow
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.evaluate.answers import Questions, answer, check_items, write_answers
from onptq.evaluate.behaviour import compare_rollouts
from onptq.evaluate.build import build_at_once, build_by_the_cycle, folder_bytes
from onptq.evaluate.candidates import DENSE, Built, Candidate, Made, folder_name, parse_candidates
from onptq.evaluate.critical import bank_candidates, judge_critical
from onptq.evaluate.items import Item, items_digest
from onptq.evaluate.report import markdown
from onptq.evaluate.session import Hall
from onptq.evaluate.statistics import REPLICATES, Resampler
from onptq.evaluate.store import (
    ANSWERS,
    COST,
    IDENTITY,
    ROLLOUTS,
    STATES,
    THETA,
    check_same,
    is_complete,
    kept,
    note_identity,
    parts,
)
from onptq.evaluate.summary import summarize
from onptq.files import atomically, to_json
from onptq.methods import METHODS, initialize
from onptq.models.encoding import EncodedPrompt
from onptq.models.language_model import Side
from onptq.progress import LoggedReporter, NamedReporter, QuietReporter, Reporter
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import Run

REPORT, WORDS = "report.json", "report.md"


def compare(
    dense: str | Path,
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
) -> dict[str, Any]:
    """The report over everything kept in `out`, those `candidates` included that were not there yet.

    `items` are answered and graded; `prompts` are followed and held against the dense model; `origin` tells the report's
    readers where both come from. `calibration` and `holdout` are for candidates that are built here: the first so many of them
    as the candidate's recipe says. `recipe` gives the device, the length of a rollout, the seed, and what built candidates
    follow that name no preset. With `critical`, margins are also taken on the joint-critical states of plain rounding, which
    then is a candidate too.
    """
    recipe, reporter = recipe or Recipe(), reporter or QuietReporter()
    if not items and not prompts:
        raise OnPTQError("there is nothing to compare by; expected items, prompts, or both")
    if items:
        check_items(items)
    parsed = [one if not isinstance(one, str) else parse_candidates([one], recipe)[0] for one in candidates]
    banks = bank_candidates(parsed, recipe) if critical and prompts else {}
    parsed += [one for one in banks.values() if one.name not in {other.name for other in parsed}]
    source = find_source(dense)
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
            note_identity(run, name, record)
        hall = Hall(source, recipe, device, dtype, items, prompts, calibration, run, LoggedReporter(reporter, run.log))
        _build([one for one in parsed if isinstance(one, Built)], hall, holdout)
        _examine(parsed, hall)
        judge_critical([one for one in parsed if isinstance(one, Built)], banks, hall)
        results = kept(run, bool(items), bool(prompts))
        report = {"dense": source.name, "origin": origin} | summarize(
            items, [prompt.ordinal for prompt in prompts], results, Resampler(recipe.seed, replicates)
        )
        for name, text in ((REPORT, to_json(report, indent=2) + "\n"), (WORDS, markdown(report))):
            with atomically(run.folder / name) as path:
                path.write_text(text, encoding="utf-8")
    return report


def _build(candidates: Sequence[Built], hall: Hall, holdout: Sequence[Prompt]) -> None:
    """Every theta that is not there yet, before anything is examined: nothing but the calibration is in memory."""
    run = hall.run
    waiting = [one for one in candidates if not run.has(*parts(one.name, COST))]
    for one in sorted(waiting, key=lambda one: (one.by_the_cycle, str(one.scheme))):
        if one.by_the_cycle:
            named = NamedReporter(hall.reporter, one.name)
            folder, (start, spent) = run.file(*parts(one.name, "run")), _start(one, hall)
            theta, own = build_by_the_cycle(
                one, hall.source, hall.calibration, holdout, folder, hall.device, named, start
            )
            cost = own | {"seconds": own["seconds"] + spent["seconds"]}
        else:
            policy = hall.policy(one.scheme)
            prompts = [] if one.method == "rtn" else hall.known(one.recipe.data.prompts)
            method = METHODS[one.method]
            theta, cost = build_at_once(policy, one.name, method, prompts, hall.source, hall.reporter)
        with run.writing(*parts(one.name, THETA)) as path:
            theta.save(path)
        run.write_json(cost, *parts(one.name, COST))


def _start(one: Built, hall: Hall) -> tuple[Path, dict[str, Any]]:
    """The file of theta^(0), and what it cost: made once for every candidate that starts from the same method on the same
    prompts, and that method's own if it is a candidate too."""
    run, recipe = hall.run, one.recipe
    used = hall.calibration[: recipe.data.prompts]
    name, digest = f"{recipe.init}:{one.scheme}", manifest_digest(used)
    home = parts(name)
    own = recipe.init_steps is None and run.has(*home, COST) and run.read_json(*home, IDENTITY)["calibration"] == digest
    if not own:
        home = "starts", f"{folder_name(name)}-{recipe.init_steps or ''}-{digest[:12]}"
    if not run.has(*home, COST):

        def method(policy: Policy, prompts: Sequence[EncodedPrompt], advance: Callable[[int], None]) -> Theta:
            return initialize(policy, prompts, recipe, advance)

        prompts = [] if recipe.init == "rtn" else hall.known(len(used))
        theta, cost = build_at_once(hall.policy(one.scheme), name, method, prompts, hall.source, hall.reporter)
        with run.writing(*home, THETA) as path:
            theta.save(path)
        run.write_json(cost, *home, COST)
    hall.rest()
    return run.file(*home, THETA), run.read_json(*home, COST)


def _examine(candidates: Sequence[Candidate], hall: Hall) -> None:
    run = hall.run
    waiting = [one for one in candidates if not is_complete(run, one.name, bool(hall.items), bool(hall.prompts))]
    built = sorted((one for one in waiting if isinstance(one, Built)), key=lambda one: str(one.scheme))
    if not run.has(DENSE, COST):
        if built:
            hall.policy(built[0].scheme)
        if hall.items:
            _answer(hall, (DENSE, ANSWERS), DENSE, hall.questions, "D")
        run.write_json({"checkpoint_bytes": folder_bytes(hall.source.shards)}, DENSE, COST)
    for one in built:
        policy = hall.policy(one.scheme)
        policy.freeze(Theta.load(run.file(*parts(one.name, THETA)), hall.device), keep="floats")
        if hall.items:
            _answer(hall, parts(one.name, ANSWERS), one.name, hall.questions, "Q")
        if hall.prompts:
            prefixes = hall.prefixes()
            prefixes.forget("Q")
            _follow(hall, one.name, prefixes, prefixes)
    for made in (one for one in waiting if isinstance(one, Made)):
        _examine_made(made, hall)


def _examine_made(made: Made, hall: Hall) -> None:
    source, run = open_checkpoint(made.folder), hall.run
    with hall.reporter.phase(f"Load {made.name}", total=1, unit="checkpoint") as bar:
        reader = load_reader(source, hall.dtype, hall.device, hall.source.eos())
        bar.advance()
    dense = hall.policy()
    if reader.vocabulary != dense.vocabulary:
        raise OnPTQError(
            f"{made.folder} has {reader.vocabulary} output tokens, the dense model {dense.vocabulary}; "
            "expected a quantized version of the same model"
        )
    if hall.items:
        _answer(hall, parts(made.name, ANSWERS), made.name, lambda: hall.ask(reader, f"Encode items {made.name}"), "Q")
    if hall.prompts:
        encoded = hall.encode(reader, hall.prompts, f"Encode prompts {made.name}")
        _follow(hall, made.name, hall.prefixes(), hall.batched(reader, encoded, 0))
    run.write_json({"checkpoint_bytes": folder_bytes(source.shards)}, *parts(made.name, COST))


def _answer(hall: Hall, home: Sequence[str], name: str, questions: Callable[[], Questions], side: Side) -> None:
    if hall.run.has(*home):
        return
    asked = questions()
    with hall.reporter.phase(f"Answer {name}", total=len(hall.items), unit="items") as bar:
        given = answer(asked, side, bar.advance)
    with hall.run.writing(*home) as path:
        write_answers({name: given}, path)


def _follow(hall: Hall, name: str, dense: Prefixes, candidate: Prefixes) -> None:
    if hall.run.has(*parts(name, STATES)):
        return
    total = len(hall.prompts)
    with hall.reporter.phase(f"Follow {name}", total=total, unit="prompts") as bar:
        rollouts = follow(candidate, advance=bar.advance)
    with hall.reporter.phase(f"Compare {name}", total=total, unit="prompts") as bar:
        try:
            states = compare_rollouts(dense, candidate, rollouts, bar.advance)
        except OnPTQError as error:
            raise OnPTQError(f"{name}: {error}") from error
    with hall.run.writing(*parts(name, ROLLOUTS)) as path:
        write_trajectories(rollouts, path)
    with hall.run.writing(*parts(name, STATES)) as path:
        states.write(path)


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
    """What must be equal for kept results to be this candidate's."""
    if isinstance(candidate, Made):
        source = open_checkpoint(candidate.folder)
        if source.family != dense.family:
            raise OnPTQError(
                f"{candidate.folder} is a {source.family.name} model, the dense one is {dense.family.name}; expected a "
                "quantized version of the same model"
            )
        return {"name": candidate.name, "checkpoint": source.sha256()}
    recipe, data = candidate.recipe, candidate.recipe.data
    used = [] if candidate.method == "rtn" else calibration[: data.prompts]
    if candidate.method != "rtn" and not used:
        raise OnPTQError(f"{candidate.name} needs calibration prompts to be built; give a manifest (JSONL or parquet)")
    record = {"name": candidate.name, "method": candidate.method, "scheme": str(candidate.scheme)}
    record["calibration"] = manifest_digest(used)
    if candidate.by_the_cycle:
        settings = recipe.model_dump(exclude={"compute"})
        return record | {"holdout": manifest_digest(holdout[: data.holdout]), "recipe": settings}
    return record
