"""`onptq bench`: checkpoints in one engine, their kernels, and the paper's numbers beside them."""

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
from onptq.zoo.random import TOKENS
from onptq.zoo.tokens import QWEN, write_tokenizer

pytest.importorskip("onptq_vllm", reason="needs the package onptq-vllm: pip install ./packages/onptq-vllm")

from onptq_vllm.bench.paper import is_papers_model
from onptq_vllm.bench.published import PUBLISHED, Published
from onptq_vllm.bench.running import Settings, command, run_bench
from onptq_vllm.bench.scratch import PREFIX, TERMINATED, scratch_folder
from onptq_vllm.bench.tables import HEADS, announced, between_lines, kernel_lines, paper_cell, rows
from onptq_vllm.bench.timing import Job, draw_prompts, measure, parse_result
from onptq_vllm.bench.transformers_engine import run as run_transformers
from onptq_vllm.bench.variants import choose_variants
from onptq_vllm.bench.vllm_engine import check_logprobs, describe_kernels, options
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


@pytest.mark.slow
def test_the_command_measures_dense_and_quantized_in_transformers(small: Path, exported: Path, tmp_path: Path) -> None:
    quantized, out = exported / f"{small.name}-W4A8-rtn", tmp_path / "report.json"
    sizes = ["--prompt-tokens", "24", "--new-tokens", "3", "--repeats", "2", "--batch", "2"]
    arguments = ["bench", str(quantized), str(small), "--engine", "transformers", *sizes, "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert [one["name"] for one in report["results"]] == ["dense", "W4A8"]
    for one in report["results"]:
        (row,) = one["batches"]
        assert row["batch"] == 2
        assert len(row["prefill_all"]) == len(row["decode_all"]) == 2
        assert 0 < row["prefill_seconds"] < 60
        assert row["prefill_peak_bytes"] > 2**20
        assert sum(one["kernels"].values()) == 14  # seven linears in each of two blocks
    assert report["results"][0]["kernels"].keys() == {"Linear / bfloat16"}
    assert report["results"][1]["kernels"] == {LOW_BIT: 14}
    assert report["results"][1]["linear_backend"] is None
    assert "paper" not in result.output  # shown for its model only
    assert report["results"][1]["batches"][0]["prefill_seconds"] > 0


@pytest.mark.slow
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
    measured = run_transformers(settings.job(variant, "eager"))
    assert measured["kernels"] == {kernel: 14}
    assert measured["batches"][0]["prefill_seconds"] > 0


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
    chosen = [Settings("vllm", linear_backend="cutlass").job(variant, "eager").linear_backend for variant in variants]
    assert chosen == [None, "cutlass", "marlin", "machete"]
    with pytest.raises(OnPTQError, match="is dense; a backend is for quantized linears"):
        choose_variants([f"{small}@marlin"], [], exported, QUIET)


def test_a_name_is_a_model_of_these_shapes_with_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dims = Dims(4, 64, 128, 2, 1, 512, False, "float16")
    monkeypatch.setitem(PUBLISHED, "little", Published("qwen3-vl", dims, RANDOM_TOWERS, (28 * 28, 512 * 512)))
    (variant,) = choose_variants(["little"], [], tmp_path, QUIET, layers=2)
    assert variant.source.folder == tmp_path / "little-2"
    assert variant.source.config["text_config"]["num_hidden_layers"] == 2
    assert variant.dtype == "float16"


def test_wrong_settings_are_refused_before_anything_runs(small: Path, tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match=r"several dense models.*expected one"):
        choose_variants([str(small), str(small)], [], tmp_path, QUIET)
    with pytest.raises(OnPTQError, match=r"is not a folder.*qwen2\.5-vl-7b"):
        choose_variants(["nowhere"], [], tmp_path, QUIET)
    with pytest.raises(OnPTQError, match="expected vllm or transformers"):
        Settings(engine="llama.cpp")  # type: ignore[arg-type]
    with pytest.raises(OnPTQError, match="--mode eager alone"):
        Settings(engine="transformers", modes=("compiled",))
    with pytest.raises(
        OnPTQError,
        match="unknown linear backend 'machete' of --engine transformers: expected one of torch, humming, simulated",
    ):
        Settings(engine="transformers", linear_backend="machete")


@pytest.mark.slow
def test_an_interpreter_without_vllm_is_named(small: Path, exported: Path) -> None:
    quantized = str(exported / f"{small.name}-W4A8-rtn")
    result = CliRunner().invoke(app, ["bench", quantized, "--engine", "vllm", "--python", sys.executable])
    assert result.exit_code == 2
    assert "has no vLLM" in result.output
    assert "--python" in result.output


def test_a_checkpoint_that_does_not_run_is_reported_and_the_others_are_measured(small: Path, tmp_path: Path) -> None:
    """The interpreter is a script that fails for one of two folders."""
    result = {"kernels": {"K": 1}, "weight_bytes": 1, "device": "cpu", "versions": {}, "batches": []}
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\ncase \"$2\" in *broken*) echo boom; exit 3;; esac\necho 'RESULT {json.dumps(result)}'\n"
    )
    python.chmod(0o755)
    folders = (shutil.copytree(small, tmp_path / "broken"), small)
    variants = [choose_variants([str(folder)], [], tmp_path, QUIET)[0] for folder in folders]
    settings = Settings(engine="vllm", python=str(python))
    saved: list[int] = []
    report = run_bench(
        "two", variants, settings, QUIET, tmp_path / "logs", lambda one: saved.append(len(one["results"]))
    )
    failed, whole = report["results"]
    assert saved == [1, 2]
    assert "exit code 3" in failed["error"]
    assert failed["error"].endswith("boom")
    assert whole["kernels"] == {"K": 1}


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_engines_start_alone_or_together_and_are_measured_one_by_one(
    together: bool, small: Path, tmp_path: Path
) -> None:
    """Each engine writes down when it starts, begins to measure and ends."""
    result = json.dumps({"kernels": {}, "weight_bytes": 1, "device": "cpu", "versions": {}, "batches": []})
    python, events = tmp_path / "python", tmp_path / "events"
    python.write_text(
        f"#!/bin/sh\necho start >> {events}\necho READY\nread line\necho begin >> {events}\nsleep 1\n"
        f"echo end >> {events}\necho 'RESULT {result}'\n"
    )
    python.chmod(0o755)
    variants = [
        replace(choose_variants([str(small)], [], tmp_path, QUIET)[0], name=name) for name in ("one", "two", "three")
    ]
    settings = Settings("vllm", python=str(python), together=together, timeout=2.5)  # enough for each, not for all
    report = run_bench("three", variants, settings, QUIET, tmp_path / "logs")
    assert [one["name"] for one in report["results"]] == ["one", "two", "three"]
    assert all("error" not in one for one in report["results"])
    alone = ["start", "begin", "end"] * 3
    assert events.read_text().split() == (["start"] * 3 + ["begin", "end"] * 3 if together else alone)


