"""`onptq compare`: methods and checkpoints on the same items and prompts, resumed and added to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import MULTIMODAL, Tiny
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import onptq
from onptq.bank import MISMATCH, States, read_trajectories
from onptq.checkpoint.exportable import output_bytes
from onptq.checkpoint.folder import read_folder
from onptq.checkpoint.load import dense_patterns, load_policy, load_reader
from onptq.checkpoint.source import find_source, open_checkpoint
from onptq.checkpoint.write import write_checkpoint
from onptq.cli import app
from onptq.cli.drawing import origin
from onptq.cli.report_tables import LEFT_OUT, fit, print_table
from onptq.cycle.compare import compare as compare_states
from onptq.cycle.follow import follow
from onptq.data.manifest import load_manifest
from onptq.data.prompts import Prompt
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.evaluate import comparison
from onptq.evaluate import measure as measuring
from onptq.evaluate import session as sessions
from onptq.evaluate.answers import read_answers
from onptq.evaluate.build import measured_peak
from onptq.evaluate.candidates import CheckpointCandidate, MethodCandidate, folder_name, parse_candidates
from onptq.evaluate.report import ReportTable, markdown, sentences, summary_table
from onptq.evaluate.scores import score
from onptq.evaluate.summary import Report
from onptq.evaluate.tasks import Grade, Item
from onptq.methods.rtn import rtn
from onptq.models.encoding import encode
from onptq.models.language_model import LanguageModel
from onptq.models.processing import PromptProcessor
from onptq.models.structure import find_structure
from onptq.page.collect import collect
from onptq.progress import Bar, QuietReporter
from onptq.recipe import Recipe
from onptq.run import run_home
from onptq.schemes import Scheme
from onptq.zoo.random import write_random

RECIPE = Recipe.preset(
    "light",
    {
        "rounds": 1,
        "init_steps": 2,
        "data.prompts": 3,
        "data.holdout": 1,
        "follow.max_tokens": 6,
        "calibrate.epochs": 1,
        "calibrate.batch": 3,
        "calibrate.hidden": 1.0,
        "calibrate.pair": 0.1,
        "calibrate.lr_smoothing": 5e-4,
        "calibrate.lr_step": 5e-4,
        "compute.batch_tokens": 200,
    },
)
FEW = 200  # replicates


@pytest.fixture(scope="module")
def prompts(small: Path) -> list[Prompt]:
    return load_manifest(small / "prompts.jsonl")


@pytest.fixture(scope="module")
def items(prompts: list[Prompt]) -> list[Item]:
    """Answered at random by a random model: some tasks right or wrong, one by facts."""
    letters = [Item(f"q{n}", "letter", prompts[n], "", lambda text: Grade(text[:1] < "m"), 2) for n in range(6)]
    facts = [
        Item(f"t{n}", "tell", prompts[n], "", lambda text: Grade(text.count("e"), len(text)), 8, "facts")
        for n in range(3)
    ]
    return [*letters, *facts]


@pytest.fixture(scope="module")
def exported(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain rounding, as `onptq quantize` writes it."""
    out = tmp_path_factory.mktemp("exported") / "rounded"
    recipe = RECIPE.with_overrides({"scheme": "W4A8", "method": "rtn"})
    onptq.quantize(small, out, recipe=recipe, verify=False)
    return out


def run(small: Path, out: Path, candidates: Sequence[str], **given: Any) -> Report:
    prompts = load_manifest(small / "prompts.jsonl")
    options: dict[str, Any] = {"prompts": prompts[3:], "calibration": prompts[:3], "holdout": prompts[3:4]} | given
    return comparison.compare_models(small, candidates, out, recipe=RECIPE, replicates=FEW, **options)


def files(out: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(out)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(out.rglob("*"))
        if path.suffix in (".parquet", ".safetensors") or path.name in ("cost.json", "identity.json")
    }


class Killed(BaseException):
    pass


class KillingReporter(QuietReporter):
    """Ends the process, as far as the comparison can tell, when the phase of that name has begun."""

    def __init__(self, name: str) -> None:
        self.name = name

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        if name == self.name:
            raise Killed
        with super().phase(name, total, unit) as bar:
            yield bar


class ListeningReporter(QuietReporter):
    def __init__(self) -> None:
        self.phases: list[str] = []

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        self.phases.append(name)
        with super().phase(name, total, unit) as bar:
            yield bar


# --- end to end -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(small: Path, items: list[Item], exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("compared") / "out"
    listening = ListeningReporter()
    names = ["rtn:W4A8", "smoothquant:W4A6", str(exported)]
    report = run(small, out, names, items=items, reporter=listening)
    return out, report, listening.phases


def test_methods_and_a_checkpoint_are_compared_on_the_same_items_and_prompts(compared: Any, items: list[Item]) -> None:
    out, report, _ = compared
    assert list(report.models) == ["dense", "rtn:W4A8", "smoothquant:W4A6", "rounded"]
    for name, model in report.models.items():
        home = out / "onptq" / ("dense" if name == "dense" else f"candidates/{folder_name(name)}")
        answers = read_answers(home / "answers.parquet")[name]
        assert [one.item for one in answers] == [item.id for item in items]
        assert model.scores == score(items, answers)
        assert model.figures["letter"].value == pytest.approx(model.scores.tasks["letter"].percent)
        if name != "dense":
            states = States.read(home / "states.parquet")
            tokens = {one.prompt: one.tokens for one in read_trajectories(home / "trajectories.parquet")}
            assert sorted(tokens) == [0, 1, 2]
            assert states.token.tolist() == [token for prompt in sorted(tokens) for token in tokens[prompt]]
            assert model.figures["kl"].value == pytest.approx(states.kl.mean())
    assert [name for name, value in report.models["dense"].cost.items() if value] == ["checkpoint_bytes"]


