"""From a checkpoint and prompts to a quantized checkpoint: every family, scheme, method and option."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml
from conftest import FAMILIES, MULTIMODAL, Tiny
from safetensors.torch import load_file
from typer.testing import CliRunner

import onptq
from onptq.bank import MISMATCH, States, load_bank
from onptq.check.probes import probe_prompt
from onptq.cli import app
from onptq.data.manifest import load_manifest
from onptq.engine.budget import keep_of_q
from onptq.errors import OnPTQError
from onptq.models.processing import PromptProcessor
from onptq.progress import Bar, QuietReporter
from onptq.quantizer.integers import LowBitLinear
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.run import final_theta, run_home
from onptq.zoo.random import write_random

TINY = {
    "rounds": 1,
    "data.prompts": 4,
    "data.holdout": 2,
    "follow.max_tokens": 8,
    "init": "rtn",
    "calibrate.codes": "free",
    "calibrate.epochs": 1,
    "calibrate.batch": 2,
    "calibrate.micro_batch": 2,
    "calibrate.gamma": 0.2,
    "select.budget": 256,
    "compute.device": "cpu",
}
MOVING = TINY | {
    "calibrate.keep": "last"
}  # held-out prompts may prefer the first iterate, which hides every difference
SCHEMES = ("W4A16", "W8A8", "W4A8", "W4A6", "W3A8", "W4A8-g128", "W4A16-g128-asym")
FIGURES = {"states", "mismatches", "near_misses", "mismatch_percent", "erosion", "js", "kl", "consequence", "critical"}


def recipe(changes: Mapping[str, Any] | None = None, **fields: Any) -> Recipe:
    chosen = TINY | dict(changes or {}) | fields
    return Recipe.preset("risk", {k: v for k, v in chosen.items() if k != "init" or chosen.get("method") != "rtn"})


def options(changes: Mapping[str, Any]) -> list[str]:
    return [argument for name, value in changes.items() for argument in ("--set", f"{name}={value}")]


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    threads = {"OMP_NUM_THREADS": "1"}  # another number may sum in another order
    others = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS")}
    line = [sys.executable, "-c", "from onptq.cli import main; main()", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=others | threads | environment)


def theta(run: Path, k: int = 0) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(run_home(run) / f"rounds/{k}/theta.safetensors")
    return tensors


def theta_bytes(run: Path, k: int = 0) -> bytes:
    return (run_home(run) / f"rounds/{k}/theta.safetensors").read_bytes()


def bank(run: Path, k: int = 0) -> States:
    return States.read(run_home(run) / f"rounds/{k}/bank.parquet")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_home(run) / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for groups of 128."""
    folder = tmp_path_factory.mktemp("wide")
    return write_random("qwen2.5-vl", folder, prompts=6, hidden=128, heads=4, ffn=256, vocab=512, image_size=56)


Quantize = Callable[..., Path]


