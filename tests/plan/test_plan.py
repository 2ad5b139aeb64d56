"""`onptq plan`: what is quantized, what is refused, and that no weight is needed for it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import FAMILIES, Tiny
from plan_bed import write_hole, write_hollow
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import onptq
import onptq.plan.machine as machines
from onptq.cli import Commands
from onptq.cli.plan import plan
from onptq.errors import OnPTQError
from onptq.overrides import parse_override
from onptq.plan.machine import Machine, describe_machine
from onptq.plan.parts import AUDIO, EMBEDDINGS, LINEARS, OTHER_MODELS, VISION
from onptq.plan.planning import Plan, make_plan
from onptq.recipe import ComputeConfig, Recipe

GIB = 2**30
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BIG_GPU = Machine("cuda:0", "a big GPU", torch.bfloat16, 139 * GIB, 120 * GIB, 139 * GIB, 6e14, 3.5e12, 5e-6)
SMALL_GPU = Machine("cuda:0", "a small GPU", torch.bfloat16, 23 * GIB, 60 * GIB, 23 * GIB, 1e14, 0.9e12, 5e-6)

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
app.callback()(lambda: None)
app.command("plan")(plan)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def scheme(name: str, **changes: Any) -> Recipe:
    return Recipe.preset("default", {"scheme": name, **changes})


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5-VL-7B's shapes."""
    return write_hollow(tmp_path_factory.mktemp("seven"), "qwen2.5-vl-7b")


def by_name(found: Plan) -> Mapping[str, Any]:
    assert found.parts is not None
    return {part.name: part for part in found.parts.parts}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_decoders_linears_are_quantized_in_every_family(tiny: Callable[[str], Tiny], family: str) -> None:
    folder = tiny(family).folder
    found = make_plan(folder, scheme("W4A8"))
    parts, tensors = by_name(found), load_file(folder / "model.safetensors")
    assert not found.refusals
    assert [name for name, part in parts.items() if part.quantized] == [LINEARS]
    assert parts[LINEARS].modules == 7 * 2
    assert sum(part.bytes for part in parts.values()) == sum(tensor.nbytes for tensor in tensors.values())
    assert (VISION in parts) == any("visual." in name for name in tensors)
    assert (AUDIO in parts) == any("audio_tower." in name for name in tensors)
    assert (OTHER_MODELS in parts) == any(name.startswith("talker.") for name in tensors)
    assert parts[LINEARS].output_bytes < 0.3 * parts[LINEARS].bytes
    assert found.parts is not None
    assert not found.parts.unmatched


@pytest.mark.parametrize("name", ["W4A8", "W8A8", "W4A16-g32-asym"])
def test_the_output_is_as_large_as_said(small: Path, tmp_path: Path, name: str) -> None:
    recipe = Recipe.preset("default", {"scheme": name, "method": "rtn"})
    found = make_plan(small, recipe)
    onptq.quantize(small, tmp_path / "out", recipe=recipe, verify=False)
    out = tmp_path / "out"
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert found.parts is not None
    assert found.parts.output_bytes == pytest.approx(written, rel=0.1)


def test_a_7b_model_is_planned_from_its_headers_alone(seven: Path) -> None:
    shards = list(seven.glob("*.safetensors"))
    assert sum(shard.stat().st_size for shard in shards) > 15 * GIB
    assert sum(shard.stat().st_blocks * 512 for shard in shards) < 2**20, "the bed itself must hold no weights"
    began = time.monotonic()
    found = make_plan(seven, scheme("W4A8"), machine=BIG_GPU)
    assert time.monotonic() - began < 5
    parts = by_name(found)
    assert parts[LINEARS].parameters == 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 18944 * 3584) + 28 * (3584 + 2 * 512)
    assert parts[EMBEDDINGS].parameters == 2 * 152064 * 3584
    assert found.parts is not None
    assert (found.parts.decoder.prefix, found.parts.decoder.layers) == ("model.", 28)
    assert 5.5 * GIB < found.parts.output_bytes < 7 * GIB
    assert not found.refusals


