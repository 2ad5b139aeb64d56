"""The serving table: what each server really computes for a scheme."""

from __future__ import annotations

from typing import get_args

import pytest

from onptq.checkpoint.served import ADA, AMPERE, BLACKWELL, CPU, CPU_AMX, HOPPER, Evidence, Served, Verdict
from onptq.checkpoint.served_by_sglang import SGLANG, SGLANG_TABLE, TRITON
from onptq.checkpoint.served_by_vllm import HUMMING, MARLIN, NO_INT8, VLLM, VLLM_TABLE
from onptq.checkpoint.serving import TRANSFORMERS, serving
from onptq.schemes import NAMED, PAPER_SCHEMES, Scheme


def rows(scheme: str, hardware: str, switch: str | None = None, server: str = VLLM) -> list[Served]:
    every = serving(Scheme.parse(scheme))
    return [row for row in every if (row.server, row.hardware, row.switch) == (server, hardware, switch)]


@pytest.mark.parametrize(
    "scheme", [*PAPER_SCHEMES, "W8A16", "W3A8", "W4A16-g128", "W4A16-g128-asym", "W16A8", "W4A8+kv8", *NAMED]
)
def test_transformers_simulates_every_scheme(scheme: str) -> None:
    first, *others = serving(Scheme.parse(scheme))
    assert (first.server, first.verdict, first.evidence) == (TRANSFORMERS, "simulates", "run")
    assert others
    assert {row.server for row in others} <= {VLLM, SGLANG}


@pytest.mark.parametrize(
    "scheme", [*PAPER_SCHEMES, "W8A16", "W4A16-g32-asym", "W8A16-asym", "W2A16", "W16A8", "FP8+kv8", *NAMED]
)
def test_every_row_is_well_formed(scheme: str) -> None:
    for row in serving(Scheme.parse(scheme)):
        assert row.verdict in get_args(Verdict)
        assert row.evidence in get_args(Evidence)
        assert row.computes
        if row.verdict in ("differs", "doubtful", "refuses"):
            assert row.note, f"{row} says no reason"


@pytest.mark.parametrize("scheme", ["W4A16", "FP8", "NVFP4", "W4A8-g128", "W8A8"])
def test_a_quantized_cache_changes_no_verdict_but_on_ampere_and_ran_on_a_cpu_alone(scheme: str) -> None:
    linears, cached = serving(Scheme.parse(scheme)), serving(Scheme.parse(f"{scheme}+kv8"))
    for row, with_cache in zip(linears, cached, strict=True):
        if row.server == VLLM and row.verdict != "refuses":
            assert with_cache.evidence == (row.evidence if row.hardware == CPU else "read")
            assert with_cache.verdict == ("doubtful" if row.hardware == AMPERE else row.verdict)
            assert "E4M3" in with_cache.note
            assert ("queries" in with_cache.note) == (row.hardware in (HOPPER, BLACKWELL))
        elif row.server == SGLANG and row.verdict != "refuses":
            assert (with_cache.verdict, with_cache.evidence) == ("differs", "read")
            assert "pass over the checkpoint's scales" in with_cache.note
        else:
            assert with_cache == row


@pytest.mark.parametrize("hardware", [AMPERE, "Ada sm89", HOPPER, BLACKWELL])
def test_w4a8_is_silently_w4a16_on_every_gpu_without_the_switch(hardware: str) -> None:
    (default,) = rows("W4A8", hardware)
    assert (default.verdict, default.computes) == ("differs", "int4 x 16-bit")
    assert default.kernel == ("Machete" if hardware == HOPPER else "Marlin")
    (switched,) = rows("W4A8", hardware, HUMMING)
    assert (switched.verdict, switched.kernel, switched.computes) == ("serves", "Humming", "int4 x int8")
    assert HUMMING == "--linear-backend humming"


def test_w4a8_says_where_it_ran_and_with_which_humming_it_was_wrong() -> None:
    ran = [row for row in serving(Scheme.parse("W4A8")) if row.evidence == "run" and row.server == VLLM]
    assert [(row.hardware, row.verdict) for row in ran] == [
        (HOPPER, "differs"),
        (HOPPER, "serves"),
        (CPU, "differs"),
        (CPU_AMX, "serves"),
    ]
    (switched,) = rows("W4A8", HOPPER, HUMMING)
    assert "humming-kernels 0.1.17" in switched.note
    assert "vLLM 0.32 or later: humming-kernels 0.1.10 and 0.1.12" in switched.note


@pytest.mark.parametrize(("switch", "kernel"), [(None, "Machete"), (MARLIN, "Marlin"), (HUMMING, "Humming")])
def test_w4a16_ran_on_hopper_by_three_kernels_in_rows_and_in_groups_by_none(switch: str | None, kernel: str) -> None:
    assert [(row.kernel, row.evidence) for row in rows("W4A16", HOPPER, switch)] == [(kernel, "run")]
    assert [row.evidence for row in rows("W4A16-g128", HOPPER, switch)] == ["read"]


def test_w4a6_is_simulation_only() -> None:
    (row,) = [row for row in serving(Scheme.parse("W4A6")) if row.server == VLLM]
    assert (row.verdict, row.kernel) == ("refuses", None)
    assert "simulation only" in row.note


def test_a_scheme_nobody_tried_is_doubtful_not_served() -> None:
    (row,) = [row for row in serving(Scheme.parse("W3A8")) if row.server == VLLM]
    assert (row.verdict, row.evidence) == ("doubtful", "untested")


