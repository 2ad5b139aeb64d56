"""`onptq advise`: what a GPU serves, best first, with the row of the serving table that each line rests on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onptq.checkpoint.served import EVIDENCE, HOPPER
from onptq.checkpoint.served_by_sglang import SGLANG
from onptq.checkpoint.served_by_vllm import VLLM, VLLM_TABLE
from onptq.checkpoint.serving import serving
from onptq.checkpoint.source import find_source
from onptq.cli import app
from onptq.errors import OnPTQError
from onptq.plan.advice import CANDIDATES, GENERATIONS, RULES, SHARE, advise, find_target
from onptq.plan.machine import GPUS
from onptq.plan.parts import find_parts
from onptq.schemes import Scheme


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["advise", *map(str, arguments)])


@pytest.mark.parametrize(
    ("gpu", "scheme"),
    [("h200", "FP8"), ("l4", "FP8"), ("a100", "W4A16-g128"), ("rtx5090", "NVFP4"), ("b200", "NVFP4"), ("ada", "FP8")],
)
def test_each_generation_has_its_first_choice(gpu: str, scheme: str) -> None:
    best = advise(gpu).best
    assert best is not None
    assert str(best.scheme) == scheme


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_choice_is_a_row_that_serves_and_every_other_scheme_says_why_not(generation: str) -> None:
    advice = advise(generation)
    hardware = GENERATIONS[generation]
    assert {scheme.kind for scheme in map(Scheme.parse, CANDIDATES)} == set(VLLM_TABLE)
    assert len(advice.choices) + len(advice.left_out) == len(CANDIDATES)
    for choice in advice.choices:
        assert choice.row in serving(choice.scheme)
        assert (choice.row.verdict, choice.row.hardware) == ("serves", hardware)
    for left in advice.left_out:
        rows = [row for row in serving(left.scheme) if row.hardware == hardware]
        assert {row.server for row in rows} == {VLLM, SGLANG}
        assert all(row.verdict != "serves" for row in rows)
        assert rows[0].note in left.why
        assert SGLANG in left.why
    named = [name for name, _ in RULES[hardware]]
    assert [str(choice.scheme) for choice in advice.choices][: len(named)] == named, "a rule names what is not served"


def test_what_does_not_fit_comes_last_and_smaller_weights_take_its_place(small: Path) -> None:
    parts = find_parts(find_source(small), Scheme.parse("FP8"))
    token = parts.shapes.layers * 2 * parts.shapes.kv * 2
    sizes = {str(choice.scheme): choice.weight_bytes or 0 for choice in advise("h200", 1, small).choices}
    headers = sizes["FP8"] - sum(part.output_bytes for part in parts.parts)
    assert 0 < headers < 10_000, "of the safetensors file"
    room = SHARE * 2**30
    context = int((room - (sizes["FP8"] + sizes["W4A8"]) / 2) // token)
    advice = advise("h200", 1, small, context)
    by_name = {str(choice.scheme): choice for choice in advice.choices}
    assert by_name["FP8"].cache_bytes == token * context
    assert (by_name["FP8"].fits, by_name["W4A8"].fits) == (False, True)
    assert advice.best is by_name["W4A8"]
    fits = [choice.fits for choice in advice.choices]
    assert fits == sorted(fits, key=bool, reverse=True)
    context = int((room - sizes["W4A16"]) // token) + 1  # nothing fits but with a smaller cache
    advice = advise("h200", 1, small, context)
    assert advice.best is not None
    assert (str(advice.best.scheme), advice.best.cache_bytes) == ("FP8+kv8", token * context // 2)
    assert advice.best.reason.endswith("a KV cache of 8 bits makes it fit")
    assert "queries" in advice.best.row.note
    none = run(small, "--gpu", "h200", "--memory", 1, "--context", 2 * int(room // token))
    assert none.exit_code == 1
    assert none.output.startswith("nothing of ")


def test_groups_that_do_not_divide_are_left_out(small: Path) -> None:
    whys = {str(one.scheme): one.why for one in advise("h200", 24, small).left_out}
    assert {"W4A16-g128", "W4A8-g128", "FP8-block", "W4AFP8"} <= {
        name for name, why in whys.items() if "groups of 128 do not divide" in why
    }


def test_the_command_prints_reason_and_evidence_of_every_line(small: Path) -> None:
    shown = run(small, "--gpu", "h200", "--memory", 24)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0] == f"take FP8 of {small} on h200-141g ({HOPPER}, 24 GiB)"
    assert shown.output.count("   why: ") == len(advise("h200", 24, small).choices)
    assert f"(read: {EVIDENCE['read']})" in shown.output
    assert "vllm serve FOLDER --linear-backend humming" in shown.output
    record = json.loads(run("--gpu", "h200", "--json").stdout)
    assert (record["take"], record["name"], record["gib"]) == ("FP8", "h200-141g", GPUS["h200-141g"].gib)
    assert record["choices"][0]["evidence"] == "read"
    assert all(choice["reason"] and choice["fits"] is None for choice in record["choices"])


def test_a_gpu_that_nobody_knows_is_refused_with_those_that_are() -> None:
    assert run().exit_code == 2
    for name in ("h20000", "", "rtx"):
        with pytest.raises(OnPTQError, match=r"unknown --gpu .*expected one of a100-40g, .*, blackwell"):
            find_target(name, None)
    assert find_target("a100", None).gib is None
    with pytest.raises(OnPTQError, match="says no memory: expected --memory"):
        advise("a100", None, "zoo:qwen2.5-vl")


def test_another_server_is_named_beside_the_first_and_takes_its_place_where_that_one_does_not_serve() -> None:
    ada = {str(choice.scheme): choice for choice in advise("l4").choices}
    assert [row.server for row in ada["FP8"].also] == [SGLANG]
    assert ada["W4A8"].also == ()
    assert (ada["FP8-block"].row.server, ada["FP8-block"].also) == (SGLANG, ())
    shown = run("--gpu", "l4").output
    assert "   also SGLang 0.5.23, CUTLASS FP8: E4M3 x E4M3 (read)" in shown
    assert "python -m sglang.launch_server --model-path FOLDER" in shown
    (block,) = [
        one for one in json.loads(run("--gpu", "b200", "--json").stdout)["choices"] if one["scheme"] == "FP8-block"
    ]
    assert block["also"][0]["command"].endswith("--fp8-gemm-backend triton")