@pytest.fixture(scope="module")
def quantize(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantize:
    """`quantize(changes)`: the run of the small model with these changes of the recipe, computed once per module."""
    done: dict[str, Path] = {}

    def get(changes: Mapping[str, Any] | None = None, *, verify: bool = False) -> Path:
        wanted = Recipe.preset("risk", MOVING | dict(changes or {}))
        key = f"{wanted.to_yaml()}{verify}"
        if key not in done:
            done[key] = tmp_path_factory.mktemp("run")
            onptq.quantize(small, done[key], calibration=small / "prompts.jsonl", recipe=wanted, verify=verify)
        return done[key]

    return get


# --- families, schemes, methods -------------------------------------------------------------------------------------


def reload(family: str, folder: Path) -> Any:
    name = {"qwen2.5-omni": "Qwen2_5OmniThinkerForConditionalGeneration"}.get(
        family, "AutoModelForImageTextToText" if family in MULTIMODAL else "AutoModelForCausalLM"
    )
    # transformers 5.17 leaves tensors that it renames in the type they are stored in.
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).to(torch.float32).eval()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_every_family_becomes_one_that_plain_transformers_loads_with_the_same_logits(
    family: str, tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    model = tiny(family)
    result = onptq.quantize(model.folder, tmp_path, calibration=model.manifest, recipe=recipe())
    summary = result.summary
    assert result.path == tmp_path
    assert summary == json.loads((run_home(tmp_path) / "summary.json").read_text())
    assert (summary["scheme"], summary["method"], summary["model"]) == ("W4A8", "onptq", str(model.folder))
    assert summary["prompts"] == {"calibration": 4, "holdout": 2}
    for figures in (*summary["rounds"], *summary["holdout"].values()):
        assert figures.keys() >= FIGURES
    assert [figures["steps"] for figures in summary["rounds"]] == [2]
    assert summary["checkpoint"]["bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert summary["verification"]["max_abs_difference"] == 0.0
    assert summary["verification"]["argmax_agreement"] == 1.0
    assert {name.split()[0] for name in summary["seconds"]} >= {"Follow", "Compare", "Branch", "Calibrate", "Export"}

    processor = PromptProcessor.from_folder(tmp_path, model.source.family, model.source.config)
    inputs = processor(probe_prompt(model.source.family.modalities)).tensors
    assert ("pixel_values" in inputs) == (family in MULTIMODAL)
    policy = model.policy("W4A8")
    policy.freeze(Theta.load(final_theta(tmp_path, 1)))
    with torch.inference_mode(), policy.speaking("Q"):
        expected = policy.model(**inputs, use_cache=False).logits
    with torch.inference_mode():
        logits = reload(family, tmp_path)(**inputs, use_cache=False).logits
    assert torch.equal(logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_written_and_verified(scheme: str, wide: Path, tmp_path: Path) -> None:
    result = onptq.quantize(wide, tmp_path, calibration=wide / "prompts.jsonl", recipe=recipe({"scheme": scheme}))
    assert result.summary["scheme"] == scheme
    assert result.summary["verification"]["max_abs_difference"] == 0.0
    [group] = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"].values()
    weights, activations = group["weights"], group["input_activations"]
    assert weights["num_bits"] == int(scheme[1])
    assert (weights["group_size"], weights["strategy"]) == ((128, "group") if "g128" in scheme else (None, "channel"))
    assert weights["symmetric"] is not scheme.endswith("-asym")
    bits = int(scheme.split("-")[0].split("A")[1])
    if bits == 16:
        assert activations is None
    else:
        assert (activations["num_bits"], activations["dynamic"], activations["strategy"]) == (bits, True, "token")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "stored"), [("FP8-block", "float"), ("NVFP4", "nvfp4-pack"), ("MXFP4", "mxfp4-pack")]
)
def test_floats_are_calibrated_written_and_verified(scheme: str, stored: str, wide: Path, tmp_path: Path) -> None:
    changes = {"scheme": scheme, "calibrate.keep": "last"}
    result = onptq.quantize(wide, tmp_path, calibration=wide / "prompts.jsonl", recipe=recipe(changes))
    assert result.summary["verification"]["max_abs_difference"] == 0.0
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert section["format"] == f"{stored}-quantized"
    tensors = theta(tmp_path)
    assert any(name.startswith("input/") for name in tensors) == (scheme == "NVFP4")
    assert any(bool(tensor.any()) for name, tensor in tensors.items() if name.startswith("ratio/"))


@pytest.mark.slow
def test_rounding_to_nearest_needs_no_prompts_and_prompts_only_measure_it(small: Path, tmp_path: Path) -> None:
    alone, measured = tmp_path / "alone", tmp_path / "measured"
    plain = Recipe.preset("risk", {"method": "rtn", "data.prompts": 4, "data.holdout": 2, "follow.max_tokens": 8})
    one = onptq.quantize(small, alone, recipe=plain)
    two = onptq.quantize(small, measured, recipe=plain, calibration=small / "prompts.jsonl")
    assert (alone / "model.safetensors").read_bytes() == (measured / "model.safetensors").read_bytes()
    assert one.summary["holdout"] == dict.fromkeys(("rtn", "initial", "calibrated", "final"))
    assert two.summary["holdout"]["rtn"] == two.summary["holdout"]["final"]
    assert two.summary["holdout"]["initial"]["states"] == two.summary["holdout"]["final"]["states"] > 0
    assert one.summary["rounds"] == two.summary["rounds"] == []
    for run in (alone, measured):
        assert not (run_home(run) / "rounds").exists()
        assert all(not tensor.any() for tensor in load_file(run_home(run) / "init.safetensors").values())


@pytest.mark.slow
def test_onptq_with_gamma_zero_is_static(quantize: Quantize) -> None:
    two = {"rounds": 2}
    static, control, ours = (
        quantize(two | {"method": "static", "calibrate.gamma": 0.0}),
        quantize(two | {"calibrate.gamma": 0.0}),
        quantize(two),
    )
    for k in range(2):
        assert theta_bytes(static, k) == theta_bytes(control, k)
        assert theta_bytes(static, k) != theta_bytes(ours, k)
    assert (static / "model.safetensors").read_bytes() == (control / "model.safetensors").read_bytes()
    assert (run_home(static) / "rounds/0/trajectories.parquet").read_bytes() == (
        run_home(ours) / "rounds/0/trajectories.parquet"
    ).read_bytes()
    assert not bank(static).critical.any()


@pytest.mark.slow
def test_rounds_without_refresh_reuse_the_first_bank_and_rounds_with_refresh_do_not(quantize: Quantize) -> None:
    faster = {"rounds": 2, "calibrate.lr_smoothing": 0.05, "calibrate.lr_step": 0.05}
    same, fresh = quantize(faster | {"refresh": False}), quantize(faster)
    for name in ("bank.parquet", "trajectories.parquet"):
        first, second = (run_home(same) / f"rounds/{k}/{name}" for k in range(2))
        assert first.read_bytes() == second.read_bytes()
        assert first.read_bytes() == (run_home(fresh) / f"rounds/0/{name}").read_bytes()
    assert (run_home(fresh) / "rounds/0/bank.parquet").read_bytes() != (
        run_home(fresh) / "rounds/1/bank.parquet"
    ).read_bytes()
    assert theta_bytes(same, 0) == theta_bytes(fresh, 0) != theta_bytes(same, 1) != theta_bytes(fresh, 1)
    assert [event["round"] for event in events(same, "calibrated")] == [0, 1]


@pytest.mark.slow
def test_the_paper_preset_runs_with_the_papers_numbers(small: Path, tmp_path: Path) -> None:
    sizes = {"data.prompts": 6, "follow.max_tokens": 8, "calibrate.epochs": 1}
    done = call(
        "quantize", small, "--out", tmp_path / "run", "--calibration", small / "prompts.jsonl", "--preset", "paper",
        *options(sizes),
    )  # fmt: skip
    assert done.exit_code == 0
    used = yaml.safe_load((run_home(tmp_path / "run") / "recipe.yaml").read_text())["recipe"]
    literal = Recipe.preset("paper")
    assert (literal.data.prompts, literal.follow.max_tokens, literal.rounds, literal.refresh) == (128, 64, 2, True)
    assert (used["rounds"], used["refresh"], used["method"], used["branch"]["horizon"]) == (2, True, "onptq", 4)
    assert used["select"] == {"rule": "risk", "budget": 256, "per_prompt": None, "weights": "risk"}
    assert (used["risk"]["divergence"], used["risk"]["branch_weight"], used["risk"]["divergence_weight"]) == (
        "js", 1.0, 1.0,
    )  # fmt: skip
    assert (used["calibrate"]["gamma"], used["calibrate"]["normalize"]) == (0.2, "none")
    assert [used["calibrate"][term] for term in ("anchor", "hidden", "pair", "response")] == [1.0] * 4
    summary = json.loads((run_home(tmp_path / "run") / "summary.json").read_text())
    assert summary["prompts"] == {"calibration": 6, "holdout": 0}  # no calibration prompt is given up
    assert summary["holdout"] == dict.fromkeys(("rtn", "initial", "calibrated", "final"))


# --- options --------------------------------------------------------------------------------------------------------


def taken(states: States) -> set[int]:
    return set(np.flatnonzero(states.critical).tolist())


def best(rank: np.ndarray, eligible: np.ndarray, count: int) -> set[int]:
    """The rows a stable sort by descending rank puts first; rows are in the order (prompt, t)."""
    order = [row for row in np.argsort(-rank.astype(np.float64), kind="stable").tolist() if eligible[row]]
    return set(order[:count])


@pytest.mark.slow
def test_every_selection_rule_takes_the_states_it_says(quantize: Quantize) -> None:
    budget = {"select.budget": 5}
    banks = {
        rule: bank(quantize(budget | {"select.rule": rule}))
        for rule in ("risk", "all", "mismatch", "mismatch_near_miss", "consequence", "random")
    }
    one = banks["risk"]
    assert one.candidates.sum() > 5  # otherwise every rule takes the same states
    expected = {
        "risk": best(one.risk, one.candidates, 5),
        "all": set(range(len(one))),
        "mismatch": best(one.risk, one.kind == MISMATCH, 5),
        "mismatch_near_miss": best(one.erosion + one.js, one.candidates, 5),
        "consequence": best(one.consequence, one.candidates, 5),
    }
    assert {rule: taken(banks[rule]) for rule in expected} == expected
    assert len(taken(banks["random"])) == 5
    assert taken(banks["random"]) <= set(np.flatnonzero(one.candidates).tolist())
    assert taken(banks["random"]) != expected["risk"]
    assert np.unique(banks["all"].weight).size == 1
    for states in banks.values():
        assert states.weight.sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_states_per_prompt_and_uniform_weights(quantize: Quantize) -> None:
    states = bank(quantize({"select.per_prompt": 2, "select.weights": "uniform"}))
    for prompt in np.unique(states.prompt):
        mine = states.take(np.flatnonzero(states.prompt == prompt))
        assert taken(mine) == best(mine.risk, mine.candidates, 2)
    assert np.unique(states.weight[states.critical]).size == 1


@pytest.mark.slow
def test_a_random_selection_depends_on_the_seed_alone(quantize: Quantize) -> None:
    all_prompts = {"data.prompts": 6, "data.holdout": 0}  # the seed also draws prompts where some are left over
    rule = all_prompts | {"select.rule": "random", "select.budget": 5}
    first, other = bank(quantize(rule)), bank(quantize(rule | {"seed": 7}))
    assert taken(first) != taken(other)
    assert np.array_equal(first.risk, other.risk)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"risk.divergence": "kl"}, lambda s: s.erosion * (1 + s.consequence) + s.kl),
        ({"risk.erosion_weight": 0}, lambda s: s.js),
        ({"risk.branch_weight": 0}, lambda s: s.erosion + s.js),
        ({"risk.branch_weight": 3}, lambda s: s.erosion * (1 + 3 * s.consequence) + s.js),
        ({"risk.divergence_weight": 0}, lambda s: s.erosion * (1 + s.consequence)),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_every_risk_term_can_be_weighted_or_removed(
    changes: dict[str, Any], expected: Callable[[States], np.ndarray], quantize: Quantize
) -> None:
    states = bank(quantize(changes))
    assert np.allclose(states.risk, np.where(states.candidates, expected(states), 0), rtol=1e-5, atol=1e-7)
    assert not np.allclose(states.risk, bank(quantize()).risk, rtol=1e-3)
    assert taken(states) == best(states.risk, states.candidates, 256)


