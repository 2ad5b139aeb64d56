"""`onptq verify` passes what is whole and names what is not; a run ends with the same checks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from conftest import MULTIMODAL, Tiny
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner, Result

import onptq
from onptq.check.examine import Examination, examine, verify_export
from onptq.check.trial import (
    Agreement,
    Answer,
    agreement,
    check_logits,
    compare_logits,
    judge_answers,
    questions,
    teacher_forced,
)
from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import find_source
from onptq.cli.verify import verify
from onptq.errors import OnPTQError
from onptq.models.processing import PromptProcessor
from onptq.recipe import Recipe
from onptq.run import run_home
from onptq.zoo.random import write_random

STATIC = ["files", "tensors", "config", "quantization", "shapes", "values"]
SHARD = "model.safetensors"
Folder = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def quantized(tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """`quantized("qwen3-vl", "W4A8")`: the family's random checkpoint after plain rounding. Not to be written to."""
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, scheme: str) -> Path:
        if (family, scheme) not in made:
            out = made[family, scheme] = tmp_path_factory.mktemp("quantized") / f"{family}-{scheme}"
            changes = {"method": "rtn", "scheme": scheme, "rounds": 0, "compute.device": "cpu"}
            onptq.quantize(tiny(family).folder, out, recipe=Recipe.preset("risk", changes))
        return made[family, scheme]

    return get


def command(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(verify)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def look(folder: Path, against: Path | None = None) -> Examination:
    return examine(folder, against, dtype=torch.float32, device=torch.device("cpu"))


def failed(found: Examination) -> dict[str, str]:
    return {check.name: check.seen for check in found.checks if not check.passed}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD, {"format": "pt"})