def test_w8a8_runs_up_to_hopper_and_not_on_blackwell() -> None:
    assert [row.verdict for row in rows("W8A8", AMPERE)] == ["serves"]
    assert [(row.verdict, row.kernel) for row in rows("W8A8", HOPPER)] == [("serves", "CutlassInt8")]
    (blackwell,) = rows("W8A8", BLACKWELL)
    assert (blackwell.verdict, blackwell.evidence) == ("refuses", "documented")
    assert [row.computes for row in rows("W8A8", CPU)] == ["int8 x int8"]


@pytest.mark.parametrize("scheme", NAMED)
def test_floats_ran_on_a_cpu_alone_and_fp8_is_all_that_it_serves(scheme: str) -> None:
    ran = [row for row in serving(Scheme.parse(scheme)) if row.server == VLLM and row.evidence == "run"]
    assert [(row.hardware, row.verdict) for row in ran] == [(CPU, "serves" if scheme == "FP8" else "refuses")]


def test_fp8_needs_ada_and_its_blocks_hopper_or_activations_stay_in_16_bits() -> None:
    verdicts = {name: [rows(name, gpu)[0].verdict for gpu in (AMPERE, ADA, HOPPER)] for name in ("FP8", "FP8-block")}
    assert verdicts == {"FP8": ["differs", "serves", "serves"], "FP8-block": ["differs", "differs", "serves"]}
    assert [rows("W4AFP8", gpu)[0].verdict for gpu in (ADA, HOPPER, BLACKWELL)] == ["refuses", "serves", "refuses"]


def test_w4a16_gets_int8_activations_on_an_amx_cpu_unless_told_otherwise() -> None:
    assert [row.verdict for row in rows("W4A16", CPU_AMX)] == ["differs"]
    assert [(row.verdict, row.computes) for row in rows("W4A16", CPU_AMX, NO_INT8)] == [("serves", "int4 x 16-bit")]


def test_w8a16_is_refused_by_the_cpu() -> None:
    assert [row.verdict for row in rows("W8A16", CPU)] == ["refuses"]


def test_groups_and_zero_points_are_served_only_where_the_kernel_lists_them() -> None:
    assert [row.verdict for row in rows("W4A16-g128", HOPPER)] == ["serves"]
    assert [row.verdict for row in rows("W4A16-g32", AMPERE)] == ["serves"]
    assert [row.verdict for row in rows("W4A16-g32", HOPPER)] == ["doubtful"]
    assert [row.verdict for row in rows("W4A16-asym", AMPERE)] == ["serves"]
    assert [row.verdict for row in rows("W8A16-asym", AMPERE)] == ["doubtful"]


def test_what_was_asked_for_plain_rows_is_only_read_for_groups() -> None:
    assert [row.evidence for row in rows("W4A16", AMPERE)] == ["selected"]
    assert [row.evidence for row in rows("W4A16-g128", AMPERE)] == ["read"]


def verdicts(scheme: str) -> list[str]:
    """SGLang's defaults from Ampere to Blackwell."""
    return [rows(scheme, gpu, server=SGLANG)[0].verdict for gpu in (AMPERE, ADA, HOPPER, BLACKWELL)]


def test_sglang_has_rows_for_the_same_schemes_and_none_was_run() -> None:
    assert list(SGLANG_TABLE) == list(VLLM_TABLE)
    every = [row for rows in SGLANG_TABLE.values() for row in rows]
    assert {row.evidence for row in every} == {"read"}
    assert {row.verdict for row in every if row.hardware == CPU} == {"refuses"}


def test_sglang_by_its_choice_of_schemes() -> None:
    """By capability: int8 from 8.0 to 9.0, E4M3 from 8.9, two sides of E2M1 from 10.0; below, weights alone, by Marlin."""
    assert verdicts("W4A16") == verdicts("W8A16") == verdicts("NVFP4A16") == ["serves"] * 4
    assert verdicts("W8A8") == ["serves", "serves", "serves", "refuses"]
    assert verdicts("FP8") == ["differs", "serves", "serves", "serves"]
    assert verdicts("FP8-block") == ["refuses", "serves", "serves", "differs"]
    assert [row.verdict for row in rows("FP8-block", BLACKWELL, TRITON, SGLANG)] == ["serves"]
    assert verdicts("NVFP4") == ["differs", "differs", "differs", "serves"]
    for scheme in ("W4A8", "W4A8-g128", "W4AFP8", "MXFP4", "MXFP8"):
        assert verdicts(scheme) == ["refuses"] * 4
    assert verdicts("W4A16-g64") == ["serves"] * 4
    assert verdicts("W4A16-g16") == ["doubtful"] * 4
    assert verdicts("W8A16-asym") == ["serves"] * 4


def test_sglang_refuses_a_mix_with_a_part_that_it_refuses() -> None:
    assert verdicts("W4A16+mlp.down_proj~FP8") == ["differs", "serves", "serves", "serves"]
    assert verdicts("W4A16+mlp.down_proj~W4A8") == ["refuses"] * 4
    (switched,) = rows("W4A16+mlp.down_proj~FP8-block", BLACKWELL, TRITON, SGLANG)
    assert switched.verdict == "doubtful"


def test_experts_in_int8_are_for_npus_in_sglang() -> None:
    experts = [row for row in serving(Scheme.parse("W8A8"), experts=True) if row.server == SGLANG]
    assert {row.verdict for row in experts} == {"refuses"}
    assert "NPUs" in experts[0].note