@pytest.mark.slow
def test_a_divergence_of_kl_changes_the_consequence_too(quantize: Quantize) -> None:
    js, kl = bank(quantize()), bank(quantize({"risk.divergence": "kl"}))
    assert np.array_equal(js.js, kl.js)
    assert js.consequence.max() <= np.log(2) + 1e-6
    assert not np.allclose(js.consequence, kl.consequence, rtol=1e-2)


@pytest.mark.slow
def test_the_horizon_and_the_tolerance_of_a_near_miss(quantize: Quantize) -> None:
    default = bank(quantize())
    for horizon in (1, 8):
        states = bank(quantize({"branch.horizon": horizon}))
        assert states.horizon.max() == horizon
        assert np.array_equal(states.horizon > 0, states.candidates & (states.horizon > 0))
        assert not np.allclose(states.consequence, default.consequence, rtol=1e-2)
    tolerance = float(np.median(default.erosion[default.candidates]))
    states = bank(quantize({"risk.near_miss_tol": tolerance}))
    assert 0 < states.candidates.sum() < default.candidates.sum()
    assert np.array_equal(states.candidates, (states.kind == MISMATCH) | (states.erosion > np.float32(tolerance)))


TERMS = ("anchor", "hidden", "pair", "response")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{f"calibrate.{term}": 0} for term in TERMS]
    + [{"calibrate.gamma": 2.5}, {"calibrate.normalize": "none"}, {"calibrate.modality_balanced": True}],
    ids=lambda changes: "".join(f"{k}={v}" for k, v in changes.items()),
)
def test_every_loss_option_enters_the_loss_and_moves_theta(changes: dict[str, Any], quantize: Quantize) -> None:
    run = quantize(changes)
    cfg = Recipe.preset("risk", MOVING | changes).calibrate
    steps = events(run, "step")
    assert len(steps) == 2
    for step in steps:
        critical = sum(getattr(cfg, term) * step[term] for term in ("hidden", "pair", "response"))
        assert step["loss"] == pytest.approx(cfg.anchor * step["anchor"] + cfg.gamma * critical, rel=1e-5)
        assert all(step[term] > 0 for term in TERMS)
    assert theta_bytes(run) != theta_bytes(quantize())


