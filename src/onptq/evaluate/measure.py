"""Answers, states, branches and margins of running models, each committed once to the folder of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onptq.bank import States, Trajectory, read_trajectories, write_trajectories
from onptq.checkpoint.load import load_reader
from onptq.checkpoint.source import open_checkpoint
from onptq.cycle.compare import compare as compare_states
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.evaluate.answers import EncodedItems, answer, write_answers
from onptq.evaluate.attribution import RESPONSES, margin_losses
from onptq.evaluate.build import Cost, folder_bytes
from onptq.evaluate.candidates import (
    DENSE,
    Candidate,
    CheckpointCandidate,
    MethodCandidate,
    RunCandidate,
    folder_name,
)
from onptq.evaluate.critical import joint_critical, margins_on
from onptq.evaluate.details import Futures, branch_mismatches, keeps, likeliest, scored, worth_keeping, write_details
from onptq.evaluate.session import Session
from onptq.evaluate.store import (
    ANSWERS,
    ATTRIBUTION,
    COST,
    DENSE_PATH,
    DETAILS,
    MARGINS,
    MISMATCHES,
    ROLLOUTS,
    STATES,
    THETA,
    is_measured,
    lacks_attribution,
    path_of,
    read_file,
)
from onptq.models.language_model import Side
from onptq.quantizer.theta import Theta


def measure(candidates: Sequence[Candidate], session: Session, damage: bool = True) -> None:
    """Answers and states of the dense model and of every candidate that lacks some.

    Without `damage` mismatches are not branched, and states on the dense model's responses are left out.
    """
    run = session.run
    wanted = bool(session.items), bool(session.prompts), session.recipe.report.detail, damage
    waiting = [one for one in candidates if not is_measured(run, one.name, *wanted)]
    by_theta = [one for one in waiting if not isinstance(one, CheckpointCandidate)]
    by_theta.sort(key=lambda one: str(one.scheme))
    _measure_dense(by_theta, session)
    for one in by_theta:
        _speak_as(one, session)
        if session.items:
            _answer(session, path_of(one.name, ANSWERS), one.name, session.encoded_items, "Q")
        if session.prompts:
            _measure_behaviour(session, one.name, damage=damage)
            _attribute(session, one.name)
    for checkpoint in (one for one in waiting if isinstance(one, CheckpointCandidate)):
        _measure_checkpoint(checkpoint, session, damage)


def _measure_dense(candidates: Sequence[MethodCandidate | RunCandidate], session: Session) -> None:
    """The dense model's answers, size and responses; its policy has the scheme of the first candidate."""
    run = session.run
    unfollowed = bool(session.prompts) and not run.has(DENSE, ROLLOUTS)
    if candidates and (unfollowed or not run.has(DENSE, COST)):
        session.policy(candidates[0].scheme)
    if not run.has(DENSE, COST):
        if session.items:
            _answer(session, (DENSE, ANSWERS), DENSE, session.encoded_items, "D")
        run.write_json(Cost(checkpoint_bytes=folder_bytes(session.source.shards)).to_dict(), DENSE, COST)
    if unfollowed:
        rollouts = _follow(session, DENSE, session.prefixes(), "D")
        with run.writing(DENSE, ROLLOUTS) as path:
            write_trajectories(rollouts, path)


def _measure_checkpoint(candidate: CheckpointCandidate, session: Session, damage: bool) -> None:
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
        _measure_behaviour(session, name, session.batched(reader, encoded, 0), damage)
    if not run.has(*path_of(name, COST)):
        run.write_json(Cost(checkpoint_bytes=folder_bytes(source.shards)).to_dict(), *path_of(name, COST))


def _answer(session: Session, home: Sequence[str], name: str, encode: Callable[[], EncodedItems], side: Side) -> None:
    """Commit a model's answers to every item, unless they are there."""
    if session.run.has(*home):
        return
    encoded = encode()
    with session.reporter.phase(f"Answer {name}", total=len(session.items), unit="items") as bar:
        answers = answer(encoded, side, bar.advance)
    with session.run.writing(*home) as path:
        write_answers({name: answers}, path)


