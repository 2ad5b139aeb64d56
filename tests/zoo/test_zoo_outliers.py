"""Outliers: the same function to the last bit, larger activations, more damage by rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MULTIMODAL, Tiny, in_turn
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from onptq.checkpoint.source import find_source
from onptq.data.manifest import load_manifest
from onptq.errors import OnPTQError
from onptq.models.decoder import Tokens
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.family import AUDIO, IMAGE, TEXT
from onptq.models.processing import PromptProcessor
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.zoo.outliers import Outliers, apply_outliers, derive
from tools.zoo.commands import application
from tools.zoo.outliers import STRENGTHS, Strengths, choose_outliers, main, measure_peaks, strengths_of

KIND = {"text": TEXT, "vision": IMAGE, "audio": AUDIO}
PLAIN = {place: replace(strengths, loudest=1.0, reach=1e9) for place, strengths in STRENGTHS.items()}


def copied(source: Path, folder: Path) -> Path:
    """The same checkpoint in a folder that may be written to."""
    return shutil.copytree(source, folder, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def spiked(
    tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Tiny, Outliers]]:
    """The family's random model, derived with outliers chosen for it."""
    made: dict[str, tuple[Tiny, Outliers]] = {}

    def get(family: str) -> tuple[Tiny, Outliers]:
        if family not in made:
            plain, out = tiny(family), tmp_path_factory.mktemp(f"{family}-outliers")
            policy = plain.policy("W16A16")
            outliers = choose_outliers(policy, plain.encode(policy, 6), PLAIN)
            marked = copied(plain.folder, tmp_path_factory.mktemp("marked"))
            outliers.write(marked / "outliers.json")
            derive(marked, out)
            source = find_source(out)
            made[family] = Tiny(out, source, PromptProcessor.from_folder(out, source.family, source.config)), outliers
        return made[family]

    return get


@torch.no_grad()
def plain_logits(folder: Path, dtype: torch.dtype) -> list[Tensor]:
    """Through transformers alone, for prompts that hold text, images and, where the family has audio, audio clips."""
    import transformers

    source = find_source(folder)
    model = getattr(transformers, source.family.model_class).from_pretrained(folder, dtype=dtype)
    processor = PromptProcessor.from_folder(folder, source.family, source.config)
    logits = []
    for prompt in load_manifest(folder / "prompts.jsonl")[:6]:
        tensors = processor(prompt).tensors
        floats = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        logits.append(model(**floats).logits)
    return logits


@torch.no_grad()
def decoded(policy: Policy, prompts: list[EncodedPrompt]) -> Tensor:
    rows = []
    for prompt in prompts:
        batch = PromptBatch.of([prompt])
        causal = torch.ones(prompt.length, prompt.length, dtype=torch.bool).tril()
        hidden = policy.run(Tokens(batch.embeds, batch.positions, causal[None, None], batch.deepstack))
        rows.append(policy.logits(hidden)[0])
    return torch.cat(rows)


@pytest.mark.parametrize(("family", "dtype"), in_turn(MULTIMODAL, [torch.float32, torch.bfloat16]))
def test_the_dense_logits_are_the_same_to_the_last_bit(
    family: str, dtype: torch.dtype, tiny: Callable[[str], Tiny], spiked: Callable[[str], tuple[Tiny, Outliers]]
) -> None:
    source, (changed, _) = tiny(family), spiked(family)
    for name in ("prompts.jsonl", "tokenizer.json", "config.json"):
        assert (changed.folder / name).read_bytes() == (source.folder / name).read_bytes()
    if not (changed.folder / "media").exists():
        shutil.copytree(source.folder / "media", changed.folder / "media")
    before, after = plain_logits(source.folder, dtype), plain_logits(changed.folder, dtype)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True] * 6


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_chosen_channels_grow_by_their_factors_and_no_other_does(
    family: str, tiny: Callable[[str], Tiny], spiked: Callable[[str], tuple[Tiny, Outliers]]
) -> None:
    source, (changed, outliers) = tiny(family), spiked(family)
    policy = source.policy("W16A16")
    prompts = source.encode(policy, 6)
    before, after = measure_peaks(policy, prompts), measure_peaks(changed.policy("W16A16"), prompts)
    for (index, producer), peaks in before.items():
        factors = torch.ones(peaks.shape[1])
        for channel, factor in outliers.blocks[index][producer].items():
            factors[channel] = factor
        assert (factors > 1).sum() == len(outliers.blocks[index][producer]) >= 2
        assert torch.equal(after[index, producer], peaks * factors)
    largest = after[0, "input_layernorm"].amax() / before[0, "input_layernorm"].amax()
    assert largest > 20