@pytest.mark.slow
def test_codes_are_free_settled_or_learned_and_survive_the_export(quantize: Quantize) -> None:
    def parts(codes: str) -> set[str]:
        run = quantize({"init": "rtn", "calibrate.codes": codes}, verify=True)
        assert json.loads((run_home(run) / "summary.json").read_text())["verification"]["max_abs_difference"] == 0.0
        return {name.split("/")[0] for name in theta(run)}

    scales = {"smoothing", "ratio"}
    assert parts("free") == scales
    assert parts("settled") == scales | {"halved", "step"}
    assert parts("learned") == scales | {"offset"}
    offsets = [
        t for name, t in theta(quantize({"init": "rtn", "calibrate.codes": "learned"})).items() if "offset/" in name
    ]
    assert len(offsets) == 14
    assert all(0.4 < tensor.abs().max() < 0.52 for tensor in offsets), "from the middle of the codes of plain rounding"


@pytest.mark.slow
def test_the_initial_theta_is_searched_or_plain(quantize: Quantize) -> None:
    searched, plain = (
        load_file(run_home(quantize(changes)) / "init.safetensors") for changes in ({"init": "search"}, {})
    )
    assert searched.keys() == plain.keys()
    assert any(tensor.any() for tensor in searched.values())
    assert not any(tensor.any() for tensor in plain.values())