def test_every_phase_has_a_time_and_holds_at_least_the_weights(seven: Path) -> None:
    found = make_plan(seven, scheme("W4A8"), machine=BIG_GPU)
    names = [phase.name for phase in found.phases]
    assert names == ["Load", "Encode", "Initialize", "Follow", "Compare", "Branch", "Calibrate", "Export", "Verify"]
    weights = sum(part.parameters for part in by_name(found).values()) * 2
    for phase in found.phases:
        assert phase.seconds > 0
        assert phase.gpu["weights"] == weights
        assert phase.gpu_bytes == sum(phase.gpu.values()) < 60 * GIB
    on_host = {phase.name: phase.host_bytes for phase in found.phases}
    assert on_host["Load"] > weights > on_host["Calibrate"]


@pytest.mark.parametrize(
    ("change", "grows"),
    [
        ({"data.prompts": 512}, {"Encode", "Initialize", "Follow", "Compare", "Branch", "Calibrate"}),
        ({"follow.max_tokens": 256}, {"Follow", "Compare", "Branch", "Calibrate"}),
        ({"branch.horizon": 16}, {"Branch"}),
        ({"rounds": 4}, {"Follow", "Compare", "Branch", "Calibrate"}),
        ({"calibrate.epochs": 16}, {"Calibrate"}),
        ({"init_steps": 400}, {"Initialize"}),
    ],
)
def test_more_work_takes_longer_where_it_is_done(seven: Path, change: dict[str, Any], grows: set[str]) -> None:
    few, many = (make_plan(seven, scheme("W4A8", **more), machine=BIG_GPU).phases for more in ({}, change))
    longer = {after.name for before, after in zip(few, many, strict=True) if after.seconds > 1.1 * before.seconds}
    assert longer == grows


def test_branches_cost_as_many_tokens_as_they_have(seven: Path) -> None:
    """Q takes horizon - 1 steps and D reads horizon tokens: 31 tokens a branch at 16 where there are 7 at 4."""
    plans = (make_plan(seven, scheme("W4A8", **{"branch.horizon": horizon}), machine=BIG_GPU) for horizon in (4, 16))
    short, long = (next(one.seconds for one in plan.phases if one.name == "Branch") for plan in plans)
    assert 3.5 < long / short < 6


def test_the_control_branches_nothing_and_rtn_has_no_rounds(seven: Path) -> None:
    static, rtn = (make_plan(seven, scheme("W4A8", method=name), machine=BIG_GPU).phases for name in ("static", "rtn"))
    assert "Branch" not in [phase.name for phase in static]
    assert [phase.name for phase in rtn] == ["Load", "Encode", "Initialize", "Export", "Verify"]


def test_a_cache_limit_bounds_what_is_kept(seven: Path) -> None:
    recipe = scheme("W4A8", **{"compute.cache_gib": 1.0})
    calibrate = next(phase for phase in make_plan(seven, recipe, machine=BIG_GPU).phases if phase.name == "Calibrate")
    assert calibrate.gpu["dense targets"] == GIB // 2
    assert calibrate.gpu["prefix caches"] <= GIB


def test_learned_codes_of_a_7b_model_are_refused_with_their_reason(seven: Path) -> None:
    found = make_plan(seven, Recipe.preset("best", ["calibrate.codes=learned"]), machine=BIG_GPU)
    (reason,) = found.refusals
    assert "Calibrate needs" in reason
    assert "rounding offsets" in reason
    assert "--set calibrate.codes=settled" in reason
    assert not make_plan(seven, Recipe.preset("best", ["calibrate.codes=settled"]), machine=BIG_GPU).refusals


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("init", ["search", "search+signround", "gptq"])
def test_what_theta_has_for_every_weight_is_counted(seven: Path, init: str, rounds: int) -> None:
    """Offsets take 4 bytes, settled codes 1 or, with zero points, 2; offsets in every theta that is alive in an update."""

    def counted(codes: str, named: str = "W4A8") -> dict[str, float]:
        recipe = scheme(named, init=init, rounds=rounds, **{"calibrate.codes": codes})
        phases = {phase.name: phase.gpu for phase in make_plan(seven, recipe, machine=BIG_GPU).phases}
        linears = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
        names = ("offsets of the start", "rounding offsets", "settled codes")
        found = {phase: {name for name in names if name in terms} for phase, terms in phases.items()}
        start: set[str] = {"settled codes" if codes == "settled" else "offsets of the start"} if brought else set()
        assert found["Initialize"] == start
        held = found["Calibrate"]
        assert found["Follow"] == found["Compare"] == found["Export"] == held
        assert found["Branch"] == (start if codes == "learned" and rounds == 1 else held)
        return {name: phases["Calibrate"][name] / linears for name in held}

    brought = init != "search"
    given = brought or rounds > 1
    assert counted("learned") == {"rounding offsets": 4 * (6 + given)}
    assert counted("settled") == {"settled codes": 1}
    assert counted("settled", "W4A16-asym") == {"settled codes": 2}
    assert counted("free") == ({"rounding offsets": 16} if brought else {})