def test_states_of_a_method_and_of_a_checkpoint_are_those_of_the_library_s_steps(
    compared: Any, small: Path, exported: Path
) -> None:
    """With one model as both sides of a policy, and with two models of their own."""
    out, _, _ = compared
    home = out / "onptq" / "candidates" / folder_name("rtn:W4A8")
    source = find_source(small)
    policy = load_policy(source, "W4A8")
    policy.freeze(rtn(policy))
    reader = load_reader(open_checkpoint(str(exported)), torch.float32, torch.device("cpu"), source.eos())
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    inputs = [processor(prompt) for prompt in load_manifest(small / "prompts.jsonl")[3:]]
    dense, other = (
        Prefixes(model, encode(model, inputs), max_tokens=6, batch_tokens=200) for model in (policy, reader)
    )
    rollouts = read_trajectories(home / "trajectories.parquet")
    assert follow(dense) == follow(other) == rollouts
    expected = States.read(home / "states.parquet")
    for states in (compare_states(dense, rollouts), compare_states(dense, rollouts, quantized=other)):
        for name, column in vars(expected).items():
            assert np.array_equal(column, getattr(states, name)), name


def test_the_page_says_which_numbers_a_checkpoint_holds_and_what_servers_compute(compared: Any) -> None:
    out, _, _ = compared
    method, _, checkpoint = collect(out).candidates
    assert checkpoint.how == "A checkpoint that was made elsewhere: weights in 4 bits, activations in 8 bits."
    assert (checkpoint.title, checkpoint.scheme) == ("rounded", "W4A8")
    assert checkpoint.served
    assert checkpoint.served == method.served


def test_a_method_and_the_checkpoint_that_was_written_of_it_differ_in_nothing(compared: Any) -> None:
    out, report, _ = compared
    method, checkpoint = (out / "onptq" / "candidates" / folder_name(name) for name in ("rtn:W4A8", "rounded"))
    for file in ("states.parquet", "trajectories.parquet", "mismatches.parquet", "dense_path.parquet"):
        assert pq.read_table(method / file).equals(pq.read_table(checkpoint / file))
    [pair] = [one for one in report.pairs if (one.first, one.second) == ("rtn:W4A8", "rounded")]
    assert set(pair.verdicts.values()) <= {"same", "unknown"}
    assert "rounded against rtn:W4A8: no difference in anything measured." in sentences(report)


def test_the_cost_of_a_method_is_the_exporter_s_size_and_measured_time(compared: Any, exported: Path) -> None:
    _, report, _ = compared
    costs = {name: model.cost for name, model in report.models.items()}
    written = sum(file.stat().st_size for file in exported.glob("*.safetensors"))
    assert costs["rounded"] == {"seconds": None, "peak_bytes": None, "checkpoint_bytes": written}
    apart = headers(exported) - headers(Path(report.dense))
    expected = costs["rtn:W4A8"]["checkpoint_bytes"] + apart
    assert expected == pytest.approx(written, rel=0.005)  # shapes of packed weights apart
    assert costs["rtn:W4A8"]["checkpoint_bytes"] < costs["dense"]["checkpoint_bytes"]
    assert costs["smoothquant:W4A6"]["seconds"] > 0
    assert costs["smoothquant:W4A6"]["peak_bytes"] > 10 * 2**20


def test_towers_run_once_for_all_that_share_them_and_once_more_for_a_checkpoint(compared: Any) -> None:
    _, _, phases = compared
    assert [name for name in phases if name.startswith("Encode items")] == ["Encode items", "Encode items rounded"]
    assert [name for name in phases if name.startswith("Encode prompts")] == [
        "Encode prompts",
        "Encode prompts rounded",
    ]
    assert phases.count("Answer dense") == phases.count("Encode calibration") == 1


def test_every_pair_has_differences_tests_and_a_sentence(compared: Any) -> None:
    out, report, _ = compared
    pairs = [(pair.first, pair.second) for pair in report.pairs]
    assert len(pairs) == 3 + 3
    assert pairs[:3] == [("dense", name) for name in list(report.models)[1:]]
    for pair, sentence in zip(report.pairs, sentences(report), strict=True):
        assert sentence.startswith(f"{pair.second} against {pair.first}: ")
        assert sentence.endswith(".")
        a, b = (report.models[name].figures for name in (pair.first, pair.second))
        for name, difference in pair.differences.items():
            if difference.value is not None:
                assert difference.value == pytest.approx(b[name].value - a[name].value, abs=1e-9)
                assert difference.low <= difference.high
        assert ("flips" in pair.mcnemar) == (pair.first != "dense")
    words = (out / "report.md").read_text()
    assert words == markdown(report)
    assert json.loads((out / "report.json").read_text()) == report.to_dict()
    for name in report.models:
        assert f"| {name} |" in words


