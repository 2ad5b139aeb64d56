"""What a comparison measures of damage by running models: for methods, runs and checkpoints, continued and added to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from naive import naive_branch

import onptq
from onptq.bank import MISMATCH, States, Trajectory, read_trajectories
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import find_source
from onptq.cycle.compare import compare as compare_states
from onptq.cycle.follow import follow
from onptq.data.manifest import load_manifest
from onptq.data.prompts import Prompt
from onptq.engine.prefixes import Prefixes
from onptq.evaluate.candidates import RunCandidate, folder_name
from onptq.evaluate.comparison import compare_models
from onptq.evaluate.critical import HORIZON
from onptq.evaluate.report import tables
from onptq.evaluate.summary import Report
from onptq.methods.rtn import rtn
from onptq.models.encoding import encode
from onptq.models.processing import PromptProcessor
from onptq.progress import Bar, QuietReporter
from onptq.quantizer.policy import Policy
from onptq.recipe import Recipe
from onptq.schemes import Scheme

RECIPE = Recipe.preset("light", {"follow.max_tokens": 8, "compute.batch_tokens": 200})
NEW = ("mismatches.parquet", "dense_path.parquet")
LN2 = float(np.log(2))


class Listening(QuietReporter):
    def __init__(self) -> None:
        self.phases: list[str] = []

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        self.phases.append(name)
        with super().phase(name, total, unit) as bar:
            yield bar


def judge(small: Path, out: Path, candidates: list[Any], listening: Listening | None = None) -> Report:
    prompts = load_manifest(small / "prompts.jsonl")[2:]
    return compare_models(small, candidates, out, prompts=prompts, recipe=RECIPE, replicates=50, reporter=listening)


def home(out: Path, name: str) -> Path:
    return out / "onptq" / ("dense" if name == "dense" else f"candidates/{folder_name(name)}")


@pytest.fixture(scope="module")
def exported(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "rounded"
    onptq.quantize(small, out, recipe=RECIPE.with_overrides({"scheme": "W2A8", "method": "rtn"}), verify=False)
    return out


@pytest.fixture(scope="module")
def judged(small: Path, exported: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """Three ways to one model, and a finer one."""
    out = tmp_path_factory.mktemp("damage") / "out"
    judge(small, out, ["rtn:W2A8", "rtn:W3A8", str(exported)])
    theta = home(out, "rtn:W2A8") / "theta.safetensors"
    return out, judge(small, out, [RunCandidate("run", theta, Scheme.parse("W2A8"))])


@pytest.fixture(scope="module")
def policy(small: Path) -> Policy:
    """The dense model and plain rounding of it, as the comparison has them."""
    policy = load_policy(find_source(small), "W2A8")
    policy.freeze(rtn(policy))
    return policy


@pytest.fixture(scope="module")
def prefixes(small: Path, policy: Policy) -> Prefixes:
    source = find_source(small)
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    inputs = [processor(prompt) for prompt in load_manifest(small / "prompts.jsonl")[2:]]
    return Prefixes(policy, encode(policy, inputs), max_tokens=8, batch_tokens=200)


def test_all_candidates_are_compared_on_the_responses_of_the_dense_model(
    judged: tuple[Path, Report], prefixes: Prefixes
) -> None:
    out, report = judged
    rollouts = read_trajectories(home(out, "dense") / "trajectories.parquet")
    assert rollouts == follow(prefixes, "D")
    tokens = [token for one in rollouts for token in one.tokens]
    paths = {name: States.read(home(out, name) / "dense_path.parquet") for name in report.models if name != "dense"}
    for name, states in paths.items():
        assert states.token.tolist() == tokens
        figures = report.models[name].figures
        assert figures["dense_path_mismatch"].value == pytest.approx(100 * (states.kind == MISMATCH).mean())
        assert figures["dense_path_kl"].value == pytest.approx(states.kl.mean())
    expected = compare_states(prefixes, rollouts)
    for name in ("rtn:W2A8", "rounded", "run"):
        assert all(np.array_equal(column, getattr(paths[name], key)) for key, column in vars(expected).items()), name
    assert not np.array_equal(paths["rtn:W3A8"].kl, expected.kl)


def test_mismatches_are_branched_by_the_dense_model_and_their_forced_tokens_count(
    judged: tuple[Path, Report], small: Path, policy: Policy
) -> None:
    """Against branches that are prefilled anew for every token, of every mismatch of one prompt."""
    out, report = judged
    folder = home(out, "rtn:W2A8")
    states, branched = (States.read(folder / name) for name in ("states.parquet", "mismatches.parquet"))
    assert branched.t.tolist() == states.t[states.kind == MISMATCH].tolist()
    assert report.models["rtn:W2A8"].figures["cwm"].value == pytest.approx(
        100 * branched.consequence.sum() / len(states)
    )
    source = find_source(small)
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    prompt: Prompt = load_manifest(small / "prompts.jsonl")[2]
    responses = {one.prompt: one.tokens for one in read_trajectories(folder / "trajectories.parquet")}
    rows = np.flatnonzero(branched.prompt == 0)
    assert len(rows)
    for row in rows[:3]:
        prefix = responses[0][: branched.t[row] - 1]
        pair = int(branched.reference[row]), int(branched.competitor[row])
        fork = naive_branch(policy, processor(prompt), prefix, *pair, HORIZON, "D")
        reach = fork.horizon(HORIZON, policy.eos)
        assert branched.horizon[row] == reach
        expected = (sum(fork.js[:reach]) + LN2) / (reach + 1)
        assert branched.consequence[row] == pytest.approx(expected, abs=1e-5)


def test_three_ways_to_one_model_have_the_same_figures(judged: tuple[Path, Report]) -> None:
    _, report = judged
    figures = [report.models[name].figures for name in ("rtn:W2A8", "rounded", "run")]
    assert figures[0] == figures[1] == figures[2]
    assert (figures[0]["clear"].value or 0) + (figures[0]["near_tie"].value or 0) == pytest.approx(
        figures[0]["mismatch"].value
    )
    for name in ("cwm", "dense_path_mismatch", "reworded", "kl_p99"):
        assert (figures[0][name].value or 0) > 0, name


def test_whole_responses_are_held_against_the_dense_model_s(judged: tuple[Path, Report]) -> None:
    out, report = judged
    dense, other = (_responses(home(out, name)) for name in ("dense", "rtn:W3A8"))
    figures = report.models["rtn:W3A8"].figures
    changed = sum(dense[prompt].tokens != other[prompt].tokens for prompt in dense)
    assert figures["reworded"].value == pytest.approx(100 * changed / len(dense))
    lengths = [sum(len(one.tokens) for one in each.values()) for each in (other, dense)]
    assert figures["length"].value == pytest.approx(100 * lengths[0] / lengths[1])
    assert report.models["dense"].figures.keys() == {"loops"}


def _responses(folder: Path) -> dict[int, Trajectory]:
    return {one.prompt: one for one in read_trajectories(folder / "trajectories.parquet")}


def earlier(out: Path, copy: Path) -> Path:
    """The comparison as a version left it that measured none of this."""
    shutil.copytree(out, copy)
    for path in list(copy.rglob("*.parquet")):
        if path.name in NEW or path == home(copy, "dense") / "trajectories.parquet":
            path.unlink()
    return copy


@pytest.mark.slow
def test_a_comparison_of_an_earlier_version_gets_what_it_lacks(
    judged: tuple[Path, Report], small: Path, exported: Path, tmp_path: Path
) -> None:
    out, expected = judged
    copy = earlier(out, tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.parquet")}
    listening = Listening()
    report = judge(small, copy, ["rtn:W2A8", "rtn:W3A8", str(exported)], listening)
    for name in ("dense", "rtn:W2A8", "rtn:W3A8", "rounded"):
        assert report.models[name].figures == expected.models[name].figures
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [one for one in listening.phases if one.startswith(("Follow", "Compare"))] == ["Follow dense"]


def test_a_candidate_of_an_earlier_version_that_is_not_named_has_dashes(
    judged: tuple[Path, Report], small: Path, tmp_path: Path
) -> None:
    out, expected = judged
    report = judge(small, earlier(out, tmp_path / "copy"), ["rtn:W2A8"])
    assert report.models["rtn:W2A8"].figures == expected.models["rtn:W2A8"].figures
    figures = report.models["rtn:W3A8"].figures
    assert {"cwm", "dense_path_mismatch", "dense_path_kl", "noise_dense_path"} == expected.models[
        "rtn:W3A8"
    ].figures.keys() - figures.keys()
    [damage] = [table for table in tables(report) if table.title == "Damage"]
    cells = {row[0]: dict(zip(damage.header[1:], row[1:], strict=True)) for row in damage.rows}
    assert cells["rtn:W3A8"]["CWM %"] == "-"
    assert cells["rtn:W3A8"]["reworded %"] != "-"


def test_the_dense_model_is_followed_once(judged: tuple[Path, Report], small: Path, tmp_path: Path) -> None:
    out, _ = judged
    copy = shutil.copytree(out, tmp_path / "copy")
    listening = Listening()
    judge(small, copy, ["rtn:W4A8", "rtn:W2A8"], listening)
    measured = [one for one in listening.phases if one.endswith((" dense", "W2A8", "W4A8"))]
    assert measured == [
        "Build rtn:W4A8", "Follow rtn:W4A8", "Compare rtn:W4A8", "Branch rtn:W4A8", "Details rtn:W4A8", "Dense path rtn:W4A8",
        "Attribute rtn:W4A8",
    ]  # fmt: skip
