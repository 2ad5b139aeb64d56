"""`onptq bench`: checkpoints beside each other in one engine, the kernel that ran, and the paper's numbers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from installed import installed  # noqa: F401
from typer.testing import CliRunner

from onptq.cli import app
from onptq.errors import OnPTQError
from onptq.progress import QuietReporter
from onptq.quantizer.integers import has_integer_product
from onptq.zoo.configs import RANDOM_TOWERS, Dims, model_config
from onptq.zoo.published import PUBLISHED, Published
from onptq.zoo.random import TOKENS
from onptq.zoo.tokens import QWEN, write_tokenizer

pytest.importorskip("onptq_vllm", reason="needs the package onptq-vllm: pip install ./packages/onptq-vllm")

from onptq_vllm.bench.paper import is_papers_model
from onptq_vllm.bench.running import Settings, command, run_bench
from onptq_vllm.bench.scratch import PREFIX, TERMINATED, scratch_folder
from onptq_vllm.bench.tables import HEADS, announced, between_lines, kernel_lines, paper_cell, rows
from onptq_vllm.bench.timing import Job, draw_prompts, heard, measure
from onptq_vllm.bench.transformers_engine import run as run_transformers
from onptq_vllm.bench.variants import choose_variants
from onptq_vllm.bench.vllm_engine import describe_kernels, doubts, options
from onptq_vllm.schedules import decoding, rounding

pytestmark = pytest.mark.usefixtures("installed")

JOB = Job("folder", "eager", "float16", (1, 8), 2048, 64, 3, 1000, "humming", (1, 8, 2048, 16384), 4.0)
QUIET = QuietReporter()
OPERANDS = "int8 x int8" if has_integer_product(torch.zeros(8, 8, dtype=torch.int8)) else "int8 as float64"
LOW_BIT = f"LowBitLinear / {OPERANDS}, activations rounded to 8 bits"


@pytest.fixture(scope="module")
def exported(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of exports of the small model."""
    work = tmp_path_factory.mktemp("exports")
    choose_variants([str(small)], ["W4A8"], work, QUIET)
    return work