def test_the_report_on_disk_keeps_its_fields(compared: Any) -> None:
    """`report.json` is read by others: names of fields and their nesting."""
    out, _, _ = compared
    report = json.loads((out / "report.json").read_text())
    assert list(report) == [
        "dense", "origin", "items", "prompts", "bootstrap", "all_paired", "labels", "models", "pairs",
    ]  # fmt: skip
    assert report["bootstrap"].keys() == {"replicates", "confidence", "seed", "method"}
    labels = {"name", "less_is_better", "percent", "digits", "noise", "noise_at_most"}
    assert report["labels"]["letter"].keys() == labels
    model = report["models"]["rtn:W4A8"]
    assert model.keys() == {
        "cost", "figures", "average_percent", "tasks", "flips", "changed_percent", "changed_percent_tasks",
    }  # fmt: skip
    assert model["figures"]["kl"].keys() == {"value", "low", "high"}
    assert model["tasks"]["letter"].keys() == {"percent", "measure", "items", "points", "total"}
    assert model["flips"].keys() == {"percent", "items", "right_to_wrong", "wrong_to_right", "tasks"}
    pair = report["pairs"][-1]
    assert pair.keys() == {"first", "second", "differences", "verdicts", "mcnemar"}
    assert pair["differences"]["kl"].keys() == {"value", "low", "high", "differing"}
    assert pair["mcnemar"]["right"].keys() == {"only_first", "only_second", "p"}


def test_the_summary_has_a_row_per_model_and_the_figures_of_the_report(compared: Any) -> None:
    _, report, _ = compared
    table = summary_table(report)
    assert list(table.header) == ["", "letter", "tell", "average", "flips %", "changed %", "mismatch %", "KL"]
    keys = ("letter", "tell", "average", "flips", "changed", "mismatch", "kl")
    assert [row[0] for row in table.rows] == list(report.models)
    for row, model in zip(table.rows, report.models.values(), strict=True):
        for cell, key in zip(row[1:], keys, strict=True):
            digits = 4 if key == "kl" else 1
            assert cell == (f"{model.figures[key].value:.{digits}f}" if key in model.figures else "-")
    assert table.rows[0][4:] == ["-", "-", "-", "-"]  # the dense model differs from itself in nothing
    assert "Scores in % on 3 to 6 items per task." in table.note
    assert "on own answers to 3 prompts." in table.note


def test_flips_against_dense_are_those_of_mcnemar_s_test(compared: Any) -> None:
    _, report, _ = compared
    against_dense = [pair for pair in report.pairs if pair.first == "dense"]
    assert len(against_dense) == 3
    for pair in against_dense:
        flips, test = report.models[pair.second].change.total, pair.mcnemar["right"]
        assert (flips.right_to_wrong, flips.wrong_to_right) == (test.only_first, test.only_second)
        [sentence] = [one for one in sentences(report) if one.startswith(f"{pair.second} against dense")]
        assert f"{flips.right_to_wrong + flips.wrong_to_right} of {flips.items} answers flipped" in sentence


# --- resumed, added, refused ---------------------------------------------------------------------------------------


def test_a_candidate_is_added_without_running_the_others_again(
    compared: Any, small: Path, items: list[Item], exported: Path, tmp_path: Path
) -> None:
    out, before, _ = compared
    copied = shutil.copytree(out, tmp_path / "out")
    present = files(copied)
    listening = ListeningReporter()
    report = run(small, copied, ["rtn:W4A8", "rtn:W8A8"], items=items, reporter=listening)
    assert list(report.models) == [*before.models, "rtn:W8A8"]
    assert {name: model for name, model in report.models.items() if name in before.models} == before.models
    assert [phase for phase in listening.phases if phase.startswith(("Answer", "Follow", "Build"))] == [
        "Build rtn:W8A8",
        "Answer rtn:W8A8",
        "Follow rtn:W8A8",
    ]
    after = files(copied)
    assert {name: after[name] for name in present} == present
    assert len(after) > len(present)


def test_a_comparison_that_is_whole_loads_no_model(
    compared: Any, small: Path, items: list[Item], exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, before, _ = compared
    copied = shutil.copytree(out, tmp_path / "out")
    monkeypatch.setattr(sessions, "load_policy", None)
    monkeypatch.setattr(measuring, "load_reader", None)
    assert run(small, copied, [str(exported), "rtn:W4A8"], items=items) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase",
    [
        "Build smoothquant:W4A6",
        "Compare rtn:W4A8",
        "Dense path smoothquant:W4A6",
        "Follow rounded",
    ],
)
def test_killed_at_any_moment_it_ends_with_the_same_report(
    compared: Any, small: Path, items: list[Item], exported: Path, tmp_path: Path, phase: str
) -> None:
    _, expected, phases = compared
    assert phase in phases
    names = ["rtn:W4A8", "smoothquant:W4A6", str(exported)]
    with pytest.raises(Killed):
        run(small, tmp_path / "out", names, items=items, reporter=KillingReporter(phase))
    present = files(tmp_path / "out")
    report = run(small, tmp_path / "out", names, items=items)
    after = files(tmp_path / "out")
    assert {name: after[name] for name in present} == present
    assert without_cost(report) == without_cost(expected)


def without_cost(report: Report) -> Report:
    return replace(report, models={name: replace(model, cost={}) for name, model in report.models.items()})


