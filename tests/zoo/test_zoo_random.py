from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES as NAMES
from conftest import MULTIMODAL, Tiny, in_turn
from torch import Tensor, nn

from onptq.data.manifest import load_manifest
from onptq.errors import OnPTQError
from onptq.models import family_of
from onptq.models.processing import ModelInputs, PromptProcessor
from onptq.registry import FAMILIES
from onptq.zoo.random import write_random


def load(folder: Path, **options: Any) -> Any:
    import transformers

    config = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, family_of(config).model_class)
    return model_class.from_pretrained(str(folder), dtype=torch.float32, **options)


def inputs_of(folder: Path) -> list[ModelInputs]:
    config = json.loads((folder / "config.json").read_text())
    processor = PromptProcessor.from_folder(folder, family_of(config), config)
    return [processor(prompt) for prompt in load_manifest(folder / "prompts.jsonl")]


@torch.no_grad()
def respond(model: Any, inputs: ModelInputs, tokens: int = 16) -> Tensor:
    out = model.generate(**inputs.tensors, max_new_tokens=tokens, do_sample=False)
    return out[0, inputs.length :]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(("family", "tie"), in_turn(NAMES, [False, True]))
def test_transformers_loads_every_weight_and_misses_none(family: str, tie: bool, tmp_path: Path) -> None:
    write_random(family, tmp_path, prompts=1, tie=tie)
    model, report = load(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    others = FAMILIES[family].other_models
    assert all(others and key.startswith(others) for key in report["unexpected_keys"])
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tie


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_responses_are_finite_and_vary_and_seldom_end_early(family: str, tiny: Callable[[str], Tiny]) -> None:
    folder = tiny(family).folder
    model, prompts = load(folder), inputs_of(folder)
    kinds = {kind for inputs in prompts for kind in inputs.modality.unique().tolist()}
    assert kinds == {{"text": 0, "image": 1, "audio": 2}[name] for name in FAMILIES[family].modalities}
    with torch.no_grad():
        assert all(torch.isfinite(model(**inputs.tensors).logits).all() for inputs in prompts)
    responses = [respond(model, inputs) for inputs in prompts[:6]]
    assert sum(len(response) == 16 for response in responses) >= 4
    assert all(len(response.unique()) > len(response) / 2 for response in responses)
    assert len({tuple(response.tolist()) for response in responses}) == 6
    banned = torch.tensor(list(tiny(family).processor.placeholders.values()))
    assert not torch.isin(torch.cat(responses), banned).any()


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_rounding_to_four_bits_changes_some_decisions_but_not_most(family: str, tiny: Callable[[str], Tiny]) -> None:
    folder = tiny(family).folder
    model, prompts = load(folder), inputs_of(folder)[:6]

    @torch.no_grad()
    def decisions() -> Tensor:
        return torch.cat([model(**inputs.tensors).logits[0].argmax(-1) for inputs in prompts])

    dense = decisions()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name and "tower" not in name:
            step = module.weight.data.abs().amax(1, keepdim=True) / 7.5
            module.weight.data = (module.weight.data / step).round().clamp(-8, 7) * step
    flipped = (decisions() != dense).float().mean()
    assert 0.03 < flipped < 0.4


@pytest.mark.parametrize("family", MULTIMODAL)
def test_images_and_audio_change_the_logits(family: str, tiny: Callable[[str], Tiny]) -> None:
    folder = tiny(family).folder
    model, prompts = load(folder), inputs_of(folder)
    for name in ("pixel_values", "input_features"):
        for inputs in [inputs for inputs in prompts if name in inputs.tensors][:2]:
            with torch.no_grad():
                seen = model(**inputs.tensors).logits[0, -1]
                other = model(**inputs.tensors | {name: inputs.tensors[name].flip(-1)}).logits[0, -1]
            assert (seen - other).std() > 0.02 * seen.std()


@pytest.mark.parametrize("family", ["qwen2.5-omni", "llama"])
def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(family: str, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_random(family, tmp_path / name, prompts=4, seed=seed)
    first, again, other = (digests(tmp_path / name) for name in ("a", "b", "c"))
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["prompts.jsonl"] != other["prompts.jsonl"]
    assert first["tokenizer.json"] == other["tokenizer.json"]


def test_images_differ_in_size_and_some_prompts_have_two(tiny: Callable[[str], Tiny]) -> None:
    grids = [inputs.tensors.get("image_grid_thw") for inputs in inputs_of(tiny("qwen2.5-vl").folder)]
    assert {len(grid) for grid in grids if grid is not None} == {1, 2}
    assert any(grid is None for grid in grids)
    assert len({tuple(row) for grid in grids if grid is not None for row in grid.tolist()}) > 5


def test_outliers_change_the_activations_and_not_the_function(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"prompts": 1, "dtype": "float32"}
    plain = load(write_random("qwen2.5-omni", tmp_path / "plain", **shape))
    spiked = load(write_random("qwen2.5-omni", tmp_path / "spiked", outliers=20.0, **shape))
    (inputs,) = inputs_of(tmp_path / "plain")
    seen: dict[Any, float] = {}
    for model in (plain, spiked):
        (first, *_) = [module for name, module in model.named_modules() if name.endswith("layers.0.input_layernorm")]
        first.register_forward_hook(lambda _, __, out, model=model: seen.update({model: float(out.abs().max())}))
    with torch.no_grad():
        torch.testing.assert_close(
            spiked(**inputs.tensors).logits, plain(**inputs.tensors).logits, atol=1e-3, rtol=1e-3
        )
    assert seen[spiked] > 5 * seen[plain]


def test_a_vocabulary_larger_than_the_tokenizer_and_wider_heads_work(tmp_path: Path) -> None:
    write_random("qwen3-vl", tmp_path, prompts=2, vocab=3000, layers=3, heads=2, kv_heads=1)
    model, inputs = load(tmp_path), inputs_of(tmp_path)[0]
    assert model.config.text_config.head_dim == 128
    assert respond(model, inputs, 4).numel() > 0
    assert model.get_output_embeddings().weight.shape == (3000, 256)


@pytest.mark.parametrize("family", NAMES)
def test_two_tokens_can_end_a_response(family: str, tiny: Callable[[str], Tiny]) -> None:
    checkpoint = tiny(family)
    stops = json.loads((checkpoint.folder / "generation_config.json").read_text())["eos_token_id"]
    assert len(stops) == 2
    assert checkpoint.processor.tokenizer.eos_token_id == stops[0]
    head = load(checkpoint.folder).get_output_embeddings().weight
    assert (head[stops].norm(dim=1) > 1).all()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"family": "gpt"}, "no random model of 'gpt' can be written: expected one of qwen2.5-vl"),
        ({"hidden": 250}, "hidden 250"),
        ({"kv_heads": 3}, "3 KV heads"),
        ({"vocab": 200}, "vocab 200: expected at least 263"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_written(
    options: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    request: dict[str, Any] = {"family": "qwen2", "folder": tmp_path / "new"} | options
    with pytest.raises(OnPTQError, match=complaint):
        write_random(**request)
    assert not (tmp_path / "new").exists()