def _measure_behaviour(session: Session, name: str, model: Prefixes | None = None, damage: bool = True) -> None:
    """Commit what is missing of a candidate's rollouts and states, and with `damage` of its branches and of its states on the
    dense model's responses.

    `model` where the candidate is not a Q of the dense policy.
    """
    run, dense = session.run, session.prefixes()
    if not run.has(*path_of(name, STATES)):
        rollouts = _follow(session, name, model or dense)
        states = _compare(session, name, "Compare", rollouts, model)
        with run.writing(*path_of(name, ROLLOUTS)) as path:
            write_trajectories(rollouts, path)
        with run.writing(*path_of(name, STATES)) as path:
            states.write(path)
    detailed = keeps(run.file(*path_of(name, DETAILS)), session.recipe.report.detail)
    if (damage and not run.has(*path_of(name, MISMATCHES))) or not detailed:
        states = read_file(run, States.read, *path_of(name, STATES))
        rollouts = read_file(run, read_trajectories, *path_of(name, ROLLOUTS))
        branched, futures = branch_mismatches(session.prefixes(), rollouts, states, session.reporter, name)
        if not detailed:
            _keep_details(session, name, branched, futures, model)
        if not run.has(*path_of(name, MISMATCHES)):
            with run.writing(*path_of(name, MISMATCHES)) as path:
                branched.write(path)
    if damage and not run.has(*path_of(name, DENSE_PATH)):
        states = _compare(session, name, "Dense path", read_file(run, read_trajectories, DENSE, ROLLOUTS), model)
        with run.writing(*path_of(name, DENSE_PATH)) as path:
            states.write(path)


def _follow(session: Session, name: str, prefixes: Prefixes, side: Side = "Q") -> list[Trajectory]:
    with session.reporter.phase(f"Follow {name}", total=len(session.prompts), unit="prompts") as bar:
        return follow(prefixes, side, advance=bar.advance)


def _compare(session: Session, name: str, phase: str, rollouts: Sequence[Trajectory], model: Prefixes | None) -> States:
    with session.reporter.phase(f"{phase} {name}", total=len(session.prompts), unit="prompts") as bar:
        try:
            return compare_states(session.prefixes(), rollouts, quantized=model, advance=bar.advance)
        except OnPTQError as error:
            raise OnPTQError(f"{name}: {error}") from error


def _keep_details(session: Session, name: str, mismatches: States, futures: Futures, model: Prefixes | None) -> None:
    """Commit the likeliest tokens of the states that the recipe wants to keep, with the futures."""
    run, level = session.run, session.recipe.report.detail
    states = scored(read_file(run, States.read, *path_of(name, STATES)), mismatches)
    chosen = states.take(worth_keeping(states, level))
    rollouts = read_file(run, read_trajectories, *path_of(name, ROLLOUTS))
    with session.reporter.phase(f"Details {name}", total=len(chosen), unit="states") as bar:
        details = likeliest(session.prefixes(), rollouts, chosen, quantized=model, advance=bar.advance)
    with run.writing(*path_of(name, DETAILS)) as path:
        write_details(chosen, details, futures.by_state, level, path)


def _attribute(session: Session, name: str) -> None:
    """Commit the share of every linear in the erosion, unless it is there or nobody wants to look at it."""
    run = session.run
    if not lacks_attribution(run, name, session.recipe.report.detail):
        return
    theta = read_file(run, lambda path: Theta.load(path, session.device), *path_of(name, THETA))
    rollouts = read_file(run, read_trajectories, *path_of(name, ROLLOUTS))
    states = read_file(run, States.read, *path_of(name, STATES))
    total = min(RESPONSES, len(states.take(states.candidates).rows_by_prompt()))
    with session.reporter.phase(f"Attribute {name}", total=total, unit="responses") as bar:
        losses = margin_losses(
            session.policy(), theta, session.prefixes().prompts, rollouts, states, advance=bar.advance
        )
    run.write_json(losses.to_dict(), *path_of(name, ATTRIBUTION))


def measure_critical(
    candidates: Sequence[MethodCandidate | RunCandidate], banks: Mapping[str, MethodCandidate], session: Session
) -> None:
    """Margins on the bank of its scheme, of every candidate that has none yet."""
    run = session.run
    for scheme, visiting in banks.items():
        same = [one for one in candidates if str(one.scheme) == scheme]
        waiting = [one for one in same if not run.has(*path_of(one.name, MARGINS))]
        if not waiting:
            continue
        rollouts = read_file(run, read_trajectories, *path_of(visiting.name, ROLLOUTS))
        home = ("critical", f"{folder_name(visiting.name)}.parquet")
        if not run.has(*home):
            states = read_file(run, States.read, *path_of(visiting.name, STATES))
            _speak_as(visiting, session)
            with session.reporter.phase(f"Branch {visiting.name}", total=len(states), unit="states") as bar:
                bank = joint_critical(session.prefixes(), rollouts, states, advance=bar.advance)
            with run.writing(*home) as path:
                bank.write(path)
        bank = read_file(run, States.read, *home)
        for one in waiting:
            _speak_as(one, session)
            with session.reporter.phase(f"Margins {one.name}", total=len(session.prompts), unit="prompts") as bar:
                margins = margins_on(session.prefixes(), rollouts, bank, bar.advance)
            with run.writing(*path_of(one.name, MARGINS)) as path:
                margins.write(path)


def _speak_as(one: MethodCandidate | RunCandidate, session: Session) -> None:
    session.policy(one.scheme)
    theta = read_file(session.run, lambda path: Theta.load(path, session.device), *path_of(one.name, THETA))
    session.speak_as(theta)
