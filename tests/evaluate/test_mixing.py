"""`onptq mix`: a mix that held-out prompts show to be worse is refused; measurements are not made twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Tiny
from typer.testing import CliRunner

from onptq.bank import States
from onptq.cli import app
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.evaluate.mixing import judge, require_no_worse
from onptq.methods.rtn import rtn
from onptq.schemes import Scheme

LOW, HIGH = "W3A16", "W8A16"
STEPS = ["--set", "data.prompts=3", "--set", "follow.max_tokens=3", "--init", "rtn", "--device", "cpu"]


@pytest.fixture(scope="module")
def states(tiny: Callable[[str], Tiny]) -> tuple[States, States]:
    """Of the low scheme and of a mix with the high one, each at its own states of three prompts."""
    policy = tiny("llama").policy(LOW)
    theta = rtn(policy)
    prefixes = Prefixes(policy, tiny("llama").encode(policy, 3), max_tokens=3)
    policy.freeze(theta, keep="floats")
    low = compare(prefixes, follow(prefixes))
    with policy.raised(theta, tuple(policy.linears), Scheme.parse(HIGH)):
        return low, compare(prefixes, follow(prefixes))


def test_a_mix_that_is_worse_beyond_chance_is_refused_and_a_better_one_is_not(states: tuple[States, States]) -> None:
    low, high = states
    better = judge(low, high, (0, 1, 2), 0)
    assert better.change.high is not None
    assert better.change.high < 0
    assert (better.start, better.mix) == (float(low.kl.mean()), float(high.kl.mean()))
    require_no_worse(better, Scheme.parse(LOW))
    with pytest.raises(
        OnPTQError, match=r"worse than W3A16 on 3 held-out prompts: KL .* instead of .*, or W3A16 as it is"
    ):
        require_no_worse(judge(high, low, (0, 1, 2), 0), Scheme.parse(LOW))
    require_no_worse(judge(low, low, (0, 1, 2), 0), Scheme.parse(LOW))


def test_one_held_out_prompt_refuses_by_its_own_kl(states: tuple[States, States]) -> None:
    low, high = (one.take(one.prompt == 1) for one in states)
    require_no_worse(judge(low, high, (1,), 0), Scheme.parse(LOW))
    with pytest.raises(OnPTQError, match="1 held-out prompts"):
        require_no_worse(judge(high, low, (1,), 0), Scheme.parse(LOW))


@pytest.mark.slow
def test_the_command_keeps_its_measurements_and_quantize_takes_the_mix(
    tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    one, out = tiny("llama"), tmp_path / "mix"
    options = ["--scheme", LOW, "--raise", HIGH, "--calibration", str(one.manifest), "--out", str(out), *STEPS]
    first = CliRunner().invoke(app, ["mix", str(one.folder), "--bits", "5", *options])
    assert first.exit_code == 0, first.output
    assert "held-out prompts, each scheme on its own answers: KL " in first.output
    assert f"onptq quantize {one.folder} --scheme {LOW} --mix {out / 'mix.json'}" in first.output
    mix = json.loads((out / "mix.json").read_text())
    assert mix["held_out"]["mix"] < mix["held_out"]["start"]
    known = json.loads((out / "kl.json").read_text())
    more = CliRunner().invoke(app, ["mix", str(one.folder), "--bits", "6", *options])
    assert more.exit_code == 0, more.output
    assert json.loads((out / "kl.json").read_text())[: len(known)] == known
    assert json.loads((out / "mix.json").read_text())["bits"] >= mix["bits"]
    plan = ["plan", str(one.folder), "--scheme", LOW, "--mix", str(out / "mix.json"), "--device", "cpu", "--json"]
    planned = CliRunner().invoke(app, plan)
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["scheme"] == json.loads((out / "mix.json").read_text())["scheme"]
    wrong = CliRunner().invoke(app, ["plan", str(one.folder), "--scheme", "W4A8", "--mix", str(out / "mix.json")])
    assert "was made for W3A16" in wrong.output