@pytest.mark.slow
def test_keeping_the_best_iterate_keeps_what_the_held_out_prompts_prefer(quantize: Quantize) -> None:
    changes = {"calibrate.keep": "best", "calibrate.epochs": 3, "data.holdout": 2}
    run = quantize(changes)
    [calibrated] = events(run, "calibrated")
    judged = {step["step"]: step["holdout"] for step in events(run, "step") if "holdout" in step}
    assert len(judged) >= 4
    preferred = min(judged, key=judged.__getitem__)
    assert calibrated["best_step"] in (0, preferred)
    if calibrated["best_step"] == 0:
        assert theta_bytes(run) == (run_home(run) / "init.safetensors").read_bytes()


class Listening(QuietReporter):
    def __init__(self) -> None:
        self.warnings, self.notes, self.phases = list[str](), list[str](), list[str]()

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        self.phases.append(name)
        with super().phase(name, total, unit) as bar:
            yield bar


@pytest.mark.slow
def test_where_every_iterate_is_worse_the_checkpoint_is_that_of_the_init_with_a_warning(
    small: Path, tmp_path: Path
) -> None:
    wild = {"calibrate.keep": "best", "calibrate.lr_smoothing": 1.0, "calibrate.lr_step": 1.0, "calibrate.epochs": 4}
    reporter = Listening()
    prompts: dict[str, Any] = {"calibration": small / "prompts.jsonl", "verify": False}
    run = onptq.quantize(small, tmp_path / "run", recipe=recipe(wild), reporter=reporter, **prompts)
    init = onptq.quantize(small, tmp_path / "init", recipe=recipe({"rounds": 0}), **prompts)
    assert run.summary["rounds"][0]["best_step"] == 0
    for name in ("model.safetensors", "config.json"):
        assert (run.path / name).read_bytes() == (init.path / name).read_bytes()
    summary = run.summary
    assert (summary["helped"], summary["choice"]["kept"]) == (False, "init")
    assert summary["holdout"]["final"] == summary["holdout"]["initial"]
    [warning] = [text for text in reporter.warnings if "help, so the init is kept" in text]
    assert warning.startswith("calibration did not help, so the init is kept: on 2 held-out prompts")


@pytest.mark.slow
def test_the_last_iterate_is_taken_as_it_is(small: Path, tmp_path: Path) -> None:
    wild = {"calibrate.keep": "last", "calibrate.lr_smoothing": 1.0, "calibrate.lr_step": 1.0, "calibrate.epochs": 4}
    reporter = Listening()
    summary = onptq.quantize(
        small, tmp_path, calibration=small / "prompts.jsonl", recipe=recipe(wild), verify=False, reporter=reporter
    ).summary
    assert summary["holdout"]["final"]["kl"] > summary["holdout"]["initial"]["kl"]
    assert (summary["helped"], summary["choice"]) == (None, None)
    assert summary["holdout"]["final"] == summary["holdout"]["calibrated"]
    assert not [text for text in reporter.warnings if "did not help" in text]


@pytest.mark.slow
def test_few_prompts_are_warned_of_where_they_calibrate(small: Path, tmp_path: Path) -> None:
    reporter = Listening()
    given: dict[str, Any] = {"calibration": small / "prompts.jsonl", "verify": False}
    onptq.quantize(small, tmp_path / "run", recipe=recipe(), reporter=reporter, **given)
    [warning] = [text for text in reporter.warnings if "prompts are few" in text]
    assert warning.startswith("4 calibration and 2 held-out prompts are few: calibration may not help")
    reporter = Listening()
    plain = Recipe.preset("risk", {"method": "rtn", "follow.max_tokens": 2})
    onptq.quantize(small, tmp_path / "rtn", recipe=plain, reporter=reporter, **given)
    assert reporter.warnings == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *itertools.product(("model.safetensors", "config.json"), (Path.unlink, cut, zero)),
        *itertools.product(("tokenizer.json", "chat_template.jinja", "preprocessor_config.json"), (Path.unlink,)),
        ("tokenizer_config.json", cut),
    ],
)
def test_a_finished_run_writes_a_damaged_checkpoint_again(
    name: str, damage: Callable[[Path], None], small: Path, tmp_path: Path
) -> None:
    plain = Recipe.preset("risk", {"method": "rtn"})

    def quantize() -> Listening:
        reporter = Listening()
        onptq.quantize(small, tmp_path, recipe=plain, verify=False, reporter=reporter)
        return reporter

    quantize()
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    damage(tmp_path / name)
    [warning] = quantize().warnings
    assert str(tmp_path / name) in warning
    assert "is written again" in warning
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole
    (tmp_path / "README.md").write_text("a card of one's own")
    again = quantize()
    assert (again.warnings, again.phases) == ([], ["Hash the model"])