@pytest.mark.slow
def test_a_process_that_is_really_killed_leaves_nothing_torn(small: Path, tmp_path: Path) -> None:
    out, others = tmp_path / "out", tmp_path / "others.jsonl"
    others.write_text("".join(json.dumps({"text": f"Number {number}"}) + "\n" for number in range(3)))
    command = [
        sys.executable, "-c", "from onptq.cli import main; main()", "compare", str(small), "rtn:W4A8", "search:W4A8",
        "--tasks", "none",
        "--manifest", str(others), "--calibration", str(small / "prompts.jsonl"), "--out", str(out),
        "--set", "follow.max_tokens=4",
    ]  # fmt: skip
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=one_thread)
    deadline = time.monotonic() + 120
    while not (out / "onptq" / "candidates" / folder_name("rtn:W4A8") / "theta.safetensors").exists():
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert not (out / "report.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread)
    assert "search:W4A8 against rtn:W4A8: " in done.stdout
    assert (out / "report.md").exists()
    assert not list(out.rglob(".onptq-tmp-*"))


def test_other_items_prompts_or_another_dense_model_are_refused(
    compared: Any, small: Path, items: list[Item], prompts: list[Prompt], tmp_path: Path
) -> None:
    out, _, _ = compared
    before = files(out)
    with pytest.raises(OnPTQError, match=r"holds another run[\s\S]*items.count: 9 -> 8"):
        run(small, out, ["rtn:W4A8"], items=items[:-1])
    with pytest.raises(OnPTQError, match=r"prompts.sha256"):
        run(small, out, ["rtn:W4A8"], items=items, prompts=[prompts[3], prompts[5], prompts[4]])
    other = shutil.copytree(small, tmp_path / "other")
    settings = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [1]}))
    with pytest.raises(OnPTQError, match=r"model.sha256"):
        run(other, out, ["rtn:W4A8"], items=items)
    assert files(out) == before


def test_another_candidate_under_a_name_with_results_is_refused(
    compared: Any, small: Path, items: list[Item], prompts: list[Prompt], tmp_path: Path
) -> None:
    out, _, _ = compared
    before = files(out)
    with pytest.raises(OnPTQError, match=r"results of another smoothquant:W4A6 [\s\S]*calibration"):
        run(small, out, ["smoothquant:W4A6"], items=items, calibration=prompts[:2])
    with pytest.raises(OnPTQError, match=r"results of another rounded [\s\S]*checkpoint"):
        run(small, out, [f"rounded={small}"], items=items)
    assert files(out) == before