def test_a_kv_channel_is_divided_in_every_query_head_that_reads_it(tiny: Callable[[str], Tiny]) -> None:
    source = tiny("qwen2.5-vl")
    tensors = load_file(source.folder / "model.safetensors")
    outliers = Outliers(({"v_proj": {0: 16, 65: 32}},))  # kv head 0, dimension 0; kv head 1, dimension 1
    scaled = apply_outliers(tensors, outliers, source.source.config)
    block = "model.layers.0.self_attn."
    changed = {name for name in tensors if not torch.equal(tensors[name], scaled[name])}
    assert changed == {f"{block}v_proj.weight", f"{block}v_proj.bias", f"{block}o_proj.weight"}
    ratio = (scaled[f"{block}o_proj.weight"] / tensors[f"{block}o_proj.weight"]).float().nanmedian(0).values
    assert {column: 1 / value for column, value in enumerate(ratio.tolist()) if value != 1} == {
        0: 16,
        64: 16,
        2 * 64 + 1: 32,
        3 * 64 + 1: 32,
    }
    bias = (scaled[f"{block}v_proj.bias"] / tensors[f"{block}v_proj.bias"]).tolist()
    assert {row: value for row, value in enumerate(bias) if value != 1} == {0: 16, 65: 32}


def test_only_the_language_model_is_rescaled(
    tiny: Callable[[str], Tiny], spiked: Callable[[str], tuple[Tiny, Outliers]]
) -> None:
    before = load_file(tiny("qwen2.5-omni").folder / "model.safetensors")
    after = load_file(spiked("qwen2.5-omni")[0].folder / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("thinker.model.layers.") for name in changed)
    assert {name.split(".", 4)[4] for name in changed} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        "self_attn.v_proj.bias",
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-omni"])
def test_channels_are_chosen_by_what_one_kind_of_token_excites_most(
    family: str, tiny: Callable[[str], Tiny], spiked: Callable[[str], tuple[Tiny, Outliers]]
) -> None:
    source, outliers = tiny(family), spiked(family)[1]
    policy = source.policy("W16A16")
    seen: list[Tensor] = []
    policy.structure.blocks[1].child("gate_proj").register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    prompts = source.encode(policy, 6)
    decoded(policy, prompts)
    activations, kinds = torch.cat(seen).abs(), torch.cat([prompt.modality for prompt in prompts])
    has_audio = family == "qwen2.5-omni"
    peak = {
        name: activations[kinds == kind].amax(0).tolist() for name, kind in KIND.items() if has_audio or name != "audio"
    }
    picked = outliers.blocks[1]["post_attention_layernorm"]
    left = list(range(256))
    expected: dict[int, float] = {}
    for name in ("vision", "audio", "text"):
        factors = getattr(STRENGTHS["post_attention_layernorm"], name)
        if name not in peak:
            continue
        ratio = {c: peak[name][c] / max(peak[other][c] for other in peak if other != name) for c in left}
        best = sorted(left, key=lambda c: -ratio[c])[: len(factors)]
        expected |= dict(zip(best, factors, strict=True))
        left = [c for c in left if c not in best]
    assert picked == expected
    assert list(picked.values()) == list(expected.values())


def test_quiet_channels_are_taken_and_factors_kept_within_reach(tiny: Callable[[str], Tiny]) -> None:
    source = tiny("qwen2.5-vl")
    policy = source.policy("W16A16")
    prompts = source.encode(policy, 4)
    strengths = {"up_proj": Strengths(vision=(1024, 64), text=(64,), loudest=0.1, reach=8.0)}
    peaks = measure_peaks(policy, prompts)
    for block, places in enumerate(choose_outliers(policy, prompts, strengths).blocks):
        assert places.keys() == {"up_proj"}
        overall = peaks[block, "up_proj"].amax(0)
        new = {c: float(overall[c]) * factor / float(overall.median()) for c, factor in places["up_proj"].items()}
        assert all(overall[c] <= overall.quantile(0.1) for c in new)
        assert all(value <= 8 for value in new.values())
        first, second, third = new.values()
        assert first > 4
        assert min(second, third) > 4 or min(places["up_proj"].values()) == 64


def test_no_channel_is_taken_twice_and_none_that_is_too_loud(tiny: Callable[[str], Tiny]) -> None:
    source = tiny("qwen2.5-vl")
    policy = source.policy("W16A16")
    prompts = source.encode(policy, 4)
    overall = measure_peaks(policy, prompts)[0, "up_proj"].amax(0)
    quiet = set((overall <= overall.quantile(0.01)).nonzero()[:, 0].tolist())
    strengths = {"up_proj": Strengths(vision=(8,) * 4, text=(2,) * 4, loudest=0.01, reach=1e9)}
    picked = choose_outliers(policy, prompts, strengths).blocks[0]["up_proj"]
    assert picked.keys() == quiet
    assert 4 < len(quiet) < 8
    assert sorted(picked.values(), reverse=True) == [8] * 4 + [2] * (len(quiet) - 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", MULTIMODAL)
def test_rounding_does_more_damage_with_outliers(
    family: str, tiny: Callable[[str], Tiny], spiked: Callable[[str], tuple[Tiny, Outliers]]
) -> None:
    errors = []
    for checkpoint in (tiny(family), spiked(family)[0]):
        policy = checkpoint.policy("W4A8")
        prompts = tiny(family).encode(policy, 4)
        with policy.speaking("D"):
            dense = decoded(policy, prompts)
        policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme))
        with policy.speaking("Q"):
            errors.append(float((decoded(policy, prompts) - dense).square().mean()))
    assert errors[1] > 1.2 * errors[0]