def test_a_finished_run_is_not_shown_where_one_of_its_own_files_is_damaged(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plain = Recipe.preset("risk", {"method": "rtn"})

    def quantize() -> Listening:
        reporter = Listening()
        onptq.quantize(small, out, recipe=plain, verify=False, reporter=reporter)
        return reporter

    quantize()
    theta = run_home(out) / "init.safetensors"
    whole = {path: path.read_bytes() for path in (*out.iterdir(), theta)}
    flipped = bytearray(whole[theta])
    flipped[-1] ^= 1
    theta.write_bytes(flipped)
    with pytest.raises(OnPTQError, match=rf"{theta} has changed since it was written: delete {theta}, and the same"):
        quantize()
    theta.unlink()
    [warning] = quantize().warnings
    assert warning == f"the run is finished, but {theta} is missing: its step is computed again"
    assert {path: path.read_bytes() for path in whole} == whole
    assert quantize().phases == ["Hash the model"]


@pytest.mark.slow
def test_eos_as_max_counts_a_forced_end_as_the_largest_consequence(small: Path, tmp_path: Path) -> None:
    """With every token an end, every forced token ends its branch."""
    model = shutil.copytree(small, tmp_path / "model")
    settings = json.loads((small / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": list(range(512))}))
    banks = {}
    for largest in (False, True):
        chosen = Recipe.preset("risk", MOVING | {"branch.eos_as_max": largest})
        onptq.quantize(model, tmp_path / str(largest), calibration=small / "prompts.jsonl", recipe=chosen, verify=False)
        banks[largest] = bank(tmp_path / str(largest))
    assert len(banks[True]) == 4  # one state for each prompt: its first token ends it
    assert banks[True].candidates.any()
    assert not banks[False].consequence.any()
    assert not banks[True].horizon.any()
    assert np.allclose(banks[True].consequence[banks[True].candidates], np.log(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"compute.cache_gib": 0}, {"calibrate.checkpointing": False}], ids=["no cache", "no checkpointing"]
)
def test_memory_settings_do_not_change_the_result(changes: dict[str, Any], quantize: Quantize) -> None:
    frugal, default = quantize({"rounds": 2} | changes), quantize({"rounds": 2})
    for k in range(2):
        for name in ("theta.safetensors", "bank.parquet", "trajectories.parquet"):
            where = f"rounds/{k}/{name}"
            assert (run_home(frugal) / where).read_bytes() == (run_home(default) / where).read_bytes(), where


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["codes", "nothing"])
def test_how_quantized_weights_are_held_does_not_change_the_result(
    keep: str, small: Path, quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = quantize({"rounds": 2})
    monkeypatch.setattr("onptq.engine.budget.keep_of_q", lambda *_: keep)
    chosen = Recipe.preset("risk", MOVING | {"rounds": 2})
    onptq.quantize(small, tmp_path, calibration=small / "prompts.jsonl", recipe=chosen)
    assert (tmp_path / "model.safetensors").read_bytes() == (default / "model.safetensors").read_bytes()
    files = [f"rounds/{k}/{name}.parquet" for k in (0, 1) for name in ("bank", "trajectories")]
    for name in (*files, "rounds/1/theta.safetensors"):
        assert (run_home(tmp_path) / name).read_bytes() == (run_home(default) / name).read_bytes(), name


@pytest.mark.slow
def test_rollouts_in_integers_end_in_the_checkpoint_that_a_simulation_reloads(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: a frozen Q multiplies codes, Calibrate and the reload simulate."""
    multiplied = []
    product = LowBitLinear.forward

    def forward(linear: LowBitLinear, x: torch.Tensor) -> torch.Tensor:
        multiplied.append(len(x))
        return product(linear, x)

    monkeypatch.setattr(LowBitLinear, "forward", forward)
    monkeypatch.setattr("onptq.engine.budget.keep_of_q", lambda *_: "integers")
    chosen = Recipe.preset("risk", MOVING | {"rounds": 2})
    result = onptq.quantize(small, tmp_path, calibration=small / "prompts.jsonl", recipe=chosen)
    assert len(multiplied) > 100
    assert result.summary["verification"]["max_abs_difference"] == 0.0
    assert any(not torch.equal(a, b) for a, b in zip(theta(tmp_path).values(), initial(tmp_path).values(), strict=True))


@pytest.mark.parametrize(
    ("free", "on_gpu", "changes", "expected"),
    [
        (139, True, {}, "integers"),
        (139, False, {}, "floats"),
        (139, True, {"scheme": "W4A16"}, "floats"),
        (139, True, {"compute.integers": False}, "floats"),
        (40, False, {}, "codes"),
        (139, False, {"compute.cache_gib": 1}, "codes"),
        (8, True, {}, "nothing"),
        (8, False, {}, "nothing"),
        (8, True, {"calibrate.codes": "settled"}, "integers"),
        (8, False, {"calibrate.codes": "settled"}, "codes"),
        (8, False, {"calibrate.codes": "settled", "rounds": 0}, "nothing"),
    ],
)
def test_as_much_of_the_quantized_weights_is_held_as_fits(
    free: int, on_gpu: bool, changes: dict[str, Any], expected: str
) -> None:
    chosen, gib = recipe(changes), 2**30
    assert keep_of_q(free * gib, chosen.compute.cache_gib, 13 * gib, 6 * gib, chosen, on_gpu) == expected


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"compute.batch_tokens": 1}, {"calibrate.micro_batch": 1}])
def test_batch_sizes_that_fit_nothing_still_work(changes: dict[str, Any], quantize: Quantize) -> None:
    run = quantize(changes)
    assert len(bank(run)) > 0
    assert any(not torch.equal(a, b) for a, b in zip(theta(run).values(), initial(run).values(), strict=True))


def initial(run: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(run_home(run) / "init.safetensors")
    return tensors


@pytest.mark.slow
def test_bfloat16_works_or_falls_back_with_a_note(quantize: Quantize) -> None:
    run = quantize({"compute.dtype": "bfloat16"}, verify=True)
    summary = json.loads((run_home(run) / "summary.json").read_text())
    assert summary["verification"]["argmax_agreement"] == 1.0
    assert np.isfinite(bank(run).risk).all()


@pytest.mark.slow
def test_prompts_can_be_given_as_objects_and_held_out_ones_apart(
    small: Path, quantize: Quantize, tmp_path: Path
) -> None:
    rows = pq.read_table(run_home(quantize()) / "prompts.parquet").to_pylist()
    drawn = {row["id"] for row in rows if row["role"] == "calibration"}
    prompts = [prompt for prompt in load_manifest(small / "prompts.jsonl") if prompt.id in drawn]
    assert len(prompts) == 4
    chosen = Recipe.preset("risk", MOVING)
    onptq.quantize(small, tmp_path / "same", calibration=prompts, recipe=chosen, verify=False)
    assert theta_bytes(tmp_path / "same") == theta_bytes(quantize())
    (tmp_path / "apart.jsonl").write_text('{"id": "other", "text": "Which colour is the sea?"}\n')
    result = onptq.quantize(
        small,
        tmp_path / "apart",
        calibration=small / "prompts.jsonl",
        holdout=tmp_path / "apart.jsonl",
        recipe=chosen,
        verify=False,
    )
    assert result.summary["prompts"] == {"calibration": 4, "holdout": 1}
    assert theta_bytes(tmp_path / "apart") == theta_bytes(quantize())  # with keep=last nobody judges


# --- runs of contract 1 ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_prompts(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the first prompts of the manifest, as contract 1 took them; since, prompts are drawn."""
    out = tmp_path_factory.mktemp("first") / "run"
    prompts = load_manifest(small / "prompts.jsonl")
    chosen = Recipe.preset("risk", MOVING | {"rounds": 2})
    onptq.quantize(small, out, calibration=prompts[:4], holdout=prompts[4:], recipe=chosen, verify=False)
    return out


def as_contract_1(run: Path, folder: Path, *, finished: bool) -> Path:
    """A copy of the run as versions before contract 2 left it: its files in DIR/onptq, without sums and update.json."""
    out = folder / "run"
    shutil.copytree(run, out)
    home = Path(shutil.copytree(run_home(run), out / "onptq"))
    for path in (home / "SHA256SUMS", *home.glob("rounds/*/update.json")):
        path.unlink()
    shutil.rmtree(home / "rtn")
    record = yaml.safe_load((home / "recipe.yaml").read_text())
    del record["contract"]
    (home / "recipe.yaml").write_text(yaml.safe_dump(record, sort_keys=False))
    if not finished:
        shutil.rmtree(home / "final")
        for path in (home / "summary.json", home / "rounds/1/theta.safetensors", out / "config.json"):
            path.unlink()
    assert run_home(out) == home
    return out


@pytest.mark.slow
def test_a_finished_run_of_contract_1_is_shown_as_it_was(small: Path, first_prompts: Path, tmp_path: Path) -> None:
    run = as_contract_1(first_prompts, tmp_path, finished=True)
    reporter = Listening()
    chosen = Recipe.preset("risk", MOVING | {"rounds": 2})
    result = onptq.quantize(small, run, calibration=small / "prompts.jsonl", recipe=chosen, reporter=reporter)
    assert result.summary == json.loads((run / "onptq" / "summary.json").read_text())
    assert reporter.phases == ["Hash the model"]
    assert not run.with_name("run-run").exists()
    assert len(load_bank(run / "onptq", round_index=1)) > 0


@pytest.mark.slow
def test_an_unfinished_run_of_contract_1_goes_on_where_it_is(small: Path, first_prompts: Path, tmp_path: Path) -> None:
    run = as_contract_1(first_prompts, tmp_path, finished=False)
    reporter = Listening()
    chosen = Recipe.preset("risk", MOVING | {"rounds": 2})
    result = onptq.quantize(
        small, run, calibration=small / "prompts.jsonl", recipe=chosen, reporter=reporter, verify=False
    )
    assert "Follow 1" not in reporter.phases
    assert "Calibrate 1" not in reporter.phases
    assert "Calibrate 2" in reporter.phases
    assert not run.with_name("run-run").exists()
    for name in ("model.safetensors", "config.json"):
        assert (run / name).read_bytes() == (first_prompts / name).read_bytes()
    assert theta_bytes(run, 1) == theta_bytes(first_prompts, 1)
    expected = json.loads((run_home(first_prompts) / "summary.json").read_text())
    for name in ("rounds", "holdout", "helped", "checkpoint", "prompts"):
        assert result.summary[name] == expected[name]


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_line_and_python_give_the_same_bytes_and_quiet_prints_nothing(
    small: Path, quantize: Quantize, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = command(
        "quantize", small, "--out", out, "--scheme", "W4A8", "--method", "onptq", "--calibration",
        small / "prompts.jsonl", "--preset", "risk", "--quiet", *options(MOVING),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    python = quantize({}, verify=True)
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (python / name).read_bytes(), name
    for name in ("init.safetensors", *(f"rounds/0/{n}" for n in ("theta.safetensors", "bank.parquet"))):
        assert (run_home(out) / name).read_bytes() == (run_home(python) / name).read_bytes(), name
    assert done.stdout == ""
    [warning] = done.stderr.splitlines()
    assert warning.startswith("warning: 4 calibration and 2 held-out prompts are few")


def test_json_prints_one_object_per_line_and_the_summary_last(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    line = ["quantize", small, "--preset", "risk", "--out", out, "--calibration", small / "prompts.jsonl", "--json"]
    done = call(*line, *options(TINY))
    assert done.exit_code == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    ended = [line["phase"] for line in lines if line["event"] == "phase" and line["state"] == "end"]
    for phase in ("Load", "Encode", "Follow 1", "Compare 1", "Branch 1", "Calibrate 1", "Export", "Verify"):
        assert phase in ended
    assert lines[-1] == {"event": "result", "result": json.loads((run_home(out) / "summary.json").read_text())}
    assert done.stderr == ""

    again = call("quantize", tmp_path / "nowhere", "--out", out, "--method", "rtn", "--json")
    assert (again.exit_code, again.stdout) == (2, "")
    assert again.stderr.startswith("error: ")


def test_by_default_the_result_is_on_stdout_and_progress_on_stderr(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = call("quantize", small, "--out", out, "--calibration", small / "prompts.jsonl", *options(TINY))
    assert done.exit_code == 0
    shown = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line.strip())
    assert (shown["scheme"].strip(), shown["method"].strip()) == ("W4A8", "onptq")
    assert "held-out" in done.stdout
    assert "Calibrate 1" in done.stderr


def test_quiet_still_says_what_went_wrong(small: Path, tmp_path: Path) -> None:
    done = call("quantize", small, "--out", tmp_path / "run", "--calibration", tmp_path / "none.jsonl", "--quiet")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "none.jsonl" in done.stderr


@pytest.mark.slow
def test_set_changes_any_field_and_wins_over_options_and_preset(small: Path, tmp_path: Path) -> None:
    changes = TINY | {"branch.horizon": 8, "scheme": "W8A8", "select.per_prompt": 1, "risk.divergence": "kl"}
    del changes["init"]
    done = call(
        "quantize", small, "--out", tmp_path / "run", "--calibration", small / "prompts.jsonl", "--preset", "light",
        "--scheme", "W4A16", "--seed", 5, "--init", "rtn", "--device", "cpu", "--no-verify", *options(changes),
    )  # fmt: skip
    assert done.exit_code == 0
    used = yaml.safe_load((run_home(tmp_path / "run") / "recipe.yaml").read_text())["recipe"]
    assert (used["branch"]["horizon"], used["scheme"], used["select"]["per_prompt"]) == (8, "W8A8", 1)
    assert (used["seed"], used["init"], used["risk"]["divergence"]) == (5, "rtn", "kl")
    summary = json.loads((run_home(tmp_path / "run") / "summary.json").read_text())
    assert summary["scheme"] == "W8A8"
    assert "verification" not in summary


@pytest.mark.slow
def test_a_recipe_file_and_the_record_of_a_run_can_be_run(small: Path, quantize: Quantize, tmp_path: Path) -> None:
    earlier = quantize()
    done = call(
        "quantize", small, "--out", tmp_path / "run", "--calibration", small / "prompts.jsonl", "--no-verify",
        "--recipe", run_home(earlier) / "recipe.yaml",
    )  # fmt: skip
    assert done.exit_code == 0
    assert theta_bytes(tmp_path / "run") == theta_bytes(earlier)


def test_the_installed_command_is_the_command_line() -> None:
    [script] = entry_points(group="console_scripts", name="onptq")
    assert script.value == "onptq.cli:main"