def test_the_command_measures_dense_and_quantized_in_transformers(small: Path, exported: Path, tmp_path: Path) -> None:
    quantized, out = exported / f"{small.name}-W4A8-rtn", tmp_path / "found.json"
    sizes = ["--prompt-tokens", "24", "--new-tokens", "3", "--repeats", "2", "--batch", "2"]
    arguments = ["bench", str(quantized), str(small), "--engine", "transformers", *sizes, "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert [one["name"] for one in found["results"]] == ["dense", "W4A8"]
    for one in found["results"]:
        (row,) = one["batches"]
        assert row["batch"] == 2
        assert len(row["prefill_all"]) == len(row["decode_all"]) == 2
        assert 0 < row["prefill_seconds"] < 60
        assert row["prefill_peak_bytes"] > 2**20
        assert sum(one["kernels"].values()) == 14  # seven linears in each of two blocks
    assert found["results"][0]["kernels"].keys() == {"Linear / bfloat16"}
    assert found["results"][1]["kernels"] == {LOW_BIT: 14}
    assert found["results"][1]["linear_backend"] is None
    assert "paper" not in result.output  # it measured another model
    assert found["results"][1]["batches"][0]["prefill_seconds"] > 0


@pytest.mark.parametrize(
    ("scheme", "backend", "kernel"),
    [
        ("W4A6", None, LOW_BIT.replace("8 bits", "6 bits")),
        ("W4A8", "simulated", "Linear / bfloat16, activations rounded to 8 bits"),
        ("W4A16", None, "Linear / bfloat16"),
    ],
)
def test_transformers_multiplies_integers_where_both_sides_are_quantized(
    scheme: str, backend: str | None, kernel: str, small: Path, exported: Path
) -> None:
    dense, variant = choose_variants([str(small)], [scheme], exported, QUIET)
    settings = Settings("transformers", batches=(2,), prompt_tokens=8, new_tokens=1, repeats=1, linear_backend=backend)
    assert settings.job(dense, "eager").linear_backend is None
    found = run_transformers(settings.job(variant, "eager"))
    assert found["kernels"] == {kernel: 14}
    assert found["batches"][0]["prefill_seconds"] > 0


def test_a_dense_model_given_alone_is_exported_by_the_schemes(small: Path, exported: Path) -> None:
    variants = choose_variants([str(small)], ["W4A8", "W8A8"], exported, QUIET)
    assert [variant.name for variant in variants] == ["dense", "W4A8", "W8A8"]
    assert [variant.linear_backend for variant in variants] == [None, "humming", None]
    assert {variant.vocabulary for variant in variants} == {512}
    assert {variant.dtype for variant in variants} == {"bfloat16"}
    config = json.loads((variants[2].source.folder / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"


def test_one_checkpoint_is_measured_with_several_backends(small: Path, exported: Path) -> None:
    (folder,) = (path for path in exported.iterdir() if path.name.endswith("W4A8-rtn"))
    models = [str(small), str(folder), f"{folder}@marlin", f"{folder}@machete"]
    variants = choose_variants(models, [], exported, QUIET)
    assert [variant.name for variant in variants] == ["dense", "W4A8", "W4A8 marlin", "W4A8 machete"]
    backends = [Settings("vllm").job(variant, "eager").linear_backend for variant in variants]
    assert backends == [None, "humming", "marlin", "machete"]
    asked = [Settings("vllm", linear_backend="cutlass").job(variant, "eager").linear_backend for variant in variants]
    assert asked == [None, "cutlass", "marlin", "machete"]
    with pytest.raises(OnPTQError, match="is dense; a backend is for quantized linears"):
        choose_variants([f"{small}@marlin"], [], exported, QUIET)


def test_a_name_is_a_model_of_these_shapes_with_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dims = Dims(4, 64, 128, 2, 1, 512, False, "float16")
    monkeypatch.setitem(PUBLISHED, "little", Published("qwen3-vl", dims, RANDOM_TOWERS, (28 * 28, 512 * 512)))
    (variant,) = choose_variants(["little"], [], tmp_path, QUIET, layers=2)
    assert variant.source.folder == tmp_path / "little-2"
    assert variant.source.config["text_config"]["num_hidden_layers"] == 2
    assert variant.dtype == "float16"


def test_what_cannot_be_measured_is_said_before_anything_runs(small: Path, tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match=r"several dense models.*expected one"):
        choose_variants([str(small), str(small)], [], tmp_path, QUIET)
    with pytest.raises(OnPTQError, match=r"no folder here.*qwen2\.5-vl-7b"):
        choose_variants(["nowhere"], [], tmp_path, QUIET)
    with pytest.raises(OnPTQError, match="expected vllm or transformers"):
        Settings(engine="llama.cpp")  # type: ignore[arg-type]
    with pytest.raises(OnPTQError, match="--mode eager alone"):
        Settings(engine="transformers", modes=("compiled",))
    with pytest.raises(OnPTQError, match="'machete' is not known to transformers; expected torch, humming, simulated"):
        Settings(engine="transformers", linear_backend="machete")


def test_an_interpreter_without_vllm_is_named(small: Path, exported: Path) -> None:
    quantized = str(exported / f"{small.name}-W4A8-rtn")
    result = CliRunner().invoke(app, ["bench", quantized, "--engine", "vllm", "--python", sys.executable])
    assert result.exit_code == 2
    assert "has no vLLM" in result.output
    assert "--python" in result.output


def test_a_checkpoint_that_does_not_run_is_reported_and_the_others_are_measured(small: Path, tmp_path: Path) -> None:
    """The interpreter here is a script that fails for one of two folders."""
    told = {"kernels": {"K": 1}, "weight_bytes": 1, "device": "cpu", "versions": {}, "batches": []}
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\ncase \"$2\" in *broken*) echo boom; exit 3;; esac\necho 'RESULT {json.dumps(told)}'\n"
    )
    python.chmod(0o755)
    folders = (shutil.copytree(small, tmp_path / "broken"), small)
    variants = [choose_variants([str(folder)], [], tmp_path, QUIET)[0] for folder in folders]
    settings = Settings(engine="vllm", python=str(python))
    saved: list[int] = []
    found = run_bench(
        "two", variants, settings, QUIET, tmp_path / "logs", lambda one: saved.append(len(one["results"]))
    )
    failed, whole = found["results"]
    assert saved == [1, 2]
    assert "exit code 3" in failed["error"]
    assert failed["error"].endswith("boom")
    assert whole["kernels"] == {"K": 1}


@pytest.mark.parametrize("together", [False, True])
def test_engines_start_alone_or_together_and_are_measured_one_by_one(
    together: bool, small: Path, tmp_path: Path
) -> None:
    """Each writes down when it started, was let go and ended."""
    told = json.dumps({"kernels": {}, "weight_bytes": 1, "device": "cpu", "versions": {}, "batches": []})
    python, events = tmp_path / "python", tmp_path / "events"
    python.write_text(
        f"#!/bin/sh\necho start >> {events}\necho READY\nread line\necho begin >> {events}\nsleep 1\n"
        f"echo end >> {events}\necho 'RESULT {told}'\n"
    )
    python.chmod(0o755)
    variants = [
        replace(choose_variants([str(small)], [], tmp_path, QUIET)[0], name=name) for name in ("one", "two", "three")
    ]
    settings = Settings("vllm", python=str(python), together=together, timeout=2.5)  # enough for each, not for all
    found = run_bench("three", variants, settings, QUIET, tmp_path / "logs")
    assert [one["name"] for one in found["results"]] == ["one", "two", "three"]
    assert all("error" not in one for one in found["results"])
    alone = ["start", "begin", "end"] * 3
    assert events.read_text().split() == (["start"] * 3 + ["begin", "end"] * 3 if together else alone)


def test_an_engine_whose_time_is_over_is_stopped_and_the_next_is_measured(small: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho started\nexec sleep 60\n")
    python.chmod(0o755)
    variants = choose_variants([str(small)], [], tmp_path, QUIET)
    settings = Settings("vllm", python=str(python), timeout=0.5)
    (found,) = run_bench("one", variants, settings, QUIET, tmp_path / "logs")["results"]
    assert found["error"] == "stopped: its time was over; the log ends: started"


ENDLESS = """
import sys, time
from pathlib import Path
from onptq_vllm.bench.timing import measure, serve

def run(job):
    Path(job.folder, "here").write_text("started")
    next(measure(lambda prompts, tokens: None, job, None)) if job.mode == "compiled" else time.sleep(600)

serve(run)
"""


@pytest.mark.parametrize("mode", ["eager", "compiled"], ids=["while it starts", "while it waits for its turn"])
def test_an_engine_ends_with_the_process_that_started_it(mode: str, tmp_path: Path) -> None:
    job = replace(JOB, folder=str(tmp_path), mode=mode, waits=True)
    line = [sys.executable, "-c", ENDLESS, job.text()]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None
        until((tmp_path / "here").exists)
        assert engine.poll() is None
        engine.stdin.close()  # as the system does for a killed process
        assert engine.wait(30) == 1


def until(condition: Callable[[], bool], seconds: float = 240) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_stopped_benchmark_leaves_no_engine_and_no_checkpoints(
    number: signal.Signals, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL the folder goes when the next benchmark starts."""
    python, started, scratch = tmp_path / "python", tmp_path / "engine", tmp_path / "scratch"
    python.write_text(
        f"#!/bin/sh\necho $$ > {started}.part\nmv {started}.part {started}\nexec cat > {tmp_path}/turns\n"
    )
    python.chmod(0o755)
    scratch.mkdir()
    program = "from onptq.cli import main; main()"
    line = [sys.executable, "-c", program, "bench", str(small), "--schemes", "W8A16", "--python", str(python)]
    site = next(path for path in sys.path if list(Path(path).glob("onptq_vllm-*.dist-info")))
    paths = os.pathsep.join([site, *sys.path])
    with subprocess.Popen(line, env=os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": paths}) as bench:
        until(started.exists)
        (folder,) = scratch.glob(f"{PREFIX}*")
        assert list(folder.glob("*/model.safetensors"))
        bench.send_signal(number)
        assert bench.wait(30) == (TERMINATED if number == signal.SIGTERM else -number)
    until(lambda: not Path(f"/proc/{started.read_text().strip()}").exists())
    assert folder.exists() == (number == signal.SIGKILL)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with scratch_folder() as first, scratch_folder() as second:
        assert not folder.exists()
        assert first.is_dir()
        assert second.is_dir()
    assert not list(scratch.glob(f"{PREFIX}*"))


@pytest.mark.parametrize(
    ("doubt", "said"),
    [
        ({"not_finite": 255, "decoded_apart": 0.0}, "255 log-probabilities are not numbers"),
        ({"not_finite": 0, "decoded_apart": 7.25}, "log-probabilities of decoded tokens are up to 7.2 off"),
        ({"not_finite": 0, "decoded_apart": 0.5}, None),
    ],
)
def test_an_engine_that_computes_wrongly_fails(
    small: Path, tmp_path: Path, doubt: dict[str, float], said: str | None
) -> None:
    row = {"batch": 1, "prefill_seconds": 1.0, "decode_seconds": 1.0, "prefill_peak_bytes": 1}
    told = {"kernels": {"K": 1}, "weight_bytes": 1, "device": "cpu", "versions": {}, "batches": [row]} | doubt
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho 'RESULT {json.dumps(told)}'\n")
    python.chmod(0o755)
    result = CliRunner().invoke(app, ["bench", str(small), "--schemes", "", "--python", str(python)])
    assert result.exit_code == (said is not None)
    assert said is None or f"dense: failed, {said}" in " ".join(result.output.split())


@dataclass
class Talker:
    """An engine that says token 7 and gives every token one log-probability when it reads and one when it speaks."""

    spoken: float
    read: float
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def generate(self, prompts: Sequence[Any], parameters: str, use_tqdm: bool) -> list[Any]:
        ids = [one["prompt_token_ids"] for one in prompts]
        self.asked.append((parameters, len(ids), len(ids[0])))
        if parameters == "spoken":
            said = SimpleNamespace(token_ids=[7, 7], logprobs=[{7: SimpleNamespace(logprob=self.spoken)}] * 2)
            return [SimpleNamespace(outputs=[said]) for _ in ids]
        heard = [[None, *({token: SimpleNamespace(logprob=self.read)} for token in one[1:])] for one in ids]
        return [SimpleNamespace(prompt_logprobs=one) for one in heard]


@pytest.mark.parametrize(
    ("spoken", "read", "broken", "apart"),
    [(-1.0, -1.5, 0, 0.5), (float("nan"), -1.5, 2 * 9, 0.0), (-1.0, float("-inf"), 2049 * 9, 0.0)],
    ids=["apart", "decoding breaks", "reading breaks"],
)
def test_what_was_decoded_is_read_again(spoken: float, read: float, broken: int, apart: float) -> None:
    talker = Talker(spoken, read)
    assert doubts(talker, "spoken", "read", JOB) == {"not_finite": broken, "decoded_apart": apart}
    assert talker.asked == [("spoken", 1, 2048), ("read", 1, 2050), ("spoken", 8, 2048), ("read", 8, 2050)]


def test_prefill_and_decode_come_from_pairs_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that takes 5 s for a prompt and 2 s for a token is found to do so, warm-up apart, and 1 s more for prompts of
    which more than three came one right after another."""
    clock = SimpleNamespace(now=0.0, calls=0, busy=0)
    monkeypatch.setattr("onptq_vllm.bench.timing.time.perf_counter", lambda: clock.now)

    def generate(prompts: Sequence[list[int]], tokens: int) -> None:
        assert len(prompts) in (1, 8)
        assert {len(ids) for ids in prompts} == {2048}
        clock.calls += 1
        clock.busy = clock.busy + 1 if tokens == 1 else 0
        clock.now += 100 if clock.calls <= 4 else 5 * len(prompts) + 2 * (tokens - 1) + (clock.busy > 3)

    memory = SimpleNamespace(reset=lambda: None, peak=lambda: clock.calls)
    one, eight = measure(generate, JOB, memory)
    assert (one["prefill_seconds"], one["prefill_between_seconds"], one["decode_seconds"]) == (6, 5, 2)
    assert (eight["prefill_seconds"], eight["prefill_between_seconds"], eight["decode_seconds"]) == (41, 40, 2)
    assert one["prefill_all"] == [6] * JOB.repeats
    assert one["prefill_peak_bytes"] == 5  # read before the longer responses are written
    assert one["peak_bytes"] > one["prefill_peak_bytes"]


def test_prompts_are_the_same_for_every_checkpoint_and_hold_no_special_ids() -> None:
    prompts = draw_prompts(3, 50, 1000)
    assert prompts == draw_prompts(3, 50, 1000)
    assert len({tuple(ids) for ids in prompts}) == 3
    assert all(300 <= token < 1000 for ids in prompts for token in ids)


def test_a_job_survives_its_way_through_the_command_line() -> None:
    line = command(Settings(engine="vllm", python="/opt/python"), JOB)
    assert line[0] == "/opt/python"
    assert Path(line[1]).is_file()
    assert Job.parse(line[2]) == JOB
    assert heard('INFO noise\nRESULT {"a": 1}\nbye') == {"a": 1}
    assert heard("only noise") is None


def test_vllm_gets_the_same_settings_but_for_the_kernels_a_scheme_needs() -> None:
    eager = options(JOB, on_gpu=True)
    assert eager["linear_backend"] == "humming"
    assert eager["enforce_eager"]
    assert eager["max_num_batched_tokens"] == 8 * 2048
    compiled = options(Job.parse(JOB.text().replace('"eager"', '"compiled"')), on_gpu=True)
    assert compiled["compilation_config"] == {"cudagraph_capture_sizes": [1, 8, 2048, 16384]}
    assert "enforce_eager" not in compiled
    assert "linear_backend" not in options(JOB, on_gpu=False)


def test_any_option_of_vllm_can_be_set_for_all_checkpoints() -> None:
    graphs = {"compilation_config": {"cudagraph_mode": "FULL"}, "block_size": 128, "attention_config": {"a": {"b": 1}}}
    job = Job.parse(replace(JOB, mode="compiled", options=graphs).text())
    found = options(job, on_gpu=True)
    assert found["block_size"] == 128
    assert found["compilation_config"] == {"cudagraph_capture_sizes": [1, 8, 2048, 16384], "cudagraph_mode": "FULL"}
    assert found["attention_config"] == {"a": {"b": 1}}
    done = CliRunner().invoke(app, ["bench", "zoo:qwen2.5-vl", "--engine", "transformers", "--set", "block_size=128"])
    assert done.exit_code == 2
    assert "--set block_size: these are options of vLLM" in done.output
    done = CliRunner().invoke(app, ["bench", "zoo:qwen2.5-vl", "--set", "a=1", "--set", "a.b=2"])
    assert done.exit_code == 2
    assert "cannot set 'a.b': a is 1, not a section" in done.output


def test_kernels_are_read_off_the_layers_that_were_loaded() -> None:
    """Names of modules and classes as vLLM 0.26 and 0.32 have them."""

    def kind(name: str, **attributes: Any) -> Any:
        return type(name, (), attributes)()

    humming = kind("CompressedTensorsWNA8Int", kernel=kind("HummingLinearKernel"))
    meta = SimpleNamespace(a_dtype="int8", b_dtype="uint4")
    quantized = SimpleNamespace(scheme=humming, humming_metas={"": meta})
    plain = SimpleNamespace(scheme=None, quant_method=kind("UnquantizedLinearMethod"))
    named = [
        ("language_model.model.layers.0.self_attn.qkv_proj", quantized),
        ("language_model.model.layers.0.mlp.down_proj", quantized),
        ("language_model.model.layers.1.mlp.down_proj", plain),
        ("language_model.model.layers.1.self_attn.attn", plain),
        ("visual.blocks.0.mlp.down_proj", plain),
        ("visual.layers.0.mlp.down_proj", plain),
    ]
    found = describe_kernels(SimpleNamespace(named_modules=lambda: named))
    assert found == {"CompressedTensorsWNA8Int / HummingLinearKernel, int8 x uint4": 2, "UnquantizedLinearMethod": 1}
    setattr(meta, rounding.MARK, True)
    found = describe_kernels(SimpleNamespace(named_modules=lambda: named[:1]))
    assert found == {"CompressedTensorsWNA8Int / HummingLinearKernel, int8 x uint4, rounded by onptq": 1}


def test_rows_that_another_kernel_multiplies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"one": [(0, 1), (4, 8)], "other": []}
    monkeypatch.setitem(sys.modules, "humming.ops", SimpleNamespace(humming_gemm=lambda: None))
    monkeypatch.setattr(sys.modules["humming.ops"].humming_gemm, decoding.MARK, taken.__getitem__, raising=False)

    def linear(name: str) -> Any:
        config = SimpleNamespace(a_dtype="float16", b_dtype="uint4", to_str=lambda: name)
        return SimpleNamespace(scheme=SimpleNamespace(kernel=SimpleNamespace(layer_config=config)))

    named = [("model.layers.0.self_attn.qkv_proj", linear("one")), ("model.layers.0.mlp.down_proj", linear("other"))]
    found = describe_kernels(SimpleNamespace(named_modules=lambda: named))
    assert found == {
        "SimpleNamespace / SimpleNamespace, float16 x uint4 (rows 1 and 5 to 8 by few_rows)": 1,
        "SimpleNamespace / SimpleNamespace, float16 x uint4": 1,
    }


def test_the_kernel_that_ran_is_held_against_the_plan() -> None:
    assert announced("W4A8", "sm90", "humming") == "Humming"
    assert announced("W4A8", "sm90", None) == "Machete"
    assert announced("W8A8", "sm90", None) == "CutlassInt8"
    assert announced("dense", "sm90", None) is None
    ran = {"mode": "eager", "name": "W4A8", "dtype": "float16", "weight_bytes": 2**30, "hardware": "sm90"}
    as_told = ran | {"linear_backend": "humming", "kernels": {"CompressedTensorsWNA8Int / HummingLinearKernel": 112}}
    other = ran | {"linear_backend": "humming", "kernels": {"CompressedTensorsWNA8Int / MacheteLinearKernel": 112}}
    first, second = kernel_lines([as_told, other], "eager")
    assert "112 linears by CompressedTensorsWNA8Int / HummingLinearKernel (as `onptq plan` announces: Humming)" in first
    assert "not what `onptq plan` announces: Humming" in second


def test_the_table_says_how_many_times_faster_and_how_much_less_memory() -> None:
    def result(name: str, prefill: float, decode: float, peak: int) -> dict[str, Any]:
        row = {"batch": 1, "prefill_seconds": prefill, "decode_seconds": decode, "prefill_peak_bytes": peak}
        return {"name": name, "mode": "eager", "batches": [row]}

    failed = {"name": "W8A8", "mode": "eager", "error": "no"}
    found = list(rows([result("dense", 0.04, 0.01, 2**34), result("W4A8", 0.02, 0.004, 2**33), failed], "eager"))
    assert found[0] == ("dense", "1", "40.00", "", "10.00", "", "16.00", "")
    assert found[1] == ("W4A8", "1", "20.00", "2.00x", "4.00", "2.50x", "8.00", "50.0%")
    assert len(found) == 2
    assert all(len(row) == len(HEADS) for row in found)
    (beside,) = rows([result("dense", 0.04, 0.01, 2**34)], "eager", paper=True)
    assert beside == (*found[0], "36.73 ms, 16.22 GB")
    reserved = [result("dense", 1, 1, 2**34) | {"reserved_bytes": 2**35}, result("W4A8", 1, 1, 1)]
    assert [row[6:8] for row in rows([*reserved, reserved[1] | {"reserved_bytes": 2**33}], "eager")][::2] == [
        ("32.00", ""),
        ("8.00", "75.0%"),
    ]


def test_what_an_h200_gave_is_shown_as_docs_say() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    one, eight = (json.loads((results / f"h200-vllm-full-again-batch-{size}.json").read_text()) for size in (1, 8))
    shown = [row[:8] for found in (one, eight) for row in rows(found["results"], "compiled")]
    assert shown[1] == ("W4A8", "1", "26.40", "1.86x", "2.83", "1.69x", "7.33", "55.3%")
    assert shown[2][4:6] == ("2.33", "2.05x")
    (line,) = between_lines(one["results"], "compiled")
    assert line == (
        "prefill with decoding between, batch 1: dense 43.24 ms, W4A8 25.01 ms (1.73x), W4A16 humming 42.58 ms (1.02x)"
    )
    assert not list(between_lines(one["results"], "eager"))
    assert shown[4] == ("W4A8", "8", "191.10", "1.91x", "3.22", "1.60x", "20.17", "30.9%")


def test_the_papers_numbers_stand_beside_its_model_only(small: Path, tmp_path: Path) -> None:
    def config(name: str, layers: int | None = None) -> Any:
        shape = PUBLISHED[name]
        ids = write_tokenizer(tmp_path, TOKENS.get(shape.family, QWEN), 4096)
        dims = shape.dims if layers is None else replace(shape.dims, layers=layers)
        return model_config(shape.family, dims, ids, shape.towers)

    assert [name for name in PUBLISHED if is_papers_model(config(name))] == ["qwen2.5-vl-7b"]
    assert not is_papers_model(config("qwen2.5-vl-7b", layers=4))
    assert not is_papers_model(json.loads((small / "config.json").read_text()))


def test_the_papers_ratios_follow_from_its_numbers() -> None:
    assert paper_cell("W4A8", 1).endswith("1.79x, 37.4% less")
    assert paper_cell("W4A8", 8).endswith("1.41x, 28.7% less")
    assert paper_cell("W4A16", 1) == ""
