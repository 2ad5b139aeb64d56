"""Banks of states, frozen before anything is compared: visited by one Q, branched at every state at two horizons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onptq.bank import MISMATCH, NEAR_MISS, Column, States, Trajectory
from onptq.cycle.branch import branch
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.risk import score
from onptq.cycle.rounds import STATES, TRAJECTORIES
from onptq.data.manifest import manifest_digest
from onptq.evaluate.build import build
from onptq.evaluate.candidates import MethodCandidate, folder_name
from onptq.evaluate.critical import TOP
from onptq.evaluate.session import Session
from onptq.evaluate.store import THETA, path_of, write_identities
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.reproduce.experiment import Experiment
from onptq.reproduce.settings import FAR
from onptq.schemes import Scheme


@dataclass(frozen=True)
class Bank:
    """Visited states. `states` have A_t at the paper's horizon and, candidates or not, the risk of Eq. 9; `far` is the
    consequence at H = 16."""

    trajectories: list[Trajectory]
    states: States
    far: Column  # float, of every state
    valid: Column  # bool: both futures have a state to compare

    def take(self, rows: Column) -> Bank:
        return Bank(self.trajectories, self.states.take(rows), self.far[rows], self.valid[rows])

    @property
    def usable(self) -> Bank:
        """The states with valid branches, which the paper's analyses are on."""
        return self.take(np.flatnonzero(self.valid))

    @property
    def mismatch(self) -> Column:
        rows: Column = self.states.kind == MISMATCH
        return rows

    @property
    def high(self) -> Column:
        """The states in the top fifth of consequence at H = 16; equals at the bar count."""
        if not len(self.far):
            return np.zeros(0, np.bool_)
        rows: Column = (self.far >= np.quantile(self.far, 1 - TOP)) & (self.far > 0)
        return rows

    @property
    def joint(self) -> Column:
        """Joint-critical: a mismatch of high consequence."""
        rows: Column = self.mismatch & self.high
        return rows


def make_theta(session: Session, one: MethodCandidate) -> Path:
    """The file of a candidate's theta, made by the harness unless it is there; refuse another one's of the same name."""
    used = session.calibration[: one.recipe.data.prompts]
    record = {
        "name": one.name,
        "calibration": manifest_digest(used),
        "recipe": one.recipe.model_dump(exclude={"compute", "report"}),
        "init_steps": one.recipe.init_steps,
    }
    write_identities(session.run, {one.name: record})
    build([one], session)
    return session.run.file(*path_of(one.name, THETA))


def speaker(session: Session, theta: Path, scheme: str) -> Callable[[], None]:
    """A function that makes Q what the theta folds to, when something has to be computed with it."""

    def speak() -> None:
        session.policy(Scheme.parse(scheme))
        session.speak_as(Theta.load(theta, session.device))

    return speak


def visit(session: Session, name: str, speak: Callable[[], None], recipe: Recipe) -> Bank:
    """The states that Q visits on the session's prompts; read back where an earlier process made them."""
    run, total = session.run.arm(f"banks/{folder_name(name)}"), len(session.prompts)
    if not run.has("far.parquet"):
        speak()

    def roll_out() -> list[Trajectory]:
        with session.reporter.phase(f"Follow {name}", total=total, unit="prompts") as bar:
            return follow(session.prefixes(), advance=bar.advance)

    trajectories = run.step("trajectories.parquet", TRAJECTORIES, roll_out)

    def decide() -> States:
        with session.reporter.phase(f"Compare {name}", total=total, unit="prompts") as bar:
            return compare(session.prefixes(), trajectories, advance=bar.advance)

    states = run.step("compared.parquet", STATES, decide)

    def look_ahead(horizon: int) -> States:
        with session.reporter.phase(f"Branch {name}, H = {horizon}", total=len(states), unit="states") as bar:
            return branch(
                session.prefixes(), trajectories, states, horizon=horizon, everywhere=True, advance=bar.advance
            )

    near = run.step("near.parquet", STATES, lambda: look_ahead(recipe.branch.horizon))
    far = run.step("far.parquet", STATES, lambda: look_ahead(FAR))
    # The cycle gives others than candidates no risk, as it must not select them.
    everywhere = score(near.with_columns(kind=np.full_like(near.kind, NEAR_MISS)), recipe.risk)
    states = near.with_columns(risk=everywhere.risk)
    return Bank(trajectories, states, far.consequence.astype(np.float64), far.horizon > 0)


@dataclass(frozen=True)
class OfInit:
    """The bank of the init on held-out prompts, and the open session that made it; `speak` makes Q the init."""

    session: Session
    recipe: Recipe
    name: str  # of the init
    bank: Bank
    speak: Callable[[], None]


@contextmanager
def bank_of_init(experiment: Experiment, scheme: str) -> Iterator[OfInit]:
    """A context with the bank that the analyses of single states share."""
    with experiment.session(f"states-{scheme}", scheme, experiment.bank_prompts()) as session:
        recipe = experiment.recipe(scheme)
        init = experiment.base(recipe.init, scheme)
        speak = speaker(session, make_theta(session, init), scheme)
        yield OfInit(session, recipe, init.name, visit(session, init.name, speak, recipe), speak)