def test_a_start_that_learns_is_counted_beside_the_search_before_it(seven: Path) -> None:
    def initialize(init: str, codes: str = "settled") -> tuple[float, int]:
        found = make_plan(seven, scheme("W4A8", init=init, **{"calibrate.codes": codes}), machine=BIG_GPU)
        assert any("as if it were search" in line for line in found.assumptions) == (init in ("gptq", "search+gptq"))
        phase = next(phase for phase in found.phases if phase.name == "Initialize")
        return phase.seconds, phase.gpu_bytes

    search, learned, both = map(initialize, ("search", "signround", "search+signround"))
    assert search[0] < learned[0] < both[0] < search[0] + learned[0]
    assert search[1] + 6 * GIB < both[1] == learned[1] < search[1] + 10 * GIB, "codes, and one block's offsets"
    assert initialize("signround", "free")[1] > search[1] + 24 * GIB, "offsets of all"
    assert initialize("gptq")[0] == initialize("search+gptq")[0] == search[0]


def test_a_response_over_visited_states_costs_their_logits(seven: Path) -> None:
    changes = {"select.budget": 256, "calibrate.gamma": 1.0}
    plans = {
        over: make_plan(seven, scheme("W4A8", **changes, **{"calibrate.response_over": over}), machine=BIG_GPU)
        for over in ("critical", "visited")
    }
    found = {over: next(phase for phase in plan.phases if phase.name == "Calibrate") for over, plan in plans.items()}
    assert found["visited"].gpu["logits"] > 2 * found["critical"].gpu["logits"]
    assert found["visited"].seconds > found["critical"].seconds
    static = make_plan(seven, scheme("W4A8", method="static"), machine=BIG_GPU).phases
    assert next(phase for phase in static if phase.name == "Calibrate").gpu["logits"] == 0


def test_a_model_that_does_not_fit_is_refused(seven: Path) -> None:
    (reason,) = make_plan(seven, scheme("W4A8"), machine=SMALL_GPU).refusals
    assert "of GPU memory and 23.0 GiB is free" in reason


@pytest.mark.parametrize(
    ("gib", "changes"),
    [
        (23, {"compute.cache_gib=0.5"}),
        (21, {"compute.cache_gib=0.5", "calibrate.micro_batch=1", "compute.batch_tokens=4096"}),
    ],
)
def test_a_small_gpu_is_led_step_by_step_to_a_recipe_that_fits(seven: Path, gib: int, changes: set[str]) -> None:
    """Seven billion parameters on 24 GB: nothing is kept of Q; on less, less is done at once."""
    recipe, taken = Recipe.preset("paper", {"scheme": "W4A8"}), []
    machine = replace(SMALL_GPU, device_free=gib * GIB, cacheable=gib * GIB)
    while refusals := make_plan(seven, recipe, machine=machine).refusals:
        (change,) = re.findall(r"--set (\S+) takes less", refusals[0])
        taken.append(change)
        recipe = recipe.with_overrides(dict([parse_override(change)]))
    assert set(taken) == changes
    tight = {"scheme": "W4A8", "compute.cache_gib": 0.0, "calibrate.micro_batch": 1, "compute.batch_tokens": 2048}
    (reason,) = make_plan(
        seven, Recipe.preset("paper", tight), machine=replace(SMALL_GPU, device_free=16 * GIB)
    ).refusals
    assert "takes less" not in reason, "nothing is left to lower"
    found = make_plan(seven, recipe, machine=machine)
    assert all("int8 codes" not in phase.gpu for phase in found.phases)
    assert any("weights made anew" in phase.gpu for phase in found.phases)


def test_groups_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_hollow(tmp_path, "llama-8b", num_hidden_layers=2, intermediate_size=14400)
    (reason,) = make_plan(folder, scheme("W4A16-g128"), machine=BIG_GPU).refusals
    assert "model.layers.0.mlp.down_proj (2 such) has 14400 input columns, which groups of 128 do not divide" in reason
    assert not make_plan(folder, scheme("W4A16-g32"), machine=BIG_GPU).refusals


