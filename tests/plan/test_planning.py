"""The plan of a run: what it refuses, what would make it fit, and that it counts the user's prompts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny
from plan_models import BIG_GPU, GIB, machine, write_sparse, write_sparse_file

import onptq
from onptq.checkpoint.source import find_source
from onptq.data.manifest import load_manifest
from onptq.errors import OnPTQError
from onptq.models.processing import PromptProcessor
from onptq.plan.machine import Machine, machine_with
from onptq.plan.planning import Plan, make_plan
from onptq.recipe import ComputeConfig, Recipe
from onptq.run import run_home
from onptq.serving.vllm import Vllm


@pytest.fixture(scope="module")
def seven(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("seven"), "qwen2.5-vl-7b", tiny("qwen2.5-vl").folder)


@pytest.fixture
def broken(small: Path, tmp_path: Path) -> Path:
    """A copy of the small model, to be broken."""
    return shutil.copytree(small, tmp_path / "broken")


def complete(scheme: str = "W4A8", /, **changes: Any) -> Recipe:
    """Every phase, over 128 prompts with answers of 64 tokens."""
    sizes = {"data.prompts": 128, "data.holdout": 32, "follow.max_tokens": 64}
    return Recipe.preset("risk", {"scheme": scheme, **sizes, **changes})


def refused(folder: Path, recipe: Recipe | None = None, **options: Any) -> str:
    """The only reason why the run cannot start, which is the verdict too."""
    plan = make_plan(folder, recipe or complete(), machine=BIG_GPU, **options)
    (reason,) = plan.refusals
    assert plan.verdict == f"cannot run: {reason}"
    assert not plan.to_json()["can_run"]
    return reason


def test_a_plan_that_fits_says_so_first_with_memory_and_time(seven: Path) -> None:
    plan = make_plan(seven, complete(), machine=BIG_GPU)
    assert not plan.refusals
    assert plan.verdict.startswith("fits: needs ")
    assert " of 139.0 GiB free GPU memory on a GPU; takes about " in plan.verdict
    assert plan.peak == max(phase.gpu_bytes for phase in plan.phases)
    seconds = plan.to_json()["seconds"]
    assert seconds["least"] < seconds["expected"] == plan.seconds < seconds["most"]


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "gib", "changes"),
    [
        ("paper", 23, {"compute.cache_gib=0.5"}),
        ("paper", 21, {"compute.cache_gib=0.5", "calibrate.micro_batch=1"}),
        ("light", 23, {"calibrate.micro_batch=1", "calibrate.codes=free"}),
        ("best", 139, {"calibrate.codes=settled"}),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_changes_that_make_it_fit(
    seven: Path, preset: str, gib: float, changes: set[str]
) -> None:
    recipe = Recipe.preset(preset, {"scheme": "W4A8", "compute.shard": "never"})
    (reason,) = make_plan(seven, recipe, machine=machine(gib)).refusals
    assert f" GiB of GPU memory and {gib:.1f} GiB is free: " in reason
    named = reason.partition("; it fits with ")[2].split(" --set ")
    assert {change.removeprefix("--set ") for change in named} == changes
    assert not make_plan(seven, recipe.with_overrides(changes), machine=machine(gib)).refusals
    for change in changes:  # and no fewer do
        fewer = recipe.with_overrides(changes - {change})
        assert make_plan(seven, fewer, machine=machine(gib)).refusals


def test_nothing_is_suggested_where_the_weights_alone_do_not_fit(seven: Path) -> None:
    (reason,) = make_plan(seven, complete(**{"compute.shard": "never"}), machine=machine(14)).refusals
    assert "weights 15.4 GiB" in reason
    assert "--set" not in reason


def test_a_base_method_is_not_told_to_be_another_one(seven: Path) -> None:
    (reason,) = make_plan(seven, complete(method="gptq"), machine=machine(24)).refusals
    assert "rounding offsets" in reason
    assert "init=" not in reason


def test_host_memory_is_checked_too(seven: Path) -> None:
    (reason,) = make_plan(seven, complete(), machine=machine(139, host_gib=8)).refusals
    assert "GiB of host memory and 8.0 GiB is free" in reason


# --- what the run would refuse --------------------------------------------------------------------------------------


# --- several GPUs ---------------------------------------------------------------------------------------------------


def test_several_gpus_share_what_is_dealt_out_and_nothing_else(seven: Path) -> None:
    one, two = (make_plan(seven, complete(), machine=replace(BIG_GPU, gpus=gpus)) for gpus in (1, 2))
    assert (one.strategy, two.strategy) == ("one GPU", "data parallel")
    assert two.verdict.startswith("fits: needs ")
    assert " free GPU memory on each of 2 a GPU (data parallel); takes about " in two.verdict
    assert two.peak < one.peak
    shorter = {a.name for a, b in zip(one.phases, two.phases, strict=True) if b.seconds < 0.8 * a.seconds}
    assert shorter == {"Follow", "Compare", "Branch", "Calibrate"}
    longer = {a.name for a, b in zip(one.phases, two.phases, strict=True) if b.seconds > a.seconds}
    assert not longer
    load_one, load_two = one.phases[0], two.phases[0]
    assert load_two.gpu == load_one.gpu, "each has the whole model"
    assert load_two.host_bytes == 2 * load_one.host_bytes
    assert any(text.startswith("data parallel: each GPU holds the whole model") for text in two.assumptions)


def test_halves_of_the_prompts_take_half_of_the_time_and_of_the_caches(seven: Path) -> None:
    """128 prompts in batches of 16, steps of 8: everything that is dealt out halves exactly."""
    recipe = complete(**{"compute.batch_tokens": 16 * 464, "data.holdout": 32, "compute.cache_gib": 100.0})
    one, two = (
        {phase.name: phase for phase in make_plan(seven, recipe, machine=replace(BIG_GPU, gpus=gpus)).phases}
        for gpus in (1, 2)
    )
    assert two["Branch"].seconds == pytest.approx(one["Branch"].seconds / 2)
    for name in ("Follow", "Compare"):
        assert two[name].gpu["prefix caches"] == one[name].gpu["prefix caches"] // 2
    assert two["Calibrate"].gpu["activations in the graph"] == one["Calibrate"].gpu["activations in the graph"] // 2


def test_gpus_that_have_to_wait_are_worth_a_warning(seven: Path) -> None:
    many = replace(machine(139, host_gib=1000), gpus=16)
    batches, step = make_plan(seven, complete(), machine=many).warnings
    assert batches.startswith(
        "128 responses make 4 batches, so 12 of 16 GPUs wait in Follow, Compare and Branch; --set "
    )
    assert step.startswith("a step of 8 prompts leaves 8 of 16 GPUs without any in Calibrate; --set ")
    changes = [re.findall(r"--set (\S+)", text)[0] for text in (batches, step)]
    assert not make_plan(seven, complete().with_overrides(changes), machine=many).warnings


def plan_whole(model: Path, machine: Machine) -> str:
    """Why a model whose blocks are on every GPU does not fit."""
    (reason,) = make_plan(model, complete(**{"compute.shard": "never"}), machine=machine).refusals
    return reason


def test_a_model_larger_than_one_gpu_is_split_over_several(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    large = write_sparse(tmp_path, "qwen2.5-vl-72b", tiny("qwen2.5-vl").folder)
    eight, few = machine_with(None, ComputeConfig(), 80, 8), {"init": "search", "calibrate.codes": "free"}
    plan = make_plan(large, complete(**few, **{"compute.shard": "never"}), machine=eight)
    assert plan.strategy is None
    assert " of GPU memory on each of 8 GPUs and 79.2 GiB is free: weights 136.7 GiB" in plan.refusals[0]
    assert plan.refusals[0].endswith("; that is with the blocks on every GPU")
    assert "theta's codes 65.4 GiB" in plan_whole(large, eight)
    settled, plan = (make_plan(large, complete(**changes), machine=eight) for changes in ({}, few))
    assert settled.strategy == plan.strategy == "sharded"
    block = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 29568
    assert {phase.gpu["theta's codes"] for phase in settled.phases if phase.name == "Calibrate"} == {
        80 * block // 8 + 2 * block
    }
    assert (
        next(phase for phase in settled.phases if phase.name == "Initialize").host["theta's codes, being written"]
        == 80 * block
    )
    assert "on each of 8 a100-80g (sharded); takes about " in plan.verdict
    assert any(
        text.startswith("sharded: the blocks of the decoder are split over the GPUs") for text in plan.assumptions
    )
    assert plan.parts is not None
    block, linears = 2 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 29568), plan.parts.shapes.linears
    assert linears == 80 * block // 2
    for phase in plan.phases:
        assert phase.gpu["gathered blocks"] == 2 * block
        assert 80 * block // 8 < phase.gpu["weights"] < 80 * block // 8 + 6 * 2**30, "and embeddings, head and tower"
        if phase.name not in ("Load", "Verify"):
            assert "weights" not in phase.host
    assert plan.phases[0].host["weights"] == 2 * plan.parts.shapes.loaded, "pages that processes share"


def test_one_gpu_that_is_too_small_has_the_blocks_on_its_host(seven: Path) -> None:
    """Where other settings fit whole they are named: gathering takes time."""
    recipe = Recipe.preset("light", {"scheme": "W4A8"})
    plan = make_plan(seven, recipe, machine=machine(23))
    assert plan.strategy == plan.to_json()["strategy"] == "offloaded"
    assert all(phase.host["blocks"] == 2 * plan.parts.shapes.linears for phase in plan.phases if plan.parts)
    assert any(
        text
        == "with --set calibrate.micro_batch=1 --set calibrate.codes=free the model fits whole on every GPU, which is faster"
        for text in plan.warnings
    )
    whole = {"calibrate.micro_batch": 1, "calibrate.codes": "free"}
    faster = make_plan(seven, recipe.with_overrides(whole), machine=machine(23))
    assert faster.strategy == "one GPU"
    assert faster.seconds < plan.seconds
    named = make_plan(seven, recipe.with_overrides(whole | {"compute.shard": "offload"}), machine=machine(23))
    assert named.strategy == "offloaded"
    assert not any("which is faster" in text for text in named.warnings)


def test_groups_that_do_not_divide_are_refused_by_name(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    small = tiny("llama").folder
    folder = write_sparse(tmp_path, "llama-8b", small, num_hidden_layers=2, intermediate_size=14400)
    reason = refused(folder, complete("W4A16-g128"))
    assert "layers.0.mlp.down_proj has 14400 input columns, which groups of 128 do not divide" in reason
    assert not make_plan(folder, complete("W4A16-g32"), machine=BIG_GPU).refusals


def test_weights_that_are_not_dense_are_refused(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    folder = write_sparse(tmp_path, "llama-8b", tiny("llama").folder, dtype="F8_E4M3", num_hidden_layers=2)
    assert "F8_E4M3" in refused(folder)


def test_a_checkpoint_without_a_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    write_sparse_file(tmp_path / "model.safetensors", {"transformer.h.0.attn.weight": (64, 64)})
    assert "no language model among the tensors" in refused(tmp_path)


def test_a_scheme_that_leaves_the_weights_alone_is_refused(small: Path) -> None:
    assert "nothing to write" in refused(small, complete("W16A8"))


def test_a_server_that_writes_the_rollouts_is_planned_for_or_refused(small: Path) -> None:
    served, own = (
        make_plan(small, complete(**{"follow.engine": engine}), machine=BIG_GPU) for engine in ("vllm", "own")
    )
    assert not served.refusals
    assert any("Follow is that of OnPTQ's own rollouts" in text for text in served.assumptions)
    assert served.parts is not None
    assert served.run_bytes == (own.run_bytes or 0) + served.parts.output_bytes
    assert "W4A6 is for simulation" in refused(small, complete("W4A6", **{"follow.engine": "vllm"}))
    (reason,) = make_plan(small, complete(**{"follow.engine": "vllm"}), vllm=Vllm(python=Path("/nowhere"))).refusals
    assert "--vllm-python /nowhere cannot be run" in reason


def test_a_model_without_a_tokenizer_is_refused(broken: Path) -> None:
    for path in broken.glob("tokenizer*"):
        path.unlink()
    assert "has none of tokenizer.json" in refused(broken)


def test_an_unknown_architecture_is_refused(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert "unsupported model_type 'gpt2'" in refused(broken)


def test_truncated_weights_are_refused(broken: Path) -> None:
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate((broken / "model.safetensors").stat().st_size // 2)
    assert "a truncated download?" in refused(broken)


def test_a_chat_template_that_takes_no_image_is_refused(broken: Path) -> None:
    (broken / "chat_template.jinja").write_text("{% for message in messages %}{{ message.role }}{% endfor %}")
    assert "placeholders for 1 images" in refused(broken)


def test_prompts_longer_than_the_context_are_refused(small: Path) -> None:
    assert "context of 4096" in refused(small, prompt_tokens=4096)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_here_is_refused(small: Path) -> None:
    (reason,) = make_plan(small, complete(**{"compute.device": "cuda"})).refusals
    assert "no usable GPU" in reason


def test_a_model_that_is_not_here_is_an_error_and_no_download() -> None:
    with pytest.raises(OnPTQError, match="uses no network"):
        make_plan("someone/some-model", complete())
    with pytest.raises(OnPTQError, match=r"did you mean zoo:qwen2\.5-vl\?"):
        make_plan("qwen2.5-vl", complete())


# --- disk -----------------------------------------------------------------------------------------------------------


def test_a_destination_without_room_is_refused(small: Path, tmpfs: Callable[[str], Path]) -> None:
    disk = tmpfs("64k")
    reason = refused(small, out=disk / "deep" / "out")
    assert "cannot write the checkpoint to" in reason
    assert "are free there" in reason
    assert not list(disk.iterdir())


def test_a_disk_with_room_for_the_checkpoint_alone_is_worth_a_warning(
    small: Path, tmpfs: Callable[[str], Path]
) -> None:
    written = make_plan(small, complete(), machine=BIG_GPU)
    assert written.parts is not None
    assert written.run_bytes is not None
    size = (written.parts.output_bytes + written.run_bytes // 2) // 4096 * 4
    plan = make_plan(small, complete(), machine=BIG_GPU, out=tmpfs(f"{size}k") / "out")
    assert not plan.refusals
    assert any("checkpoint and run files together take about" in text for text in plan.warnings)


def test_a_destination_that_holds_something_else_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert "is not empty and not a run" in refused(small, out=tmp_path)
    assert "lies in the model folder" in refused(small, out=small)


@pytest.mark.slow
def test_the_files_of_a_run_are_as_large_as_said(small: Path, tmp_path: Path) -> None:
    changes = {"init": "signround", "init_steps": 2, "rounds": 1, "calibrate.epochs": 1, "follow.max_tokens": 4}
    recipe = complete(**changes, **{"data.prompts": 2, "data.holdout": 0, "compute.device": "cpu"})
    manifest, out = small / "prompts.jsonl", tmp_path / "out"
    plan = make_plan(small, recipe, calibration=manifest)
    onptq.quantize(small, out, calibration=manifest, recipe=recipe, verify=False)
    written = sum(path.stat().st_size for path in run_home(out).rglob("*.safetensors"))
    assert plan.run_bytes == pytest.approx(written, rel=0.15)


# --- prompts --------------------------------------------------------------------------------------------------------


def counted(small: Path, recipe: Recipe, **options: Any) -> Plan:
    return make_plan(small, recipe, machine=BIG_GPU, **options)


def test_the_users_prompts_are_counted_as_the_model_reads_them(small: Path) -> None:
    source = find_source(small)
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    lengths = [processor(prompt).length for prompt in load_manifest(small / "prompts.jsonl")]
    plan = counted(small, complete(**{"data.prompts": 4, "data.holdout": 2}), calibration=small / "prompts.jsonl")
    work = plan.work
    assert work is not None
    assert (work.prompts, work.holdout) == (4, 2)
    assert work.prompt_tokens == round(sum(lengths) / 6)
    assert work.longest_prompt == max(lengths)
    assert (
        f"4 prompts calibrate and 2 are held out, of 6 (6 with image): {work.prompt_tokens} tokens"
        in (plan.assumptions[0])
    )


def test_held_out_prompts_have_a_manifest_of_their_own(small: Path, tmp_path: Path) -> None:
    manifest, held_out = small / "prompts.jsonl", tmp_path / "held-out.jsonl"
    held_out.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("One?", "Two?")))
    plan = counted(small, complete(), calibration=manifest, holdout=held_out)
    assert plan.work is not None
    assert (plan.work.prompts, plan.work.holdout) == (6, 2)
    (reason,) = counted(small, complete(), calibration=manifest, holdout=manifest).refusals
    assert "all 6 held-out prompts are calibration prompts too" in reason


def test_a_bad_prompt_is_refused_or_skipped_with_a_warning(small: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"id": "good", "text": "Hello."}), json.dumps({"id": "bad", "text": "?", "image": "none.png"})]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (reason,) = counted(small, complete(), calibration=tmp_path / "prompts.jsonl").refusals
    assert "none.png" in reason
    plan = counted(small, complete(), calibration=tmp_path / "prompts.jsonl", on_bad_prompt="skip")
    assert not plan.refusals
    assert plan.work is not None
    assert plan.work.prompts == 1
    assert any("1 bad prompt is skipped" in text and "none.png" in text for text in plan.warnings)


def test_arguments_that_contradict_each_other_are_errors(small: Path) -> None:
    manifest = small / "prompts.jsonl"
    with pytest.raises(OnPTQError, match="one of --calibration and --prompt-tokens"):
        make_plan(small, complete(), calibration=manifest, prompt_tokens=9)
    with pytest.raises(OnPTQError, match="expected --calibration beside --holdout"):
        make_plan(small, complete(), holdout=manifest)
    with pytest.raises(OnPTQError, match="--on-bad-prompt perhaps: expected one of fail, skip"):
        make_plan(small, complete(), on_bad_prompt="perhaps")


def test_a_plan_takes_longer_for_longer_prompts(seven: Path) -> None:
    short, long = (make_plan(seven, complete(), prompt_tokens=count, machine=BIG_GPU) for count in (200, 2000))
    assert long.seconds > 2 * short.seconds
    assert long.peak > short.peak + GIB