def test_a_derived_folder_has_a_card_and_cannot_be_derived_from_again(
    spiked: Callable[[str], tuple[Tiny, Outliers]], tmp_path: Path
) -> None:
    folder = spiked("qwen2.5-vl")[0].folder
    assert "## Outliers" in (folder / "README.md").read_text()
    with pytest.raises(OnPTQError, match=r"cannot read .*outliers\.json"):
        derive(folder, tmp_path)


def test_outliers_are_read_as_they_were_written(tmp_path: Path) -> None:
    outliers = Outliers(({"input_layernorm": {3: 64, 1: 32}, "up_proj": {}}, {"v_proj": {7: 16}}))
    outliers.write(tmp_path / "outliers.json")
    assert Outliers.read(tmp_path / "outliers.json") == outliers
    assert json.loads((tmp_path / "outliers.json").read_text())["blocks"][1] == {"v_proj": {"7": 16}}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"blocks": [{"up_proj": {"1": 20}}]}, "block 0, up_proj: .* powers of two, got channel 1 times 20"),
        ({"blocks": [{"up_proj": {"-1": 16}}]}, "expected channels from 0 .* got channel -1 times 16"),
        (
            {"blocks": [{}, {"q_proj": {"1": 16}}]},
            "block 1: unknown producer 'q_proj'; expected one of input_layernorm",
        ),
        ({"blocks": 7}, "cannot read"),
        ([], "cannot read"),
    ],
)
def test_a_malformed_file_is_refused(content: Any, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "outliers.json").write_text(json.dumps(content))
    with pytest.raises(OnPTQError, match=complaint):
        Outliers.read(tmp_path / "outliers.json")


def test_outliers_of_another_model_are_refused(tiny: Callable[[str], Tiny]) -> None:
    source = tiny("qwen2.5-vl")
    tensors = load_file(source.folder / "model.safetensors")
    for outliers, complaint in (
        (Outliers(({}, {}, {"up_proj": {1: 16}})), r"has no model\.layers\.2\.mlp\.up_proj\.weight"),
        (Outliers(({"up_proj": {512: 16}},)), "has 512 channels; the outliers name channel 512"),
    ):
        with pytest.raises(OnPTQError, match=complaint):
            apply_outliers(tensors, outliers, source.source.config)


def test_the_command_writes_them_beside_a_model(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    source = tiny("qwen2.5-omni").folder
    folder = copied(source, tmp_path)
    arguments = [str(folder), "--prompts", str(source / "prompts.jsonl"), "--count", "6"]
    result = CliRunner().invoke(
        application(main), [*arguments, "--strength", "up_proj.vision=32", "--strength", "up_proj.reach=4"]
    )
    assert result.exit_code == 0, result.output
    outliers = Outliers.read(folder / "outliers.json")
    counts = {
        place: sum(len(getattr(strengths, kind)) for kind in ("vision", "audio", "text"))
        for place, strengths in strengths_of("qwen2.5-omni").items()
    }
    counts["up_proj"] -= len(STRENGTHS["up_proj"].vision) - 1
    assert all({place: len(channels) for place, channels in block.items()} == counts for block in outliers.blocks)
    assert f"wrote {2 * sum(counts.values())} channels in 2 blocks" in result.output
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_images_are_needed_to_choose_by(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    policy = tiny("llama").policy("W16A16")
    with pytest.raises(OnPTQError, match="expected prompts with images"):
        choose_outliers(policy, tiny("llama").encode(policy, 2))


@pytest.mark.parametrize("change", ["up_proj.smell=3", "q_proj.vision=3", "up_proj.vision=big", "up_proj.reach="])
def test_a_strength_that_does_not_exist_is_refused(change: str, tiny: Callable[[str], Tiny]) -> None:
    folder = tiny("qwen2.5-vl").folder
    arguments = [str(folder), "--prompts", str(folder / "prompts.jsonl"), "--strength", change]
    result = CliRunner().invoke(application(main), arguments)
    assert isinstance(result.exception, OnPTQError)
    assert f"--strength {change}: expected PLACE.KIND=FACTOR" in str(result.exception)