def test_shapes_that_config_contradicts_are_refused(tmp_path: Path) -> None:
    folder = write_hollow(tmp_path, "llama-8b", num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 1024}))
    reasons = make_plan(folder, scheme("W4A8"), machine=BIG_GPU).refusals
    assert any("mlp.gate_proj.weight is [14336, 4096], config.json says [1024, 4096]" in reason for reason in reasons)


def test_weights_that_are_not_dense_are_refused(tmp_path: Path) -> None:
    folder = write_hollow(tmp_path, "llama-8b", dtype="F8_E4M3", num_hidden_layers=2)
    (reason,) = make_plan(folder, scheme("W4A8"), machine=BIG_GPU).refusals
    assert "is stored as F8_E4M3; expected a dense checkpoint: F32, F16, BF16" in reason


def test_a_checkpoint_without_a_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    write_hole(tmp_path / "model.safetensors", {"model.layers.0.self_attn.q_proj.weight": (64, 64)})
    (reason,) = make_plan(tmp_path, scheme("W4A8"), machine=BIG_GPU).refusals
    assert "no language model found" in reason


def test_a_scheme_that_leaves_the_weights_alone_is_refused(small: Path) -> None:
    (reason,) = make_plan(small, scheme("W16A8")).refusals
    assert "nothing to write" in reason


def test_prompts_longer_than_the_context_are_refused(small: Path) -> None:
    (reason,) = make_plan(small, scheme("W4A8"), prompt_tokens=4096).refusals
    assert "context of 4096" in reason