def reconfigure(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def broken(quantized: Folder, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a good checkpoint, to be broken."""

    def copy(family: str = "qwen2.5-vl", scheme: str = "W8A8") -> Path:
        return shutil.copytree(quantized(family, scheme), tmp_path / "broken")

    return copy


# --- what is whole --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("family", "scheme"), [*((family, "W4A8") for family in MULTIMODAL), ("llama", "W8A8")])
def test_a_good_checkpoint_passes_against_its_source(
    quantized: Folder, tiny: Callable[[str], Tiny], family: str, scheme: str
) -> None:
    found = look(quantized(family, scheme), tiny(family).folder)
    assert failed(found) == {}
    modalities = [name for name in ("image", "audio", "text") if name in tiny(family).source.family.modalities]
    names = [check.name for check in found.checks]
    assert names[: len(STATIC) + 2] == [*STATIC, "reload", "schemes"]
    assert names[len(STATIC) + 2 :] == [f"{kind}: {name}" for kind in ("logits", "question") for name in modalities]
    for one in found.agreements.values():
        assert one.correlation > 0.9
        assert one.argmax > 0.5 > one.chance
        assert 0 < one.kl < 0.5
    assert "14 modules, all in the language model" in next(
        check.seen for check in found.checks if check.name == "schemes"
    )


def test_the_command_prints_a_table_or_json_and_its_exit_code_says_it(
    quantized: Folder, tiny: Callable[[str], Tiny], broken: Callable[..., Path]
) -> None:
    good = command(quantized("qwen2.5-vl", "W8A8"), "--against", tiny("qwen2.5-vl").folder, "--device", "cpu")
    assert good.exit_code == 0, good.output
    assert "qwen2.5-vl-W8A8: all 12 checks passed" in good.output
    assert "FAIL" not in good.output
    folder = broken()
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    bad = command(folder, "--json")
    assert bad.exit_code == 1
    told = json.loads(bad.output)
    assert told["passed"] is False
    [wrong] = [check for check in told["checks"] if not check["passed"] and check["name"] == "files"]
    assert "chat_template.jinja" in wrong["seen"]
    assert "FAIL" in command(folder).output


def test_a_dense_checkpoint_can_be_looked_at_too(tiny: Callable[[str], Tiny]) -> None:
    found = look(tiny("qwen3-vl").folder)
    assert failed(found) == {}
    assert "no module carries" in next(check.seen for check in found.checks if check.name == "schemes")
    assert found.agreements == {}


def test_a_run_ends_with_the_same_checks(quantized: Folder) -> None:
    summary = json.loads((run_home(quantized("qwen2.5-omni", "W4A8")) / "summary.json").read_text())
    checks = summary["verification"]["checks"]
    modalities = [f"question: {name}" for name in ("image", "audio", "text")]
    assert [check["name"] for check in checks] == [*STATIC, "schemes", *modalities]
    assert all(check["passed"] for check in checks)
    assert summary["verification"]["max_abs_difference"] == 0.0


# --- what is not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("tokenizer.json or vocab.json", ["tokenizer.json", "tokenizer_config.json"]),
        ("preprocessor_config.json or processor_config.json", ["preprocessor_config.json"]),
    ],
)
def test_missing_companions_are_named(broken: Callable[..., Path], name: str, files: list[str]) -> None:
    folder = broken()
    for file in files:
        (folder / file).unlink()
    wrong = failed(look(folder))
    assert name in wrong["files"]
    assert "processor" in wrong


@pytest.mark.slow
def test_what_only_the_source_has_is_missing_and_what_neither_has_is_not(
    broken: Callable[..., Path], tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    folder, source = broken("qwen2.5-omni", "W4A8"), tiny("qwen2.5-omni").folder
    assert failed(look(folder)) == {"files": "missing-speakers: no spk_dict.pt"}  # its config says that it speaks
    assert failed(look(folder, source)) == {}
    (folder / "generation_config.json").unlink()
    assert failed(look(folder, source)) == {
        "files": "missing-generation-config: no generation_config.json; missing-speakers, as in the source"
    }


@pytest.mark.parametrize(
    ("size", "name"), [(0, "unreadable-shard"), (100, "unreadable-shard"), (-1000, "truncated-shard")]
)
def test_truncated_shards_are_found(broken: Callable[..., Path], size: int, name: str) -> None:
    folder = broken()
    whole = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(whole[:size])
    found = look(folder)
    assert list(failed(found)) == ["tensors"]
    assert failed(found)["tensors"].startswith(f"{name}: ")
    assert [check.name for check in found.checks] == ["files", "tensors"]


def test_corrupted_headers_are_found(broken: Callable[..., Path]) -> None:
    folder = broken()
    data = bytearray((folder / SHARD).read_bytes())
    data[12:40] = b"\xff" * 28
    (folder / SHARD).write_bytes(bytes(data))
    assert "cannot read" in failed(look(folder))["tensors"]


def test_scales_that_are_not_finite_are_found(broken: Callable[..., Path]) -> None:
    folder = broken()
    key = "model.layers.1.mlp.up_proj.weight_scale"
    rewrite(folder, lambda tensors: tensors[key].__setitem__((3, 0), torch.nan))
    wrong = failed(look(folder))
    assert wrong["values"] == f"scales-not-finite: 1 scale tensors hold NaN or infinity: {key}"
    assert wrong["logits: image"].startswith("not finite at")
    assert wrong["question: text"] == "gives logits that are not finite"


@pytest.mark.parametrize("scheme", ["W8A8", "W4A8"])
def test_a_config_whose_shapes_disagree_with_the_tensors_is_found(broken: Callable[..., Path], scheme: str) -> None:
    folder = broken(scheme=scheme)

    def widen(config: dict[str, Any]) -> None:
        config.get("text_config", config)["intermediate_size"] += 64

    reconfigure(folder, widen)
    wrong = failed(look(folder))
    assert "mlp.gate_proj.weight" in wrong["shapes"]
    assert "[576, " in wrong["shapes"]
    looks = Version(transformers.__version__) >= Version(
        "5.23"
    )  # before, it takes whatever size the packed weights have
    assert list(wrong) == (["shapes", "reload"] if looks else ["shapes"])


def test_a_tower_that_transformers_takes_for_quantized_is_found(broken: Callable[..., Path]) -> None:
    folder = broken()
    exact = ["lm_head", *(f"visual.blocks.{block}.attn.{name}" for block in range(2) for name in ("qkv", "proj"))]
    reconfigure(folder, lambda config: config["quantization_config"].update(ignore=exact))  # names as they are on disk
    wrong = failed(look(folder))
    assert list(wrong) == ["quantization", "reload"]  # loaded with the towers dense, the rest of it is sound
    assert wrong["quantization"].startswith("ignored-under-other-names: ")
    assert "visual" in wrong["reload"]
    assert "the ignore list does not name them as transformers does" in wrong["reload"]


def test_activations_quantized_in_a_tower_are_found(broken: Callable[..., Path]) -> None:
    """Nothing is missing on disk for those: only the modules tell."""
    folder = broken()

    def spread(config: dict[str, Any]) -> None:
        quantization = config["quantization_config"]
        only = json.loads(json.dumps(quantization["config_groups"]["group_0"]))
        only |= {"targets": [r"re:.*visual\..*qkv"], "weights": None, "format": "dense"}
        quantization["config_groups"]["group_1"] = only
        quantization["ignore"] = [
            "re:.*lm_head",
            *(rf"re:.*visual\..*{name}$" for name in ("proj", r"mlp\.\d", "fc\\d")),
        ]

    reconfigure(folder, spread)
    wrong = failed(look(folder))
    assert "modules outside the language model carry one: model.visual.blocks.0.attn.qkv" in wrong["schemes"]


def test_ignore_patterns_that_match_nothing_are_found(broken: Callable[..., Path]) -> None:
    folder = broken()
    reconfigure(folder, lambda config: config["quantization_config"]["ignore"].append(r"re:.*vision_tower\..*"))
    wrong = failed(look(folder))
    assert list(wrong) == ["quantization"]
    assert wrong["quantization"].startswith("ignore-matches-nothing: 1 ignore patterns")
    assert wrong["quantization"].endswith(r": re:.*vision_tower\..*")


def test_a_model_that_has_nothing_to_do_with_the_dense_one_fails(
    broken: Callable[..., Path], tiny: Callable[[str], Tiny]
) -> None:
    folder = broken()

    def shuffle(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][torch.randperm(len(tensors["lm_head.weight"]))].clone()

    rewrite(folder, shuffle)
    found = look(folder, tiny("qwen2.5-vl").folder)
    assert {name for name in failed(found) if name.startswith("logits")} == {"logits: image", "logits: text"}
    assert "unrelated to the dense model's" in failed(found)["logits: image"]
    assert all(abs(one.correlation) < 0.1 for one in found.agreements.values())


def test_flat_logits_and_one_token_over_and_over_are_found(broken: Callable[..., Path]) -> None:
    folder = broken()
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].zero_())
    wrong = failed(look(folder))
    assert wrong["logits: text"] == "flat: every token is as likely"
    assert wrong["question: image"].startswith(("gives one token over and over", "gives an empty answer"))


def test_a_model_of_another_family_is_no_dense_model_of_it(quantized: Folder, tiny: Callable[[str], Tiny]) -> None:
    with pytest.raises(OnPTQError, match=r"is a qwen3-vl model, .* a qwen2.5-vl model"):
        look(quantized("qwen2.5-vl", "W8A8"), tiny("qwen3-vl").folder)


def test_a_run_refuses_to_end_with_a_folder_that_lacks_a_file(
    broken: Callable[..., Path], tiny: Callable[[str], Tiny]
) -> None:
    folder, source = broken(), tiny("qwen2.5-vl").source
    (folder / "preprocessor_config.json").unlink()
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(OnPTQError, match=r"files: missing-processor: no preprocessor_config.json"):
        verify_export(folder, source, tiny("qwen2.5-vl").processor, [], [], [], **options)


# --- judgement ------------------------------------------------------------------------------------------------------


def said(*tokens: int, text: str = "words", finite: bool = True) -> Answer:
    return Answer("text", tokens, text, finite)


def test_degenerate_answers_are_told_from_short_and_repetitive_ones() -> None:
    assert said(5).fault is None
    assert said(*[5] * 7).fault is None
    assert said(*[5, 6] * 8).fault is None
    assert "over and over" in str(said(1, 2, 3, *[5] * 8).fault)
    assert said(text="  ").fault == "an empty answer"
    assert said(5, finite=False).fault == "logits that are not finite"


def test_what_the_dense_model_does_too_is_excused_but_never_nan() -> None:
    empty, nan = said(text=""), said(5, finite=False)
    assert not judge_answers([empty])[0].passed
    assert not judge_answers([empty], [said(5)])[0].passed
    [excused] = judge_answers([empty], [said(text="")])
    assert excused.passed
    assert "so does the dense model" in excused.seen
    assert not judge_answers([nan], [nan])[0].passed
    assert not judge_answers([nan], [empty])[0].passed, "another fault of the dense model's"
    assert not judge_answers([empty], [nan])[0].passed, "NaN of the dense model excuses nothing"


def test_agreement_is_what_a_plain_computation_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(20, 50, generator=generator)
    other = dense + 0.3 * torch.randn(20, 50, generator=generator)
    found = agreement(dense, other)
    p, q = dense.double().softmax(-1), other.double().softmax(-1)
    assert found.kl == pytest.approx((p * (p / q).log()).sum(-1).mean().item())
    assert found.argmax == (dense.argmax(-1) == other.argmax(-1)).float().mean().item()
    assert not found.broken
    shifted = agreement(dense, other + 7)  # a constant changes nothing
    assert shifted.correlation == pytest.approx(found.correlation)
    unrelated = agreement(dense, torch.randn(20, 50, generator=generator))
    assert unrelated.broken
    prior = 10 * torch.randn(1, 50, generator=generator)  # words that both prefer everywhere are no agreement
    assert agreement(dense + prior, torch.randn(20, 50, generator=generator) + prior).broken
    assert agreement(dense, prior.expand(20, 50)).broken


@pytest.mark.parametrize(
    ("correlation", "argmax", "chance", "broken"),
    [
        (0.9, 0.9, 0.1, False),
        (0.24, 0.9, 0.1, True),
        (float("nan"), 0.9, 0.1, True),
        (0.9, 0.1, 0.1, True),
        (0.9, 0.05, 0.1, True),
        (0.9, 0.6, 0.7, False),
    ],
    ids=["alike", "unrelated", "nan", "by chance", "less than by chance", "one choice nearly everywhere"],
)
def test_agreement_needs_a_correlation_and_more_equal_choices_than_chance_gives(
    correlation: float, argmax: float, chance: float, broken: bool
) -> None:
    assert Agreement(9, correlation, 0.1, argmax, chance).broken == broken


def test_logits_that_say_nothing_are_refused() -> None:
    varied = torch.randn(4, 9)
    assert check_logits("text", varied).passed
    assert check_logits("text", varied[:1].expand(4, 9)).seen == "the same at every state"
    assert check_logits("text", torch.ones(4, 9)).seen.startswith("flat")
    check, found = compare_logits("text", torch.randn(4, 10), varied)
    assert (check.passed, found) == (False, None)
    assert "[4, 9] against the dense model's [4, 10]" in check.seen


def test_teacher_forcing_reads_the_text_positions_of_prompt_and_answer(tiny: Callable[[str], Tiny]) -> None:
    one = tiny("qwen2.5-vl")
    model = load_model(one.source, torch.float32)
    inputs = questions(one.processor)[0].inputs
    pictures = int((inputs.modality == 1).sum())
    assert pictures > 0
    alone, answered = (teacher_forced(model, inputs, answer) for answer in ((), (7, 8, 9)))
    assert len(alone) == inputs.length - pictures
    assert len(answered) == len(alone) + 3
    assert torch.allclose(alone, answered[: len(alone)], atol=1e-4)  # what comes later is not seen


def test_an_omni_model_that_speaks_needs_its_speakers(tmp_path: Path) -> None:
    folder = write_random("qwen2.5-omni", tmp_path / "omni", prompts=1)
    source = find_source(folder)
    PromptProcessor.from_folder(folder, source.family, source.config)
    assert failed(look(folder)) == {"files": "missing-speakers: no spk_dict.pt"}
    (folder / "spk_dict.pt").write_bytes(b"not a pickle")  # and nobody opens it
    assert failed(look(folder)) == {}