@pytest.mark.slow
def test_only_items_or_only_prompts_can_be_compared_by_but_not_nothing(
    small: Path, items: list[Item], tmp_path: Path
) -> None:
    answers = run(small, tmp_path / "answers", ["rtn:W4A8"], items=items, prompts=())
    assert "kl" not in answers.models["rtn:W4A8"].figures
    states = run(small, tmp_path / "states", ["rtn:W4A8"])
    assert states.models["rtn:W4A8"].scores is None
    assert "tasks" not in states.to_dict()["models"]["rtn:W4A8"]
    assert list(states.pairs[0].differences) == ["loops"]  # what can be said of the dense model alone, too
    for report, heads in ((answers, ["flips %", "changed %"]), (states, ["mismatch %", "KL"])):
        assert "rtn:W4A8" in markdown(report)
        assert list(summary_table(report).header)[-2:] == heads
    with pytest.raises(OnPTQError, match="nothing to compare by"):
        run(small, tmp_path / "none", ["rtn:W4A8"], prompts=())
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_candidate_of_the_cycle_is_the_checkpoint_that_quantize_writes_of_it(
    small: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    out, written = tmp_path / "out", tmp_path / "written"
    report = run(small, out, ["onptq:W4A8"])
    home = out / "onptq" / "candidates" / folder_name("onptq:W4A8")
    assert not list(home.rglob("config.json"))  # candidates are compared without a checkpoint each
    recipe = RECIPE.with_overrides({"scheme": "W4A8"})
    onptq.quantize(small, written, calibration=prompts[:3], holdout=prompts[3:4], recipe=recipe, verify=False)
    for name in (f"{part}.parquet" for part in ("trajectories", "bank", "holdout_trajectories", "holdout")):
        assert (home / "run/rounds/0" / name).read_bytes() == (run_home(written) / "rounds/0" / name).read_bytes()
    theta, expected = (
        load_file(file) for file in (home / "theta.safetensors", run_home(written) / "rounds/0/theta.safetensors")
    )
    assert theta.keys() == expected.keys()
    assert all(torch.equal(theta[name], expected[name]) for name in theta)
    cost = report.models["onptq:W4A8"].cost
    size = sum(file.stat().st_size for file in written.glob("*.safetensors"))
    assert cost["checkpoint_bytes"] + headers(written) - headers(small) == pytest.approx(size, rel=0.005)
    assert cost["seconds"] > 0
    again = run(small, out, [f"written={written}"])
    assert "written against onptq:W4A8: no difference in anything measured." in sentences(again)


@pytest.mark.slow
def test_what_candidates_share_is_computed_once(small: Path, tmp_path: Path) -> None:
    """The init, D's answers and first rollouts of candidates with the same theta^(0), and of that method itself."""
    listening = ListeningReporter()
    init = RECIPE.init
    out = tmp_path / "out"
    methods = ("onptq", "static", "uniform", "offpolicy")
    run(small, out, [f"{name}:W4A8" for name in (init, *methods)], reporter=listening)
    counts = Counter(listening.phases)
    assert [name for name in counts if name.startswith("Build")] == [f"Build {init}:W4A8"]
    assert (counts[f"Build {init}:W4A8"], counts["Load"], counts["Encode calibration"]) == (1, 1, 1)
    followed = [name for name in counts if name.endswith("Follow 1")]
    assert followed == ["onptq:W4A8 Follow 1", "offpolicy:W4A8 Follow 1"]  # one follows Q, the other D
    homes = [out / "onptq/candidates" / folder_name(f"{name}:W4A8") / "run" for name in methods]
    rollouts, held_out, thetas = (
        [(home / "rounds/0" / file).read_bytes() for home in homes]
        for file in ("trajectories.parquet", "holdout.parquet", "theta.safetensors")
    )
    assert len(set(rollouts[:3])) == len(set(held_out)) == 1
    assert rollouts[3] != rollouts[0]
    assert len(set(thetas)) == 4


# --- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*MULTIMODAL, "llama"])
def test_states_against_another_model_are_those_against_the_same_policy(
    tiny: Callable[[str], Tiny], family: str
) -> None:
    model = tiny(family)
    policy = model.policy("W4A16")
    policy.freeze(rtn(policy))
    prefixes, other = (Prefixes(policy, model.encode(policy, 5), max_tokens=5, batch_tokens=200) for _ in range(2))
    trajectories = follow(prefixes)
    expected = compare_states(prefixes, trajectories)
    states = compare_states(prefixes, trajectories, quantized=other)
    for name, column in vars(expected).items():
        assert np.array_equal(column, getattr(states, name)), name


def test_logits_that_are_not_finite_are_reported_with_the_candidate_s_name(
    small: Path, exported: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(exported, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    [gain] = [name for name in tensors if name.endswith("model.norm.weight")]
    tensors[gain] = torch.full_like(tensors[gain], torch.nan)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OnPTQError, match=r"broken: the model's logits overflow or hold NaN at prompt \d, token \d"):
        run(small, tmp_path / "out", [str(broken)])


# --- checkpoints made by others -------------------------------------------------------------------------------------


def exact_names(folder: Path) -> None:
    """The ignore list as compressed-tensors writes it: every plain linear by its exact name on disk."""
    tensors = load_file(folder / "model.safetensors")
    quantized = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    linears = {
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.ndim == 2
    }
    plain = sorted(linears - quantized)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = [*plain, "lm_head"]
    config.get("thinker_config", {}).pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def image_logits(reader: Any, model: Tiny) -> torch.Tensor:
    inputs = model.processor(load_manifest(model.manifest)[2])
    logits: torch.Tensor = reader.model(**inputs.tensors, use_cache=False).logits
    return logits


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16"])
@pytest.mark.parametrize("family", MULTIMODAL)
def test_towers_stay_plain_though_the_ignore_list_names_them_as_on_disk(
    tiny: Callable[[str], Tiny], family: str, scheme: str, tmp_path: Path
) -> None:
    """As llm-compressor leaves its checkpoints; transformers alone would take the towers for quantized."""
    model = tiny(family)
    policy = model.policy(scheme)
    policy.freeze(rtn(policy))
    write_checkpoint(model.source, tmp_path, policy.folded(), policy.scheme)
    exact_names(tmp_path)
    reader = load_reader(open_checkpoint(str(tmp_path)), torch.float32, torch.device("cpu"), model.source.eos())
    with policy.speaking("Q"):
        expected = image_logits(policy, model)
    assert torch.equal(image_logits(reader, model), expected)


def test_a_decoder_linear_left_plain_by_its_name_on_disk_stays_plain(
    tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    model = tiny("qwen2.5-vl")
    policy = model.policy("W4A16")
    policy.freeze(rtn(policy))
    write_checkpoint(model.source, tmp_path, policy.folded(), policy.scheme)
    tensors, dense = load_file(tmp_path / "model.safetensors"), load_file(model.source.shards[0])
    [name] = [key for key in dense if key.endswith("layers.1.mlp.down_proj.weight") and "visual" not in key]
    for key in [key for key in tensors if key.startswith(name.removesuffix("weight"))]:
        del tensors[key]
    save_file(tensors | {name: dense[name]}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    exact_names(tmp_path)
    reader = load_reader(open_checkpoint(str(tmp_path)), torch.float32, torch.device("cpu"), ())
    linear: Any = reader.structure.blocks[1].child("down_proj")
    assert getattr(linear, "quantization_scheme", None) is None
    assert torch.equal(linear.weight, dense[name].float())
    assert getattr(reader.structure.blocks[0].child("down_proj"), "quantization_scheme", None) is not None
    assert any("layers" in pattern for pattern in dense_patterns(read_folder(tmp_path), model.source.family))


class Packed(nn.Module):
    """A linear as other packages bring it: no nn.Linear, and nothing called weight."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.inner, self.out_features = linear, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def test_linears_and_heads_of_any_kind_are_run_as_they_are(tiny: Callable[[str], Tiny]) -> None:
    model = tiny("qwen2.5-vl")
    plain, packed = (
        load_reader(model.source, torch.float32, torch.device("cpu"), model.source.eos()).model for _ in range(2)
    )
    for block in find_structure(packed).blocks:
        for name in ("q_proj", "down_proj"):
            block.replace(name, Packed(block.child(name)))
    packed.lm_head = Packed(packed.lm_head)
    readers = [LanguageModel(one, model.source.eos()) for one in (plain, packed)]
    assert readers[0].vocabulary == readers[1].vocabulary
    encoded = model.encode(readers[0], 3)
    dense, other = (Prefixes(reader, encoded, max_tokens=4) for reader in readers)
    trajectories = follow(other)
    assert trajectories == follow(dense)
    states = compare_states(dense, trajectories, quantized=other)
    assert states.kl.max() < 1e-5
    assert not (states.kind == MISMATCH).any()


def test_a_checkpoint_with_other_tokens_is_refused(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_random("qwen2.5-vl", other, prompts=1, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=640, image_size=56)
    with pytest.raises(OnPTQError, match="has 640 output tokens, the dense model 512"):
        run(small, tmp_path / "out", [str(other)])


def test_a_dense_folder_is_a_candidate_that_differs_in_nothing(small: Path, items: list[Item], tmp_path: Path) -> None:
    report = run(small, tmp_path / "out", [f"itself={small}"], items=items)
    figures = report.models["itself"].figures
    assert (figures["mismatch"].value, figures["flips"].value, figures["changed"].value) == (0, 0, 0)
    assert figures["kl"].value == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json must hold a JSON object, got list"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            "expected a checkpoint in safetensors .*got no weights",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"torn"),
            "model.safetensors .*no safetensors header",
        ),
        (lambda folder: drop_tensor(folder), r"reports 1 missing keys: .*attn\.qkv\.weight"),
        (lambda folder: change_config(folder, model_type="llama"), "is a llama model, the dense one is qwen2.5-vl"),
        (lambda folder: change_config(folder, quantization_config={"quant_method": "gptq"}), "gptq"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused_by_name(
    small: Path, exported: Path, tmp_path: Path, harm: Callable[[Path], Any], expected: str
) -> None:
    broken = shutil.copytree(exported, tmp_path / "broken")
    harm(broken)
    with pytest.raises(OnPTQError, match=expected) as raised:
        run(small, tmp_path / "out", [str(broken)])
    assert str(broken) in str(raised.value)


@pytest.mark.slow
def test_a_broken_checkpoint_can_be_repaired_and_compared_under_the_same_name(
    small: Path, exported: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(exported, tmp_path / "repaired")
    drop_tensor(folder)
    run(small, tmp_path / "out", ["rtn:W8A8"])
    with pytest.raises(OnPTQError, match="reports 1 missing keys"):
        run(small, tmp_path / "out", [str(folder)])
    shutil.copy(exported / "model.safetensors", folder)
    assert list(run(small, tmp_path / "out", [str(folder)]).models) == ["dense", "rtn:W8A8", "repaired"]


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(name for name in tensors if "visual" in name and name.endswith("qkv.weight"))]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


# --- candidates -----------------------------------------------------------------------------------------------------


def test_candidates_are_folders_named_folders_or_methods_with_a_scheme(tmp_path: Path) -> None:
    folder = tmp_path / "some model"
    folder.mkdir()
    candidates = parse_candidates(
        [str(folder), f"mine={folder}", "rtn:w4a8", "onptq:W4A6@paper", "zoo:qwen2.5-vl"],
        RECIPE.with_overrides({"seed": 7, "compute.device": "cpu"}),
        ["rounds=3"],
    )
    assert candidates[:2] == [CheckpointCandidate(name, str(folder)) for name in ("some model", "mine")]
    assert candidates[4] == CheckpointCandidate("zoo:qwen2.5-vl", "zoo:qwen2.5-vl")
    rounded, learned = candidates[2], candidates[3]
    assert isinstance(rounded, MethodCandidate)
    assert isinstance(learned, MethodCandidate)
    assert (rounded.name, rounded.scheme, rounded.recipe.method) == ("rtn:W4A8", Scheme(4, 8), "rtn")
    assert (rounded.recipe.rounds, rounded.recipe.init) == (0, "rtn")
    assert (learned.name, learned.recipe.method) == ("onptq:W4A6@paper", "onptq")
    assert learned.recipe == Recipe.preset(
        "paper", {"rounds": 3, "scheme": "W4A6", "seed": 7, "compute.device": "cpu", "compute.batch_tokens": 200}
    )


@pytest.mark.slow
def test_names_that_look_alike_in_a_folder_keep_their_own_figures(small: Path, exported: Path, tmp_path: Path) -> None:
    coarse = tmp_path / "coarse"
    onptq.quantize(small, coarse, recipe=RECIPE.with_overrides({"scheme": "W2A8", "method": "rtn"}), verify=False)
    names = {"run 1": exported, "run-1": coarse, "..": exported, ".": coarse, "a/b": exported, "rtn-W8A8": coarse}
    together = run(small, tmp_path / "all", [*(f"{name}={folder}" for name, folder in names.items()), "rtn:W8A8"])
    assert list(together.models) == ["dense", *names, "rtn:W8A8"]
    for name, folder in names.items():
        alone = run(small, tmp_path / "alone" / folder.name, [f"one={folder}"])
        assert together.models[name].figures == alone.models["one"].figures
    assert together.models["run 1"].figures != together.models["run-1"].figures
    folders = {path.name for path in (tmp_path / "all" / "onptq" / "candidates").iterdir()}
    assert folders == {folder_name(name) for name in (*names, "rtn:W8A8")}
    assert {"run-1", "rtn-W8A8"} < folders
    assert len(folders) == len(names) + 1


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], "nothing to compare"),
        (["nowhere"], "'nowhere' is no folder here"),
        (["rnt:W4A8"], r"unknown method \(did you mean rtn\?\)"),
        (["rtn:int4"], "unknown scheme 'int4'"),
        (["rtn:W16A8"], "leaves the weights in 16 bits"),
        (["onptq:W4A8@papper"], "did you mean paper"),
        (["rtn:W4A8", "rtn:w4a8"], "'rtn:W4A8' is the name of more than one"),
        (["dense=."], "'dense' is the name of more than one"),
    ],
)
def test_what_is_no_candidate_is_refused(texts: list[str], expected: str) -> None:
    with pytest.raises(OnPTQError, match=expected):
        parse_candidates(texts, RECIPE)


def test_a_method_that_needs_prompts_says_so(small: Path, tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match="search:W4A8 needs calibration prompts"):
        run(small, tmp_path / "out", ["search:W4A8"], calibration=())
    assert not (tmp_path / "out").exists()


def test_a_scheme_that_does_not_fit_the_model_is_refused_before_it_is_loaded(small: Path, tmp_path: Path) -> None:
    with pytest.raises(
        OnPTQError, match=r"FP8-block: layers\.0\.\S+ has \d+ input columns, which groups of 128 do not"
    ):
        run(small, tmp_path / "out", ["rtn:W4A8", "rtn:FP8-block"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheme", ["W4A8", "W8A8", "W3A8", "W4A16-g32-asym", "FP8", "NVFP4", "MXFP8"])
def test_the_size_of_a_checkpoint_is_known_without_writing_it(small: Path, tmp_path: Path, scheme: str) -> None:
    source = find_source(small)
    policy = load_policy(source, scheme)
    policy.freeze(rtn(policy))
    write_checkpoint(source, tmp_path, policy.folded(), policy.scheme)
    written = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    expected = output_bytes(source, policy.scheme) + headers(tmp_path) - headers(source.folder)
    assert expected == pytest.approx(written, rel=0.005)  # shapes of packed weights apart


def headers(folder: Path) -> int:
    """Bytes before the tensors of every shard."""
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors"))


def test_the_peak_is_of_the_block_alone() -> None:
    with measured_peak(torch.device("cpu")) as large:
        tensor = torch.ones(2**26)
        del tensor
    with measured_peak(torch.device("cpu")) as little:
        pass
    if large.bytes is None or little.bytes is None:
        pytest.skip("this system does not say what a process held")
    assert large.bytes - little.bytes > 2**27


# --- the command ----------------------------------------------------------------------------------------------------


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_compares_on_manifests_and_prints_tables_and_sentences(small: Path, tmp_path: Path) -> None:
    common = ("--tasks", "none", "--manifest", small / "prompts.jsonl", "--prompts", 4, "--set", "follow.max_tokens=4")
    result = call("compare", small, "rtn:W4A8", "rtn:W3A8", "--out", tmp_path / "out", *common)
    assert result.exit_code == 0, result.output
    for text in (
        "Behaviour",
        "Cost",
        "rtn:W3A8 against rtn:W4A8: ",
        "of prompts.jsonl.",
        "bootstrap",
        "Only 4 prompts",
    ):
        assert text in result.stdout
    assert "against dense:" not in result.stdout  # without items nothing pairs a candidate with the dense model
    again = call("compare", small, "rtn:W4A8", "--out", tmp_path / "out", *common, "--json")
    events = [json.loads(line) for line in again.stdout.splitlines()]
    assert events[-1]["event"] == "result"
    assert list(events[-1]["result"]["models"]) == ["dense", "rtn:W4A8", "rtn:W3A8"]
    assert call("compare", small, "rtn:W4A8", "--out", tmp_path / "out", *common, "--quiet").stdout == ""


def test_the_command_skips_bad_prompts_repeats_and_those_it_was_calibrated_with(small: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "mine.jsonl"
    texts = [f"Number {number}" for number in range(4)]
    manifest.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", texts[0], *texts]))
    known = tmp_path / "known.jsonl"
    known.write_text(json.dumps({"id": "same", "text": texts[2]}) + "\n")

    def compare(out: str, calibration: Path) -> Any:
        return call(
            *("compare", small, "rtn:W4A8", "--out", tmp_path / out, "--tasks", "none", "--manifest", manifest),
            *("--calibration", calibration, "--prompts", 4, "--on-bad-prompt", "skip"),
            *("--set", "follow.max_tokens=4"),
        )

    result = compare("out", known)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stderr.split())
    assert "1 bad prompt is skipped:" in shown
    assert "line 1: `text` must not be empty" in shown
    assert "1 of 4 prompts of mine.jsonl repeat an earlier one and are used once" in shown
    assert "1 of 3 prompts that behaviour is compared on are calibration prompts too" in shown
    assert "they are left out" in shown
    assert pq.read_table(tmp_path / "out/onptq/prompts.parquet").num_rows == 2
    refused = compare("refused", manifest)
    assert refused.exit_code == 2
    assert "all 3 prompts that behaviour is compared on are calibration prompts too" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rtn:W4A8", "--on-bad-prompt", "ignore"], "expected one of fail, skip"),
        (["rtn:W4A8", "--split", "train"], "expected one of test, held-out"),
        (["rtn:W4A8", "--tasks", "choice,reed", "--prompts", "0"], "unknown task 'reed'"),
        (["search:W4A8", "--tasks", "none"], "need --calibration"),
        (["rtn:W4A8", "--tasks", "none", "--prompts", "0"], "nothing to compare by"),
        (["rtn:W4A8", "--calibration", "nope.jsonl"], "cannot read the manifest nope.jsonl"),
        (["rtn:W4A8", "--quiet", "--json"], "one of --quiet and --json"),
        (["rtn:W4A8", "--preset", "huge"], "unknown preset"),
        (["rtn:W4A8", "--set", "nothing=1"], "unknown field"),
    ],
)
def test_the_command_refuses_bad_settings_and_leaves_nothing(
    small: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    result = call("compare", small, *arguments, "--out", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert expected in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_used_is_noticed_before_anything_is_drawn(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError("drawn")

    for name in ("draw_items", "draw_prompts", "draw_calibration"):
        monkeypatch.setattr(f"onptq.zoo.materials.{name}", refuse)
    (tmp_path / "file").write_text("something")
    result = call("compare", small, "rtn:W4A8", "--out", tmp_path / "file")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is a file; expected a folder" in " ".join(result.stderr.split())


def wide_table(names: Sequence[str], columns: Sequence[str]) -> ReportTable:
    cells = [f"{100 - number:.1f} [{90 - number:.1f}, {100 - number / 2:.1f}]" for number in range(len(columns))]
    return ReportTable("Answers", ["", *columns], [[name, *cells] for name in names], "What it says.")


def shown_in(width: int, table: ReportTable) -> list[str]:
    console = Console(force_terminal=True, color_system=None, highlight=False, width=width, file=StringIO())
    print_table(console, table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_an_interval_that_does_not_fit_beside_its_value_goes_below_it() -> None:
    shown = ReportTable("Behaviour", ["", "KL"], [["rtn:W4A8", "0.1 [0.0, 0.2]"]], "")
    for width, expected in ((26, "0.1 [0.0, 0.2]"), (25, "0.1\n[0.0, 0.2]"), (21, "0.1")):
        [fitted] = fit(shown, width)
        assert fitted.rows == [["rtn:W4A8", expected]]
        assert fitted.note.strip() == (LEFT_OUT if width == 21 else "")


TASKS = ("choice", "read", "answer", "caption", "listen", "speech WER", "spoken caption", "average score", "flips")
CANDIDATES = tuple(f"{name}:W4A8" for name in ("rtn", "smoothquant", "search+signround", "static", "uniform", "onptq"))


@pytest.mark.parametrize("width", [40, 80, 160, 400])
@pytest.mark.parametrize(
    "names", [CANDIDATES, ("a folder whose name is longer than a narrow terminal is wide [1, 2]",)]
)
def test_no_width_of_a_terminal_cuts_a_number_or_a_word(width: int, names: Sequence[str]) -> None:
    table = wide_table(names, TASKS)
    lines = shown_in(width, table)
    text = "\n".join(lines)
    assert "…" not in text
    assert max(map(len, lines)) <= width
    parts = fit(table, width)
    assert [title for part in parts for title in part.header[1:]] == list(TASKS)
    tokens = text.split()
    for part in parts:
        for row in part.rows:
            for cell in row[1:]:
                assert tokens.count(cell.split()[0]) >= len(names)
    for word in " ".join(TASKS).split():
        assert word in tokens
    assert (LEFT_OUT in " ".join(tokens)) == ("[" not in parts[0].rows[0][1])


def test_a_table_in_parts_repeats_the_candidates_and_ends_with_its_note() -> None:
    lines = shown_in(80, wide_table(CANDIDATES, TASKS))
    assert [line.strip() for line in lines if "Answers" in line] == ["Answers", "Answers, continued"]
    for name in CANDIDATES:
        assert sum(name in line for line in lines) == 2
    assert lines[-1] == f"What it says. {LEFT_OUT}"


@pytest.mark.slow
def test_the_command_says_where_its_report_is_and_what_it_did_not_run_again(small: Path, tmp_path: Path) -> None:
    common = ("--tasks", "none", "--manifest", small / "prompts.jsonl", "--prompts", 4, "--set", "follow.max_tokens=4")
    out = tmp_path / "out"
    first = call("compare", small, "rtn:W4A8", "rtn:W3A8", "--out", out, *common).stdout.splitlines()
    ending = [f"Report: {out / 'report.md'}", f"Page: {out / 'page.html'}"]
    assert first[-2:] == ending
    assert not any("measured before" in line for line in first)
    again = call("compare", small, "rtn:W3A8", "rtn:W8A8", "--out", out, *common).stdout.splitlines()
    assert again[-4:] == [
        f"Not run again, as measured before in {out}: rtn:W3A8",
        f"Also shown, as measured before in {out}: rtn:W4A8",
        *ending,
    ]


def test_a_report_claims_no_split_of_prompts_that_a_manifest_gave(compared: Any) -> None:
    out, report, _ = compared
    words = (out / "report.md").read_text()
    assert f"its own greedy answers to {report.prompts} prompts, against" in words
    assert "held-out" not in words
    assert "test items" not in words


def test_the_origin_names_the_split_of_what_is_embedded_and_the_manifest() -> None:
    assert origin([1], [1], "test") == "embedded items and prompts of the test split"
    assert origin([1], [1], "held-out", Path("some/mine.jsonl")) == (
        "embedded items of the held-out split; prompts of mine.jsonl"
    )
    assert origin([], [1], "test", Path("mine.jsonl")) == "prompts of mine.jsonl"
    assert origin([1], [], "test", Path("mine.jsonl")) == "embedded items of the test split"


def test_help_of_compare_loads_nothing_heavy() -> None:
    source = (
        "import sys\nfrom onptq.cli import app\n"
        "try:\n    app(['compare', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'transformers', 'scipy', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "CANDIDATE" in done.stdout