def test_an_engine_is_stopped_at_the_time_limit(small: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho started\nexec sleep 60\n")
    python.chmod(0o755)
    variants = choose_variants([str(small)], [], tmp_path, QUIET)
    settings = Settings("vllm", python=str(python), timeout=0.5)
    (measured,) = run_bench("one", variants, settings, QUIET, tmp_path / "logs")["results"]
    assert measured["error"] == "stopped at the time limit; the log ends: started"


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
        engine.stdin.close()  # as the system closes it for a killed process
        assert engine.wait(30) == 1


def until(condition: Callable[[], bool], seconds: float = 240) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_stopped_benchmark_leaves_no_engine_and_no_checkpoints(
    number: signal.Signals, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL the next benchmark removes the folder."""
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
    ("figures", "message"),
    [
        ({"not_finite": 255, "decoded_apart": 0.0}, "255 log-probabilities are not finite"),
        (
            {"not_finite": 0, "decoded_apart": 7.25},
            "log-probabilities of decoded tokens and of the same tokens in a prompt differ by up to 7.2; expected",
        ),
        ({"not_finite": 0, "decoded_apart": 0.5}, None),
    ],
)
def test_an_engine_that_computes_wrongly_fails(
    small: Path, tmp_path: Path, figures: dict[str, float], message: str | None
) -> None:
    row = {"batch": 1, "prefill_seconds": 1.0, "decode_seconds": 1.0, "prefill_peak_bytes": 1}
    result = {"kernels": {"K": 1}, "weight_bytes": 1, "device": "cpu", "versions": {}, "batches": [row]} | figures
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho 'RESULT {json.dumps(result)}'\n")
    python.chmod(0o755)
    run = CliRunner().invoke(app, ["bench", str(small), "--schemes", "", "--python", str(python)])
    assert run.exit_code == (message is not None)
    assert message is None or f"dense: failed, {message}" in " ".join(run.output.split())


@dataclass
class FixedEngine:
    """An engine that decodes token 7, with one log-probability for all decoded and one for all prefilled tokens."""

    decoded: float
    prefilled: float
    calls: list[tuple[str, int, int]] = field(default_factory=list)

    def generate(self, prompts: Sequence[Any], parameters: str, use_tqdm: bool) -> list[Any]:
        ids = [one["prompt_token_ids"] for one in prompts]
        self.calls.append((parameters, len(ids), len(ids[0])))
        if parameters == "decode":
            answer = SimpleNamespace(token_ids=[7, 7], logprobs=[{7: SimpleNamespace(logprob=self.decoded)}] * 2)
            return [SimpleNamespace(outputs=[answer]) for _ in ids]
        logprobs = [[None, *({token: SimpleNamespace(logprob=self.prefilled)} for token in one[1:])] for one in ids]
        return [SimpleNamespace(prompt_logprobs=one) for one in logprobs]


@pytest.mark.parametrize(
    ("decoded", "prefilled", "broken", "apart"),
    [(-1.0, -1.5, 0, 0.5), (float("nan"), -1.5, 2 * 9, 0.0), (-1.0, float("-inf"), 2049 * 9, 0.0)],
    ids=["apart", "decoding breaks", "prefill breaks"],
)
def test_decoded_tokens_are_prefilled_and_compared(decoded: float, prefilled: float, broken: int, apart: float) -> None:
    engine = FixedEngine(decoded, prefilled)
    assert check_logprobs(engine, "decode", "prefill", JOB) == {"not_finite": broken, "decoded_apart": apart}
    assert engine.calls == [("decode", 1, 2048), ("prefill", 1, 2050), ("decode", 8, 2048), ("prefill", 8, 2050)]


def test_prefill_and_decode_come_from_pairs_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes 5 s for a prompt, 2 s for a token, and 1 s more from the fourth prefill in a row on. Its first
    calls take 100 s; they do not count."""
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


def test_prompts_are_the_same_for_every_checkpoint_and_have_no_special_ids() -> None:
    prompts = draw_prompts(3, 50, 1000)
    assert prompts == draw_prompts(3, 50, 1000)
    assert len({tuple(ids) for ids in prompts}) == 3
    assert all(300 <= token < 1000 for ids in prompts for token in ids)


def test_a_job_is_the_same_behind_the_command_line() -> None:
    line = command(Settings(engine="vllm", python="/opt/python"), JOB)
    assert line[0] == "/opt/python"
    assert Path(line[1]).is_file()
    assert Job.parse(line[2]) == JOB
    assert parse_result('INFO noise\nRESULT {"a": 1}\nbye') == {"a": 1}
    assert parse_result("only noise") is None


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
    chosen = options(job, on_gpu=True)
    assert chosen["block_size"] == 128
    assert chosen["compilation_config"] == {"cudagraph_capture_sizes": [1, 8, 2048, 16384], "cudagraph_mode": "FULL"}
    assert chosen["attention_config"] == {"a": {"b": 1}}
    done = CliRunner().invoke(app, ["bench", "zoo:qwen2.5-vl", "--engine", "transformers", "--set", "block_size=128"])
    assert done.exit_code == 2
    assert "--set block_size: these are options of vLLM" in done.output
    done = CliRunner().invoke(app, ["bench", "zoo:qwen2.5-vl", "--set", "a=1", "--set", "a.b=2"])
    assert done.exit_code == 2
    assert "cannot set 'a.b': a is 1, not a section" in done.output


def test_kernels_are_described_from_the_loaded_layers() -> None:
    """With the names of modules and classes of vLLM 0.26 and 0.32."""

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
    kernels = describe_kernels(SimpleNamespace(named_modules=lambda: named))
    assert kernels == {"CompressedTensorsWNA8Int / HummingLinearKernel, int8 x uint4": 2, "UnquantizedLinearMethod": 1}
    setattr(meta, rounding.MARK, True)
    kernels = describe_kernels(SimpleNamespace(named_modules=lambda: named[:1]))
    assert kernels == {"CompressedTensorsWNA8Int / HummingLinearKernel, int8 x uint4, rounded by onptq": 1}


def test_rows_of_another_kernel_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"one": [(0, 1), (4, 8)], "other": []}
    monkeypatch.setitem(sys.modules, "humming.ops", SimpleNamespace(humming_gemm=lambda: None))
    monkeypatch.setattr(sys.modules["humming.ops"].humming_gemm, decoding.MARK, taken.__getitem__, raising=False)

    def linear(name: str) -> Any:
        config = SimpleNamespace(a_dtype="float16", b_dtype="uint4", to_str=lambda: name)
        return SimpleNamespace(scheme=SimpleNamespace(kernel=SimpleNamespace(layer_config=config)))

    named = [("model.layers.0.self_attn.qkv_proj", linear("one")), ("model.layers.0.mlp.down_proj", linear("other"))]
    kernels = describe_kernels(SimpleNamespace(named_modules=lambda: named))
    assert kernels == {
        "SimpleNamespace / SimpleNamespace, float16 x uint4 (rows 1 and 5 to 8 by few_rows)": 1,
        "SimpleNamespace / SimpleNamespace, float16 x uint4": 1,
    }


def test_the_kernel_that_ran_is_compared_with_the_plan() -> None:
    assert announced("W4A8", "sm90", "humming") == "Humming"
    assert announced("W4A8", "sm90", None) == "Machete"
    assert announced("W8A8", "sm90", None) == "CutlassInt8"
    assert announced("dense", "sm90", None) is None
    ran = {"mode": "eager", "name": "W4A8", "dtype": "float16", "weight_bytes": 2**30, "hardware": "sm90"}
    as_planned = ran | {"linear_backend": "humming", "kernels": {"CompressedTensorsWNA8Int / HummingLinearKernel": 112}}
    other = ran | {"linear_backend": "humming", "kernels": {"CompressedTensorsWNA8Int / MacheteLinearKernel": 112}}
    first, second = kernel_lines([as_planned, other], "eager")
    assert "112 linears by CompressedTensorsWNA8Int / HummingLinearKernel (as `onptq plan` says: Humming)" in first
    assert "(not as `onptq plan` says: Humming)" in second


def test_the_table_has_speedups_and_savings_of_memory() -> None:
    def result(name: str, prefill: float, decode: float, peak: int) -> dict[str, Any]:
        row = {"batch": 1, "prefill_seconds": prefill, "decode_seconds": decode, "prefill_peak_bytes": peak}
        return {"name": name, "mode": "eager", "batches": [row]}

    failed = {"name": "W8A8", "mode": "eager", "error": "no"}
    shown = list(rows([result("dense", 0.04, 0.01, 2**34), result("W4A8", 0.02, 0.004, 2**33), failed], "eager"))
    assert shown[0] == ("dense", "1", "40.00", "", "10.00", "", "16.00", "")
    assert shown[1] == ("W4A8", "1", "20.00", "2.00x", "4.00", "2.50x", "8.00", "50.0%")
    assert len(shown) == 2
    assert all(len(row) == len(HEADS) for row in shown)
    (beside,) = rows([result("dense", 0.04, 0.01, 2**34)], "eager", paper=True)
    assert beside == (*shown[0], "36.73 ms, 16.22 GB")
    reserved = [result("dense", 1, 1, 2**34) | {"reserved_bytes": 2**35}, result("W4A8", 1, 1, 1)]
    assert [row[6:8] for row in rows([*reserved, reserved[1] | {"reserved_bytes": 2**33}], "eager")][::2] == [
        ("32.00", ""),
        ("8.00", "75.0%"),
    ]


def test_results_of_an_h200_are_shown_as_in_the_docs() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    one, eight = (json.loads((results / f"h200-vllm-full-again-batch-{size}.json").read_text()) for size in (1, 8))
    shown = [row[:8] for report in (one, eight) for row in rows(report["results"], "compiled")]
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
