"""vLLM as a process: who is asked for it, the command for every kind of device, and the line that a user is given."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from onptq.errors import OnPTQError
from onptq.schemes import Scheme
from onptq.serving import vllm
from onptq.serving.vllm import Launch, Vllm

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 2**30


def launch(scheme: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Launch:
    return Launch.of(Scheme.parse(scheme), dtype, device, 600, {"image": 1, "video": 0})


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    given = {"avx512f"}
    monkeypatch.setattr(vllm, "cpu_flags", lambda: given)
    return given


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB))


def option(one: Launch, name: str) -> str | None:
    return one.options[one.options.index(name) + 1] if name in one.options else None


@pytest.mark.parametrize(
    ("scheme", "amx", "dtype", "switch", "computes"),
    [
        ("W8A8", False, "float32", None, None),
        ("W4A16", False, "float16", None, None),
        ("W4A8", False, "bfloat16", None, "int4 x 16-bit"),
        ("W8A8", True, "bfloat16", None, None),
        ("W4A16", True, "bfloat16", "0", None),
        ("W4A8", True, "bfloat16", None, None),
    ],
)
def test_a_cpu_gets_the_dtype_and_the_switch_that_compute_the_scheme(
    flags: set[str], scheme: str, amx: bool, dtype: str, switch: str | None, computes: str | None
) -> None:
    if amx:
        flags.add("amx_tile")
    one = launch(scheme)
    assert option(one, "--dtype") == dtype
    assert one.environment.get("VLLM_CPU_INT4_W4A8") == switch
    assert one.computes == computes
    assert option(one, "--max-model-len") == "600"
    assert option(one, "--generation-config") == "vllm"
    assert option(one, "--limit-mm-per-prompt") == '{"image": 1, "video": 0}'
    assert "--enforce-eager" in one.options


@pytest.mark.usefixtures("hopper")
def test_a_gpu_is_shared_by_what_is_free_of_it_and_gets_the_kernel_of_the_scheme() -> None:
    one = launch("W4A8", GPU, torch.bfloat16)
    assert option(one, "--linear-backend") == "humming"
    assert option(one, "--dtype") == "bfloat16"
    assert option(one, "--gpu-memory-utilization") == "0.45"
    assert "--enforce-eager" not in one.options
    assert "TORCHDYNAMO_DISABLE" not in one.environment
    assert one.computes is None
    assert option(launch("W8A8", GPU, torch.bfloat16), "--linear-backend") is None


@pytest.mark.usefixtures("hopper")
def test_what_a_kernel_computes_instead_is_known() -> None:
    assert launch("NVFP4", GPU, torch.bfloat16).computes == "E2M1 x 16-bit"


@pytest.mark.usefixtures("hopper")
def test_the_line_for_a_user_leaves_out_what_is_for_a_shared_gpu() -> None:
    line = launch("W4A8", GPU, torch.bfloat16).to_type(Path("/runs/a b"), 8001, ("--tensor-parallel-size", "2"))
    assert line == (
        "vllm serve '/runs/a b' --port 8001 --linear-backend humming --dtype bfloat16 --max-model-len 600 "
        """--generation-config vllm --limit-mm-per-prompt '{"image": 1, "video": 0}' --tensor-parallel-size 2"""
    )


def test_the_line_for_a_user_names_the_switch_of_a_cpu(flags: set[str]) -> None:
    flags.add("amx_tile")
    assert launch("W4A16").to_type(Path("/x"), None, ()).startswith("VLLM_CPU_INT4_W4A8=0 vllm serve /x --dtype")


def test_the_user_s_own_environment_and_options_win(flags: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    one = launch("W8A8")
    assert "VLLM_CPU_KVCACHE_SPACE" not in one.additions()
    command = one.command(Vllm(python=Path("/env/bin/python"), arguments=("--dtype", "bfloat16")), Path("/q"), 8123)
    assert command[:3] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert command[-2:] == ["--dtype", "bfloat16"]  # behind ours


def python_that(tmp_path: Path, program: str) -> Path:
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{program}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_python_without_vllm_is_refused_with_what_to_give(tmp_path: Path) -> None:
    Vllm.given(python=python_that(tmp_path, "raise SystemExit(0)")).check_installed()
    with pytest.raises(OnPTQError, match=r"has no vLLM; expected --vllm-python PATH \(or ONPTQ_VLLM_PYTHON\)"):
        Vllm.given(python=python_that(tmp_path, "raise SystemExit(1)")).check_installed()
    with pytest.raises(OnPTQError, match=r"nowhere cannot be run: .*; expected a Python"):
        Vllm.given(python=tmp_path / "nowhere").check_installed()
    Vllm.given("http://localhost:8000/v1", tmp_path / "nowhere").check_installed()


def test_the_environment_names_a_python_where_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONPTQ_VLLM_PYTHON", "/env/bin/python")
    assert Vllm.given().interpreter == "/env/bin/python"
    assert Vllm.given(python="/other").interpreter == "/other"
    monkeypatch.delenv("ONPTQ_VLLM_PYTHON")
    assert Vllm.given().interpreter == sys.executable
    assert os.access(Vllm.given().interpreter, os.X_OK)


def test_a_scheme_without_a_server_and_a_wrong_address_are_refused() -> None:
    with pytest.raises(OnPTQError, match=r"W4A6 is for simulation, no server runs it; expected follow.engine=own"):
        Vllm().check(Scheme.parse("W4A6"))
    with pytest.raises(OnPTQError, match="is no address of a server"):
        Vllm("localhost:8000").check(Scheme.parse("W8A8"))