def test_a_tower_pattern_that_matches_nothing_is_named(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    source = tiny("qwen2.5-omni").folder
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    deaf = {name: tensor for name, tensor in tensors.items() if "audio_tower." not in name}
    save_file(deaf, tmp_path / "model.safetensors")
    found = make_plan(tmp_path, scheme("W4A8"))
    assert found.parts is not None
    assert found.parts.unmatched == (r"re:.*audio_tower\..*",)
    assert AUDIO not in by_name(found)


def test_a_thinker_alone_misses_no_pattern_of_the_other_models(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    source = tiny("qwen2.5-omni").folder
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    save_file(
        {key: value for key, value in tensors.items() if key.startswith("thinker.")}, tmp_path / "model.safetensors"
    )
    found = make_plan(tmp_path, scheme("W4A8"))
    assert found.parts is not None
    assert found.parts.unmatched == ()
    assert OTHER_MODELS not in by_name(found)


def test_a_destination_without_room_is_refused(small: Path, tmpfs: Callable[[str], Path]) -> None:
    disk = tmpfs("64k")
    found = make_plan(small, scheme("W4A8"), out=disk / "deep" / "out")
    assert found.disk_free is not None
    assert found.disk_free <= 64 * 1024
    assert any("the checkpoint takes" in reason for reason in found.refusals)


def test_the_probe_takes_under_a_second_and_finds_rates(tmp_path: Path) -> None:
    (tmp_path / "some").write_bytes(bytes(2**20))
    (tmp_path / "more").write_bytes(bytes(2**24))
    began = time.monotonic()
    machine = describe_machine(ComputeConfig(device="cpu"), 10**6, [tmp_path / "some", tmp_path / "more"])
    assert time.monotonic() - began < 5  # a second of its own, on a machine that may be busy
    assert machine.device == "cpu"
    assert not machine.on_gpu
    assert machine.dtype == torch.float32
    assert machine.flops > 1e8
    assert machine.bandwidth > 1e7
    assert 1e-8 < machine.launch < 1e-2
    assert machine.reading > 1e6
    assert machine.cores >= 1
    assert machine.host_free > 0


def test_a_file_so_slow_that_its_first_piece_takes_all_the_time_has_a_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "PROBE_SECONDS", 0.0)
    (tmp_path / "some").write_bytes(bytes(2**20))
    assert machines._reading([tmp_path / "some"]) > 0


def test_files_are_hashed_side_by_side_and_read_again_from_memory_where_that_holds_them(seven: Path) -> None:
    def load(**changes: Any) -> float:
        return make_plan(seven, scheme("W4A8"), machine=replace(BIG_GPU, **changes)).phases[0].seconds

    slow = load(reading=1e8)
    assert load(reading=1e10, cores=2) < load(reading=1e10) < slow
    assert load(reading=1e8, host_free=8 * GIB) > 1.5 * slow


@pytest.mark.parametrize("name", ["paper", "light", "light-24gb"])
def test_the_plan_of_a_7b_model_on_an_h200_is_what_was_measured_there(seven: Path, name: str) -> None:
    found = json.loads((RESULTS / f"h200-{name}.json").read_text())
    free = int(GIB * (found["memory_gib"] or 139))
    rates = found["rates"]["flops"], found["rates"]["bandwidth"], 20e-6
    machine = Machine(
        "cuda:0", found["device"], torch.bfloat16, free + 2 * GIB, 100 * GIB, free, *rates, 4e9, found["threads"]
    )
    recipe, tokens = Recipe.model_validate(found["recipe"]), round(found["run"]["counts"]["prompt_tokens"])
    plan = make_plan(seven, recipe, prompt_tokens=tokens, machine=machine)
    assert not plan.refusals
    measured = found["run"]["phases"]
    for phase in plan.phases:
        if phase.name not in measured:
            continue
        tensors = phase.gpu_bytes - phase.gpu["context"]
        assert 0.94 < tensors / measured[phase.name]["peak_bytes"] < 1.13, phase.name
        if measured[phase.name]["seconds"] > 5:
            assert 0.5 < phase.seconds / measured[phase.name]["seconds"] < 2, phase.name


def test_the_command_prints_within_100_columns_and_succeeds(small: Path, tmp_path: Path) -> None:
    result = run(small, "--scheme", "W4A8", "--prompt-tokens", 40, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 100
    for said in ("decoder linears", "vision tower", "as it is", "Calibrate", "free at --out", "of 40 tokens"):
        assert said in result.output
    assert "--linear-backend humming" in result.output


def test_the_command_as_json_has_every_term(small: Path) -> None:
    result = run(small, "--scheme", "W8A8", "--set", "rounds=1", "--json")
    found = json.loads(result.output)
    assert result.exit_code == 0
    assert (found["scheme"], found["can_run"], found["refusals"]) == ("W8A8", True, [])
    calibrate = next(phase for phase in found["phases"] if phase["name"] == "Calibrate")
    assert calibrate["host_bytes"] == sum(calibrate["host"].values())
    assert {"weights", "dense targets", "theta and optimizer", "weights in the graph", "logits"} <= set(
        calibrate["host"]
    )
    assert found["machine"]["dtype"] == "float32"
    assert {"server", "hardware", "verdict", "kernel", "switch"} <= set(found["serving"][0])


def test_the_command_exits_with_1_and_the_reason_where_it_cannot_run(small: Path) -> None:
    result = run(small, "--scheme", "W4A16-g48")
    assert result.exit_code == 1
    assert "cannot run here" in result.output
    assert "groups of 48 do not divide" in " ".join(result.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_here_is_refused(small: Path) -> None:
    result = run(small, "--device", "cuda")
    assert result.exit_code == 1
    assert "no usable GPU" in " ".join(result.output.split())


def test_a_model_that_is_not_here_is_an_error_and_no_download() -> None:
    with pytest.raises(OnPTQError, match="uses no network"):
        make_plan("someone/some-model", scheme("W4A8"))
    with pytest.raises(OnPTQError, match=r"did you mean zoo:qwen2\.5-vl\?"):
        make_plan("qwen2.5-vl", scheme("W4A8"))
    assert run("someone/some-model").exit_code == 2


def test_a_gpu_replays_a_rollout_so_that_slow_launches_cost_little(seven: Path) -> None:
    slow = replace(BIG_GPU, launch=10 * BIG_GPU.launch)
    fast_plan, slow_plan = (make_plan(seven, scheme("W4A8"), machine=machine) for machine in (BIG_GPU, slow))
    seconds = {
        name: [next(phase.seconds for phase in plan.phases if phase.name == name) for plan in (fast_plan, slow_plan)]
        for name in ("Follow", "Branch")
    }
    assert seconds["Follow"][1] < 1.2 * seconds["Follow"][0]
    assert seconds["Branch"][1] > 1.3 * seconds["Branch"][0], "which is not replayed"
