"""A quantized model whose answers have come apart is not written, unless that is wanted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import onptq
from onptq.bank import Trajectory
from onptq.check.degenerate import Case, check_on_degenerate, degenerate, of_held_out, of_questions
from onptq.check.trial import STUCK, Answer
from onptq.errors import OnPTQError
from onptq.quantizer.modules import QuantNorm
from onptq.run import run_home

RTN = {"scheme": "W8A8", "method": "rtn", "rounds": 0, "compute.device": "cpu"}


def answer(text: str = "A cat.", tokens: tuple[int, ...] = (1, 2), finite: bool = True) -> Answer:
    return Answer("image", tokens, text, finite)


def test_most_answers_must_be_sound_where_the_dense_models_are() -> None:
    fine, broken = Case("a", None, None), Case("b", None, "an empty answer")
    both = Case("c", "an empty answer", "an empty answer")
    assert degenerate([]) is None
    assert degenerate([fine, broken, both, both]) is None
    assert degenerate([both, both]) is None
    text = degenerate([fine, broken, broken._replace(name="d"), both])
    assert text is not None
    assert text.startswith(
        "2 of 3 answers are broken where the dense model's are not; to b the quantized model gives an"
    )


def test_logits_that_are_not_finite_are_an_error_at_once() -> None:
    assert [*of_questions([answer()], [answer("")])] == [Case("the question about image", None, "an empty answer")]
    with pytest.raises(OnPTQError, match=r"gives logits that are not finite to the question about image.*--scheme"):
        list(of_questions([answer()], [answer(finite=False)]))
    list(of_questions([answer(finite=False)], [answer(finite=False)]))


def test_responses_are_faulty_where_they_are_empty_or_end_in_one_token() -> None:
    dense = [Trajectory(prompt, (5, 6, 2), True) for prompt in range(4)]
    responses = [(2,), (5, *[7] * STUCK), (*[7] * (STUCK - 1), 5), (5, *[7] * STUCK, 2)]
    quantized = [Trajectory(prompt, tokens, True) for prompt, tokens in enumerate(responses)]
    faults = [case.quantized for case in of_held_out(dense, quantized, eos=[2])]
    repeated = "one token over and over, of id 7"
    assert faults == ["an empty answer", repeated, None, repeated]


def test_only_fail_and_warn_are_known() -> None:
    with pytest.raises(OnPTQError, match="--on-degenerate is 'keep'; expected fail or warn"):
        check_on_degenerate("keep")


def test_a_model_without_logits_is_not_written(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = QuantNorm.present

    def broken(norm: QuantNorm) -> torch.Tensor:
        return present(norm) * (math.nan if norm.switch.quantized else 1)

    monkeypatch.setattr(QuantNorm, "present", broken)
    out = tmp_path / "out"
    for how in ("fail", "warn"):
        with pytest.raises(OnPTQError, match="not finite"):
            onptq.quantize(small, out, recipe=onptq.Recipe.preset("default", RTN), on_degenerate=how)
    assert not list(out.glob("*"))
    assert (run_home(out) / "init.safetensors").exists()


def test_a_broken_model_is_written_only_where_that_is_wanted(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are other ones; everything else is a run."""
    sides: list[list[Answer]] = [[answer()], [answer("", ())]]

    def ask(*_: Any) -> list[Answer]:
        sides.reverse()
        return sides[1]

    monkeypatch.setattr("onptq.pipeline.ask", ask)
    out, recipe = tmp_path / "out", onptq.Recipe.preset("default", RTN)
    with pytest.raises(OnPTQError) as caught:
        onptq.quantize(small, out, recipe=recipe, verify=False)
    text = str(caught.value)
    assert text.startswith(f"nothing was written to {out}: 1 of 1 answers are broken")
    assert f"The files of the run stay in {run_home(out)}. More bits" in text
    assert not list(out.glob("*"))
    summary = onptq.quantize(small, out, recipe=recipe, verify=False, on_degenerate="warn").summary
    assert summary["checkpoint"]["bytes"] > 0
    assert (out / "config.json").exists()
