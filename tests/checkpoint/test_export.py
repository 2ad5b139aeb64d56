"""Export: what transformers reloads is, bit for bit, what was folded; and nothing half-written ever looks complete."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onptq.check.reload import Verification, check_modules, compare_with_graph, logits_of
from onptq.checkpoint import companions as output_folder
from onptq.checkpoint.exportable import output_bytes
from onptq.checkpoint.load import load_model
from onptq.checkpoint.names import LINEARS, find_decoder, matches
from onptq.checkpoint.packing import compress_linear, storage_format
from onptq.checkpoint.provenance import Provenance
from onptq.checkpoint.source import open_checkpoint
from onptq.checkpoint.write import quantization_config, write_checkpoint
from onptq.errors import OnPTQError
from onptq.models import FAMILIES
from onptq.quantizer.folded import FoldedLinear, FoldedNorm
from onptq.schemes import Scheme

WIDTH, LAYERS = 256, 2
IMAGE, VIDEO, START, END, AUDIO = 300, 301, 302, 303, 304
NORMS = ("input_layernorm", "post_attention_layernorm")
MODELS = ("qwen2.5-vl", "qwen3-vl", "qwen2.5-omni", "qwen2.5-omni-full", "llama")
PACKED = ("W4A16", "W4A16-g128", "W4A16-asym", "W4A16-g128-asym", "W4A8", "W4A6", "W2A16", "W8A16")
SCHEMES = (*PACKED, "W8A8", "W3A8", "W5A16", "W5A16-g64-asym", "W6A6", "W16A8")
STORAGE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def family(model: str) -> SimpleNamespace:
    return FAMILIES[model.removesuffix("-full")]


def load(folder: Path, dtype: torch.dtype) -> nn.Module:
    return load_model(open_checkpoint(str(folder)), dtype)


def verify(folder: Path, inputs: list, expected: list[Tensor], *, dtype: torch.dtype, **options: Any) -> Verification:
    return compare_with_graph(load(folder, dtype), folder, inputs, expected, dtype=dtype, **options)


# --- tiny models of the real architectures --------------------------------------------------------------------------


def tiny_model(model: str) -> nn.Module:
    ids = {"vision_start_token_id": START, "vision_end_token_id": END}
    text: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 384,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
    }
    if model == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))
    if model == "qwen3-vl":
        config = transformers.Qwen3VLConfig(
            text_config=text | {"rope_parameters": rope | {"mrope_interleaved": True}},
            vision_config=vision | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            **ids,
        )
        return transformers.Qwen3VLForConditionalGeneration(config)
    text |= {"rope_parameters": rope}
    vision |= {"window_size": 112, "fullatt_block_indexes": [1]}
    if model == "qwen2.5-vl":
        config = transformers.Qwen2_5_VLConfig(
            text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, **ids
        )
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    audio = {"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio | {"output_dim": WIDTH, "num_mel_bins": 16, "n_window": 20},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_token_index=AUDIO,
        **ids,
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


def write_source(model: str, storage: str, folder: Path) -> Path:
    torch.manual_seed(0)
    tiny = tiny_model(model)
    with torch.no_grad():
        for parameter in tiny.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    tiny.to(STORAGE[storage]).save_pretrained(folder)  # type: ignore[operator]
    if model.endswith("-full"):
        nest_in_omni(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("the source's card")
    return folder


def nest_in_omni(folder: Path) -> None:
    """Rewrites a thinker as a full Omni checkpoint, with a talker that looks just like a second language model."""
    tensors = load_file(folder / "model.safetensors")
    talker = {f"talker.{name}": tensor.clone() for name, tensor in tensors.items() if name.startswith("model.")}
    full = {f"thinker.{name}": tensor for name, tensor in tensors.items()} | talker
    save_file(full | {"token2wav.conv.weight": torch.zeros(4, 4)}, folder / "model.safetensors", {"format": "pt"})
    thinker = json.loads((folder / "config.json").read_text())
    config = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": thinker}
    (folder / "config.json").write_text(json.dumps(config | {"enable_audio_output": True, "dtype": thinker["dtype"]}))
    (folder / "spk_dict.pt").write_bytes(b"speakers")


def example(model: str) -> dict[str, Tensor]:
    """A picture of 4 x 4 patches, which become four tokens, between words."""
    if model == "llama":
        return {"input_ids": torch.arange(3, 15)[None]}
    ids = torch.tensor([[5, START, *[IMAGE] * 4, END, 7, 8, 9, 10, 11]])
    patch = 16 if model == "qwen3-vl" else 14
    generator = torch.Generator().manual_seed(1)
    picture = torch.randn(16, 3 * 2 * patch * patch, generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": picture}
    inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    return inputs if "omni" in model else inputs | {"mm_token_type_ids": (ids == IMAGE).long()}


# --- naive round-to-nearest and its in-memory reference -------------------------------------------------------------


def fold(weight: Tensor, bias: Tensor | None, scheme: Scheme) -> FoldedLinear:
    outputs, inputs = weight.shape
    if not scheme.quantizes_weights:
        return FoldedLinear(weight, torch.ones(outputs, 1, dtype=weight.dtype), None, bias)
    groups = weight.float().view(outputs, -1, scheme.group_size or inputs)  # [O, G, I/G]
    low, high = -(2 ** (scheme.weight_bits - 1)), 2 ** (scheme.weight_bits - 1) - 1
    if scheme.symmetric:
        step = (groups.abs().amax(-1) / ((high - low) / 2)).to(weight.dtype)
        zero = torch.zeros_like(step)
    else:
        floor = groups.amin(-1).clamp(max=0)
        step = ((groups.amax(-1).clamp(min=0) - floor) / (high - low)).to(weight.dtype)
        zero = (low - floor / step.float()).round().clamp(low, high)
    codes = (groups / step.float()[..., None] + zero[..., None]).round().clamp(low, high).to(torch.int8)
    return FoldedLinear(codes.view(outputs, inputs), step, None if scheme.symmetric else zero.to(torch.int8), bias)


def folded_parts(
    source: Path, scheme: Scheme, ignore: tuple[str, ...]
) -> Iterator[tuple[str, FoldedLinear | FoldedNorm]]:
    """Layer by layer; norms and biases are changed too, so that the reload shows whether they were written."""
    checkpoint = open_checkpoint(str(source)).whole
    decoder = find_decoder(checkpoint.tensors, ignore)
    for layer in range(decoder.layers):
        for name in (f"layers.{layer}.{part}" for part in (*NORMS, *LINEARS)):
            keys = (f"{decoder.prefix}{name}.{suffix}" for suffix in ("weight", "bias"))
            tensors = dict(checkpoint.read([key for key in keys if key in checkpoint.tensors]))
            weight, bias = tensors[f"{decoder.prefix}{name}.weight"], tensors.get(f"{decoder.prefix}{name}.bias")
            yield (
                name,
                FoldedNorm(weight * 1.5)
                if weight.ndim == 1
                else fold(weight, None if bias is None else bias * 0.5, scheme),
            )


def dequantize(linear: FoldedLinear, dtype: torch.dtype) -> Tensor:
    outputs, inputs = linear.codes.shape
    codes = linear.codes.to(dtype).view(outputs, linear.scale.shape[1], -1)
    zero = 0 if linear.zero is None else linear.zero.to(dtype)[..., None]
    return ((codes - zero) * linear.scale.to(dtype)[..., None]).view(outputs, inputs)


def quantize_activations(bits: int) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    def hook(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        step = inputs[0].abs().amax(-1, keepdim=True) / ((2**bits - 1) / 2)
        return ((inputs[0] / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step,)

    return hook


def reference_logits(model: str, source: Path, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    dense = load(source, dtype)
    decoder = find_decoder({name for name, _ in dense.named_parameters()}, family(model).ignore)
    with torch.no_grad():
        for name, part in folded_parts(source, scheme, family(model).ignore):
            module = dense.get_submodule(decoder.prefix + name)
            if isinstance(part, FoldedNorm):
                module.get_parameter("weight").copy_(part.weight)
                continue
            module.get_parameter("weight").copy_(dequantize(part, dtype))
            if part.bias is not None:
                module.get_parameter("bias").copy_(part.bias)
            if scheme.quantizes_activations:
                module.register_forward_pre_hook(quantize_activations(scheme.activation_bits))
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in example(model).items()}
        return dense(**inputs).logits.float()


def export(model: str, source: Path, out: Path, scheme: str = "W4A8", **options: Any) -> Path:
    chosen = Scheme.parse(scheme)
    parts = options.pop("parts", None) or folded_parts(source, chosen, family(model).ignore)
    write_checkpoint(open_checkpoint(str(source)), out, parts, chosen, **options)
    return out


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("sources"), {}

    def get(model: str, storage: str = "fp32") -> Path:
        if (model, storage) not in made:
            made[model, storage] = write_source(model, storage, root / f"{model}-{storage}")
        return made[model, storage]

    return get


def looks_complete(folder: Path) -> bool:
    return any(path.name == "config.json" for path in folder.rglob("*")) if folder.exists() else False


# --- reload ---------------------------------------------------------------------------------------------------------


# Every scheme in two of the models and every model in a third of the schemes; each model sees both types of storage.
RELOADS = [
    pytest.param(model, scheme, tuple(STORAGE)[(i + j) % 2], id=f"{model}-{scheme}-{tuple(STORAGE)[(i + j) % 2]}")
    for i, model in enumerate(MODELS)
    for j, scheme in enumerate(SCHEMES)
    if (j - i) % len(MODELS) in (0, 2)
]


@pytest.mark.parametrize(("model", "scheme", "storage"), RELOADS)
def test_reload_gives_exactly_the_folded_models_logits(model, scheme, storage, sources, tmp_path):
    source, dtype = sources(model, storage), STORAGE[storage]
    out = export(model, source, tmp_path / "out", scheme)
    expected = reference_logits(model, source, Scheme.parse(scheme), dtype)
    result = verify(out, [example(model)], [expected], dtype=dtype)
    assert result.max_abs_difference == 0.0
    assert (result.argmax_agreement, result.states) == (1.0, 12)


@pytest.mark.parametrize("scheme", ["W4A8", "W8A8", "W16A8"])
def test_a_plain_from_pretrained_gives_the_same_logits(scheme, sources, tmp_path):
    source = sources("qwen2.5-vl")
    out = export("qwen2.5-vl", source, tmp_path / "out", scheme)
    model = transformers.AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(**example("qwen2.5-vl")).logits
    assert torch.equal(logits, reference_logits("qwen2.5-vl", source, Scheme.parse(scheme), torch.float32))


def test_the_logits_depend_on_the_image_the_weight_bits_and_the_activation_bits(sources, tmp_path):
    source, inputs = sources("qwen2.5-vl"), example("qwen2.5-vl")
    others = [inputs, inputs | {"pixel_values": -inputs["pixel_values"]}]
    folder = export("qwen2.5-vl", source, tmp_path / "a", "W4A8")
    first, mirrored = (logits_of(load(folder, torch.float32), one) for one in others)
    assert (first - mirrored).abs().max() > 1e-2
    for scheme in ("W4A6", "W8A8"):
        logits = logits_of(load(export("qwen2.5-vl", source, tmp_path / scheme, scheme), torch.float32), inputs)
        assert (first - logits).abs().max() > 1e-2


def test_a_scheme_that_quantizes_nothing_writes_the_folded_weights_dense(sources, tmp_path):
    source = sources("llama")
    out = export("llama", source, tmp_path / "out", "W16A16")
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    expected = reference_logits("llama", source, Scheme(16), torch.float32)
    assert verify(out, [example("llama")], [expected], dtype=torch.float32).max_abs_difference == 0.0


@pytest.mark.parametrize("model", MODELS)
def test_only_the_decoders_linears_are_quantized(model, sources, tmp_path):
    loaded = load(export(model, sources(model), tmp_path / "out"), torch.float32)
    quantized = [name for name, module in loaded.named_modules() if hasattr(module, "quantization_scheme")]
    assert len(quantized) == 7 * LAYERS
    assert not [name for name in quantized if "visual" in name or "audio" in name or "lm_head" in name]


@pytest.mark.parametrize(
    ("scheme", "message"), [("W8A8", r"missing keys.*visual"), ("W16A8", r"wrongly quantized.*visual")]
)
def test_a_quantized_tower_is_found_at_load(scheme, message, sources, tmp_path):
    out = export("qwen2.5-vl", sources("qwen2.5-vl"), tmp_path / "out", scheme)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "visual.blocks.0.attn.qkv"]  # names on disk, as others write
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(OnPTQError, match=message):
        check_modules(load(out, torch.float32), family("qwen2.5-vl").ignore)


def test_modules_outside_the_decoder_may_not_be_quantized(sources):
    model = load(sources("qwen2.5-vl"), torch.float32)
    for name, module in model.named_modules():
        if name.endswith(LINEARS) and "visual" not in name:
            module.quantization_scheme = "any"
    check_modules(model, family("qwen2.5-vl").ignore)
    model.get_submodule("model.visual.blocks.0.attn.qkv").quantization_scheme = "any"  # type: ignore[assignment]
    with pytest.raises(OnPTQError, match=r"wrongly quantized \['model.visual.blocks.0.attn.qkv'\]"):
        check_modules(model, family("qwen2.5-vl").ignore)


def test_every_linear_of_the_decoder_must_be_quantized(sources, tmp_path):
    model = load(export("qwen2.5-vl", sources("qwen2.5-vl"), tmp_path / "out"), torch.float32)
    check_modules(model, family("qwen2.5-vl").ignore)
    name = "model.language_model.layers.1.mlp.up_proj"
    del model.get_submodule(name).quantization_scheme
    with pytest.raises(OnPTQError, match=rf"wrongly quantized \[\], left out \['{name}'\]"):
        check_modules(model, family("qwen2.5-vl").ignore)


def test_padding_is_not_verified(sources, tmp_path):
    """Its logits mean nothing: here they are far from those expected, and choose other tokens."""
    source, inputs = sources("llama"), example("llama")
    out = export("llama", source, tmp_path / "out", "W4A16")
    padded = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}
    padded["attention_mask"][0, 9:] = 0
    expected = reference_logits("llama", source, Scheme(4), torch.float32)
    expected[0, 9:] = -expected[0, 9:]
    result = verify(out, [padded], [expected], dtype=torch.float32)
    assert (result.max_abs_difference, result.argmax_agreement, result.states) == (0.0, 1.0, 9)
    with pytest.raises(OnPTQError, match="differs from the folded model"):
        verify(out, [inputs], [expected], dtype=torch.float32)


def test_verify_refuses_other_logits(sources, tmp_path):
    source, inputs = sources("llama"), [example("llama")]
    out = export("llama", source, tmp_path / "out", "W4A16")
    expected = reference_logits("llama", source, Scheme(4), torch.float32)
    with pytest.raises(OnPTQError, match="differs from the folded model by"):
        verify(out, inputs, [expected + 0.1 * torch.randn_like(expected)], dtype=torch.float32)
    top = expected[0, 3].argmax()
    flipped = expected.clone()
    flipped[0, 3, top - 1] = flipped[0, 3, top] * 1.01  # less than the tolerance, but another choice
    with pytest.raises(OnPTQError, match="another token than the folded model at 1 of 12"):
        verify(out, inputs, [flipped], dtype=torch.float32, tolerance=10.0)
    with pytest.raises(OnPTQError, match=r"logits \[1, 12, 320\], expected"):
        verify(out, inputs, [expected[:, 1:]], dtype=torch.float32)


def test_verify_refuses_logits_that_are_not_finite(sources, tmp_path):
    out = export("llama", sources("llama"), tmp_path / "out", "W4A16")
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(OnPTQError, match="not finite"):
        verify(out, [example("llama")], [torch.zeros(1, 12, 320)], dtype=torch.float32)


def test_verify_refuses_a_checkpoint_with_a_missing_tensor(sources, tmp_path):
    out = export("llama", sources("llama"), tmp_path / "out", "W4A16")
    tensors = load_file(out / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_packed"]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(OnPTQError, match=r"missing keys.*up_proj"):
        verify(out, [example("llama")], [torch.zeros(1, 12, 320)], dtype=torch.float32)


# --- what is on disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "storage", "names"),
    [
        ("W8A8", "int-quantized", {"weight", "weight_scale"}),
        ("W8A16", "pack-quantized", {"weight_packed", "weight_scale", "weight_shape"}),
        ("W4A8", "pack-quantized", {"weight_packed", "weight_scale", "weight_shape"}),
        ("W4A16-g128-asym", "pack-quantized", {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"}),
        ("W3A8", "int-quantized", {"weight", "weight_scale"}),
        ("W5A16-asym", "int-quantized", {"weight", "weight_scale", "weight_zero_point"}),
        ("W16A8", "dense", {"weight"}),
    ],
)
def test_storage_of_each_width(scheme, storage, names):
    parsed = Scheme.parse(scheme)
    assert storage_format(parsed) == storage
    linear = fold(torch.randn(64, 256), None, parsed)
    tensors = compress_linear(linear, parsed)
    assert set(tensors) == names
    if storage == "pack-quantized":
        assert tensors["weight_packed"].shape == (64, 256 * parsed.weight_bits // 32)
        assert tensors["weight_packed"].dtype == torch.int32
        assert tensors["weight_shape"].tolist() == [64, 256]
    if scheme == "W4A16-g128-asym":
        assert tensors["weight_zero_point"].shape == (64 * 4 // 32, 2)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing_puts_the_first_code_into_the_lowest_bits_without_padding(bits):
    """What every version of compressed-tensors reads; the widths it reads in two ways are never packed."""
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 64), dtype=torch.int8)
    packed = compress_linear(FoldedLinear(codes, torch.ones(3, 1), None, None), Scheme(bits))["weight_packed"]
    per_word = 32 // bits
    words = [
        sum((int(code) + 2 ** (bits - 1)) << (bits * k) for k, code in enumerate(row[i : i + per_word]))
        for row in codes.tolist()
        for i in range(0, 64, per_word)
    ]
    assert [word % 2**32 for word in packed.flatten().tolist()] == words


@pytest.mark.parametrize("model", MODELS)
def test_config_is_the_sources_own_plus_the_quantization(model, sources, tmp_path):
    source = sources(model)
    original = json.loads((source / "config.json").read_text())
    written = json.loads((export(model, source, tmp_path / "out") / "config.json").read_text())
    assert list(written) == [*original, "quantization_config"]
    quantization = written.pop("quantization_config")
    if "thinker_config" in written:
        assert written["thinker_config"].pop("quantization_config") == quantization
        assert r"re:^talker\..*" in quantization["ignore"]
    assert written == original
    assert json.dumps(written) == json.dumps(original)
    assert quantization["quant_method"] == "compressed-tensors"
    assert "re:.*lm_head" in quantization["ignore"]
    assert all(pattern.startswith("re:") for pattern in quantization["ignore"])
    assert (r"re:.*visual\..*" in quantization["ignore"]) == (model != "llama")


def test_quantization_config_says_what_the_scheme_says():
    config = quantization_config(Scheme.parse("W4A6"), ["re:.*lm_head"])
    assert config is not None
    assert config["format"] == config["config_groups"]["group_0"]["format"] == "pack-quantized"
    assert config["quantization_status"] == "compressed"
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    weights, activations = (config["config_groups"]["group_0"][side] for side in ("weights", "input_activations"))
    assert (weights["num_bits"], weights["strategy"], weights["symmetric"], weights["dynamic"]) == (
        4,
        "channel",
        True,
        False,
    )
    assert (activations["num_bits"], activations["strategy"], activations["dynamic"]) == (6, "token", True)
    config = quantization_config(Scheme.parse("W4A16-g128-asym"), [])
    assert config is not None
    grouped = config["config_groups"]["group_0"]
    assert (grouped["weights"]["strategy"], grouped["weights"]["group_size"]) == ("group", 128)
    assert not grouped["weights"]["symmetric"]
    assert grouped["input_activations"] is None


def test_untouched_tensors_are_copied_bit_for_bit(sources, tmp_path):
    source = sources("qwen2.5-omni-full", "bf16")
    out = export("qwen2.5-omni-full", source, tmp_path / "out")
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    touched = tuple(f"thinker.model.layers.{layer}.{part}" for layer in range(LAYERS) for part in (*LINEARS, *NORMS))
    untouched = {name for name in before if not name.startswith(touched)}
    assert untouched == {name for name in after if not name.startswith(touched)}
    assert any(name.startswith("talker.model.layers.0.self_attn.q_proj") for name in untouched)
    for name in untouched:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name])


def test_everything_beside_the_weights_is_copied_and_a_card_is_written(sources, tmp_path):
    source, blobs = (
        tmp_path / "models--me--base-model" / "snapshots" / "0a1b",
        tmp_path / "models--me--base-model" / "blobs",
    )
    source.mkdir(parents=True)
    shutil.copytree(sources("llama"), blobs)
    for path in blobs.iterdir():
        (source / path.name).symlink_to(Path("../../blobs") / path.name)  # as a hub cache stores them
    (source / "assets").mkdir()
    (source / "assets" / "voice.pt").write_bytes(b"voice")
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"):
        (source / name).write_bytes(b"weights")
    for name in ("original", "onptq", ".git"):
        (source / name).mkdir()
        (source / name / "x").write_bytes(b"x")
    out = export("llama", source, tmp_path / "out", "W4A6", provenance=Provenance("rtn", "rtn"))
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == {
        "README.md",
        "assets/voice.pt",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert not any(path.is_symlink() for path in out.rglob("*"))
    card = (out / "README.md").read_text()
    assert card.startswith("---\nbase_model: me/base-model\n")
    assert "LlamaForCausalLM.from_pretrained" in card
    assert "Rounding to nearest (RTN)" in card
    assert "Simulation only: no server is known to run W4A6" in card
    assert str(tmp_path) not in card


def test_what_a_model_was_made_and_tried_with_stays_behind(sources, tmp_path):
    source = tmp_path / "base-model"
    shutil.copytree(sources("qwen2.5-omni-full"), source)
    made_with = ("prompts.jsonl", "media/p000.png", "log.jsonl", "outliers.json", "optimizer.pt", "trainer_state.json")
    weights = ("checkpoint-500/model.safetensors", "checkpoint-500/config.json", "onnx/decoder.onnx", "runs/events.out")
    kept = ("LICENSE", "onnx/notes.txt", "preprocessor_config.json", "merges.txt")
    for name in (*made_with, *weights, *kept):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(name.encode())
    out = export("qwen2.5-omni-full", source, tmp_path / "out")
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {
        *("README.md", "config.json", "model.safetensors", "generation_config.json"),
        *("tokenizer.json", "chat_template.jinja", "spk_dict.pt"),
        *kept,
    }
    assert (out / "spk_dict.pt").read_bytes() == b"speakers"  # no pickle: it is never opened
    assert "the source's card" not in (out / "README.md").read_text()


def test_media_without_prompts_are_the_checkpoints_own(sources, tmp_path):
    source = shutil.copytree(sources("llama"), tmp_path / "source")
    (source / "media").mkdir()
    (source / "media" / "logo.png").write_bytes(b"png")
    assert (export("llama", source, tmp_path / "out") / "media/logo.png").read_bytes() == b"png"


def test_keys_that_nobody_knows_and_their_order_survive(sources, tmp_path):
    source = shutil.copytree(sources("qwen2.5-vl"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config = {
        "zeta": {"b": [1e-06, None], "a": "é"},
        **dict(reversed(config.items())),
        "rope_scaling": {"type": "mrope"},
    }
    (source / "config.json").write_text(json.dumps(config))
    written = json.loads((export("qwen2.5-vl", source, tmp_path / "out") / "config.json").read_text())
    del written["quantization_config"]
    assert json.dumps(written) == json.dumps(config)


def test_shards_are_readable_by_whoever_may_read_the_folder(sources, tmp_path):
    previous = os.umask(0o022)
    try:
        out = export("llama", sources("llama"), tmp_path / "out")
    finally:
        os.umask(previous)
    assert {oct(path.stat().st_mode & 0o777) for path in out.iterdir() if path.is_file()} == {"0o644"}


def scatter(source: Path, folder: Path) -> Path:
    """The same checkpoint in three shards, tensors dealt out like cards and shards named against their order."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    weight_map: dict[str, str] = {}
    for i, name in enumerate(("model-c.safetensors", "model-a.safetensors", "model-b.safetensors")):
        hand = {key: tensors[key] for key in sorted(tensors, reverse=True)[i::3]}
        save_file(hand, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(hand, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_a_source_sharded_in_odd_order_gives_the_same_tensors_in_bounded_shards(sources, tmp_path):
    source = sources("qwen3-vl")
    whole = load_file(export("qwen3-vl", source, tmp_path / "whole") / "model.safetensors")
    limit = 1_000_000
    out = export("qwen3-vl", scatter(source, tmp_path / "scattered"), tmp_path / "out", max_shard_bytes=limit)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(out.glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert len(shards) > 2
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for path in shards:
        with safe_open(path, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit
        for name, tensor in tensors.items():
            assert index["weight_map"][name] == path.name
            assert torch.equal(tensor, whole[name])


def test_tied_embeddings_stay_tied(tmp_path):
    config = transformers.Qwen3Config(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=320, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "source")
    out = export("qwen3", tmp_path / "source", tmp_path / "out")
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    model = load(out, torch.float32)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_folded_linear_is_let_go_before_the_next_is_asked_for(sources, tmp_path):
    source, peak = sources("llama"), 0
    live: weakref.WeakSet[FoldedLinear] = weakref.WeakSet()

    class Tracked(FoldedLinear):
        __hash__ = object.__hash__

    def tracked():
        nonlocal peak
        for name, part in folded_parts(source, Scheme(4), ()):
            if isinstance(part, FoldedLinear):
                part = Tracked(part.codes, part.scale, part.zero, part.bias)
                peak = max(peak, len(live) + 1)
                live.add(part)
            yield name, part
            del part

    export("llama", source, tmp_path / "out", "W4A16", parts=tracked())
    assert peak == 1
    assert len(live) == 0


# --- what is refused, and what a failure leaves ---------------------------------------------------------------------


def test_decoder_is_found_by_structure():
    def stack(prefix: str, layers: int = 2) -> set[str]:
        return {f"{prefix}layers.{i}.{name}.weight" for i in range(layers) for name in LINEARS}

    tower = {"audio_tower.layers.0.self_attn.q_proj.weight", "audio_tower.layers.0.self_attn.out_proj.weight"}
    for prefix in ("", "model.", "model.language_model.", "thinker.model."):
        assert find_decoder(stack(prefix) | tower, ()).prefix == prefix
    both = stack("thinker.model.") | stack("talker.model.", 3)
    assert find_decoder(both, ["talker."]).layers == 2
    assert find_decoder(both, [r"re:^thinker\..*"]).layers == 3
    with pytest.raises(OnPTQError, match=r"more than one language model.*talker.model.layers.*thinker.model.layers"):
        find_decoder(both, ())
    with pytest.raises(
        OnPTQError, match=r"lack 6 tensors of the language model, e.g. audio_tower.layers.0.self_attn.k"
    ):
        find_decoder(tower, ())
    with pytest.raises(
        OnPTQError, match=r"lack 1 tensors of the language model, e.g. model.layers.1.mlp.up_proj.weight"
    ):
        find_decoder(stack("model.") - {"model.layers.1.mlp.up_proj.weight"}, ())
    with pytest.raises(OnPTQError, match="no language model"):
        find_decoder({name for name in stack("model.", 3) if "layers.1." not in name}, ())


def without(
    name: str, parts: Iterable[tuple[str, FoldedLinear | FoldedNorm]]
) -> Iterator[tuple[str, FoldedLinear | FoldedNorm]]:
    return ((key, part) for key, part in parts if key != name)


def test_folded_parts_must_cover_the_decoder_exactly(sources, tmp_path):
    source, out = sources("qwen2.5-vl"), tmp_path / "out"
    scheme, ignore = Scheme.parse("W4A8"), family("qwen2.5-vl").ignore
    parts = dict(folded_parts(source, scheme, ignore))
    query, down = "layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"
    linear = parts[query]
    assert isinstance(linear, FoldedLinear)

    def changed(**fields: Any) -> FoldedLinear:
        return replace(linear, **fields)

    wrong = {
        r"1 of 14 decoder linears were not folded: layers.1.mlp.down_proj": without(down, parts.items()),
        r"layers.7.mlp.up_proj was folded, but": [*parts.items(), ("layers.7.mlp.up_proj", linear)],
        r"q_proj was folded twice": [*parts.items(), (query, linear)],
        r"q_proj.weight: expected shape \[256, 256\]": (parts | {query: changed(codes=linear.codes[:, 1:])}).items(),
        r"scale of .*q_proj .*: expected shape \[256, 1\]": (parts | {query: changed(scale=linear.scale[:1])}).items(),
        r"scale of .*torch.float32.*got torch.bfloat16": (
            parts | {query: changed(scale=linear.scale.bfloat16())}
        ).items(),
        r"scale is not finite": (parts | {query: changed(scale=linear.scale * torch.nan)}).items(),
        r"int8 in -8..7.*values": (parts | {query: changed(codes=linear.codes * 2)}).items(),
        r"the source has a bias": (parts | {query: changed(bias=None)}).items(),
        r"the source has no bias": (parts | {down: fold(torch.randn(256, 384), torch.ones(256), scheme)}).items(),
        r"W4A8 has no zero point": (parts | {query: changed(zero=torch.zeros(256, 1, dtype=torch.int8))}).items(),
        r"layers.0.input_layernorm.weight: expected": (
            parts | {"layers.0.input_layernorm": FoldedNorm(torch.ones(3))}
        ).items(),
        r"norm is not a linear of the decoder": (parts | {"layers.0.input_layernorm": linear}).items(),
    }
    for message, items in wrong.items():
        with pytest.raises(OnPTQError, match=message):
            write_checkpoint(open_checkpoint(str(source)), out, items, scheme)
        assert not list(out.iterdir()), message


def test_groups_that_do_not_divide_the_columns_are_refused(sources, tmp_path):
    parts = folded_parts(sources("llama"), Scheme(4), ())
    with pytest.raises(OnPTQError, match="256 input columns, which groups of 96 do not divide"):
        export("llama", sources("llama"), tmp_path / "out", "W4A16-g96", parts=parts)


def test_other_matrices_inside_a_decoder_layer_are_refused(sources, tmp_path):
    source = scatter(sources("llama"), tmp_path / "source")
    tensors = load_file(source / "model-a.safetensors") | {"model.layers.0.mlp.router.weight": torch.zeros(4, 256)}
    save_file(tensors, source / "model-a.safetensors", {"format": "pt"})
    with pytest.raises(OnPTQError, match=r"router.weight .* none of its linears to quantize"):
        export("llama", source, tmp_path / "out")


def test_ignore_patterns_are_held_against_the_tensors(sources, tmp_path, caplog):
    folder, scheme = sources("llama"), Scheme(4)

    def write(tower: str) -> None:
        source = open_checkpoint(str(folder))
        source = replace(source, family=replace(source.family, towers=(tower,)))
        write_checkpoint(source, tmp_path / "out", folded_parts(folder, scheme, ()), scheme)

    with pytest.raises(OnPTQError, match=r"re:.\*mlp.* also matches model.layers.0.mlp.gate_proj"):
        write(".*mlp.*")
    with caplog.at_level(logging.WARNING, "onptq"):
        write(".*visual.*")
    assert "re:.*visual.* matches no tensor" in caplog.text
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["re:.*lm_head", "re:.*visual.*"], "the head is ignored in any case"


@pytest.mark.parametrize("pattern", ["visual.*", "re:visual.*", "re:.*visual", "re:.*proj$", "re:.*\\.0", "lm_head"])
def test_patterns_match_from_the_beginning_of_a_name_as_compressed_tensors_matches_them(pattern):
    from compressed_tensors.utils.match import match_name

    names = ["visual.blocks.0", "model.visual.blocks.0.q_proj", "model.visual.q_proj.bias", "lm_head", "model.lm_head"]
    assert [matches(name, pattern) for name in names] == [match_name(name, pattern) for name in names]


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("llama", {"intermediate_size": 512}, r"gate_proj.weight is \[384, 256\], config.json says \[512, 256\]"),
        ("qwen2.5-vl", {"num_key_value_heads": 1}, r"k_proj.weight is \[128, 256\], config.json says \[64, 256\]"),
        ("qwen2.5-omni-full", {"num_hidden_layers": 3}, r"there are 2 layers, config.json says 3"),
        ("qwen3-vl", {"vocab_size": 999}, r"embed_tokens.weight is \[320, 256\], config.json says \[999, 256\]"),
    ],
)
def test_a_config_that_disagrees_with_the_tensors_is_refused_before_anything_is_folded(
    model, change, message, sources, tmp_path
):
    source = shutil.copytree(sources(model), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    inner = config.get("thinker_config", config)
    inner.get("text_config", inner).update(change)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(OnPTQError, match=f"config.json and tensors disagree: .*{message}"):
        export(model, source, tmp_path / "out", parts=(pytest.fail("folded") for _ in range(1)))
    assert not (tmp_path / "out").exists()


def test_sources_that_cannot_be_read_are_named(sources, tmp_path):
    good = sources("llama")
    with pytest.raises(OnPTQError, match=r"nowhere/config.json is missing"):
        export("llama", tmp_path / "nowhere", tmp_path / "out", parts=())
    source = scatter(good, tmp_path / "source")
    shard, config = source / "model-b.safetensors", source / "config.json"
    whole, text = shard.read_bytes(), config.read_text()
    for size in (0, 5, 200, len(whole) - 1):
        shard.write_bytes(whole[:size])
        with pytest.raises(OnPTQError, match=rf"cannot read .*model-b.safetensors \({size} bytes|{size:,} bytes"):
            export("llama", source, tmp_path / "out", parts=())
    shard.unlink()
    with pytest.raises(OnPTQError, match=r"cannot read .*model-b.safetensors \(missing"):
        export("llama", source, tmp_path / "out", parts=())
    shard.write_bytes((source / "model-a.safetensors").read_bytes())
    with pytest.raises(OnPTQError, match=r"stored twice, in model-a.safetensors and model-b.safetensors"):
        export("llama", source, tmp_path / "out", parts=())
    save_file({"other": torch.zeros(2)}, shard, {"format": "pt"})
    with pytest.raises(OnPTQError, match=r"says that model-b.safetensors holds .*, but it does not"):
        export("llama", source, tmp_path / "out", parts=())
    config.write_text(text[:-5])
    with pytest.raises(OnPTQError, match="not valid JSON"):
        export("llama", source, tmp_path / "out", parts=())
    config.write_text(json.dumps(json.loads(text) | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(OnPTQError, match=r"already quantized \(gptq\)"):
        export("llama", source, tmp_path / "out", parts=())
    config.write_text(text)
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(OnPTQError, match=r"neither model.safetensors nor"):
        export("llama", source, tmp_path / "out", parts=())
    assert not (tmp_path / "out").exists()


def test_the_source_folder_is_never_written_to(sources, tmp_path):
    source = sources("llama")
    for out in (source, source / "quantized", source / ".." / source.name):
        with pytest.raises(OnPTQError, match="lies in the model folder"):
            export("llama", source, out, parts=())


def test_a_second_export_replaces_the_first_and_leaves_the_run_alone(sources, tmp_path):
    out = tmp_path / "out"
    (out / "onptq").mkdir(parents=True)
    (out / "onptq" / "recipe.yaml").write_text("kept")
    export("llama", sources("llama"), out, "W8A8", max_shard_bytes=500_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    export("llama", sources("llama"), out, "W4A16")
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    assert (out / "onptq" / "recipe.yaml").read_text() == "kept"
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_a_failing_second_export_leaves_the_first_whole(sources, tmp_path):
    out = export("llama", sources("llama"), tmp_path / "out", "W8A8")
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(OnPTQError, match="were not folded"):
        export("llama", sources("llama"), out, "W4A16", parts=iter(()))
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_write_that_fails_says_what_is_needed_and_leaves_nothing(sources, tmp_path):
    source, out = sources("llama"), tmp_path / "out"
    (out / "onptq").mkdir(parents=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))  # a real failure of write(2), as on a full disk
    try:
        with pytest.raises(
            OnPTQError, match=r"cannot write the checkpoint to .*it needs \d.* [KM]iB, \d.* GiB are free"
        ):
            export("llama", source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in out.iterdir()] == ["onptq"]


def test_a_full_disk_is_refused_before_anything_is_folded(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(OnPTQError, match=r"not enough room .* it needs \d.* [KM]iB, 976.6 KiB are free"):
        export("llama", sources("llama"), tmp_path / "out", parts=(pytest.fail("folded") for _ in range(1)))
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16-g128-asym", "W3A8", "W16A8"])
def test_the_room_asked_for_is_the_room_taken(scheme, sources, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(output_folder, "_check_free", lambda _, needed: asked.append(needed))
    out = export("qwen2.5-vl", sources("qwen2.5-vl", "bf16"), tmp_path / "out", scheme)
    taken = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert asked[0] == pytest.approx(taken, rel=0.02)


@pytest.mark.parametrize("scheme", ["W8A8", "W5A16-g32-asym", "W16A8"])
def test_the_predicted_bytes_are_those_of_the_tensors(scheme, sources, tmp_path):
    source, parsed = sources("qwen2.5-vl", "bf16"), Scheme.parse(scheme)
    out = export("qwen2.5-vl", source, tmp_path / "out", scheme)
    before, after = (sum(t.nbytes for t in load_file(path / "model.safetensors").values()) for path in (source, out))
    opened = open_checkpoint(str(source))
    header = opened.whole.weight_bytes - before
    assert output_bytes(opened, parsed) == header + after


def test_an_unwritable_destination_is_reported(sources, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OnPTQError, match=r"cannot write the checkpoint to .*file/out"):
        export("llama", sources("llama"), tmp_path / "file" / "out")


def die(source: str, out: str, moment: str) -> None:
    """Runs in a process of its own and is killed while folding or while moving files into place."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def parts():
        for count, item in enumerate(folded_parts(Path(source), Scheme(4), ())):
            if moment == "folding" and count == 12:
                kill()
            yield item

    move = os.replace

    def replace_or_die(path, target):
        if moment == "publishing" and "model-00002" in str(path):
            kill()
        move(path, target)

    output_folder.os.replace = replace_or_die  # type: ignore[assignment]
    export("llama", Path(source), Path(out), "W4A16", parts=parts(), max_shard_bytes=300_000)


def killed(source: Path, out: Path, moment: str) -> None:
    script = f"import test_export; test_export.die({str(source)!r}, {str(out)!r}, {moment!r})"
    child = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert (out / output_folder.STAGE).exists()


@pytest.mark.slow
def test_an_older_export_outlives_one_that_is_killed_while_folding(sources, tmp_path):
    source, out = sources("llama"), tmp_path / "out"
    export("llama", source, out, "W8A8")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    killed(source, out, "folding")
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    assert list((out / output_folder.STAGE).glob("*.partial"))  # half a shard, under a name that no reader knows
    assert not list((out / output_folder.STAGE).glob("*.safetensors"))
    expected = reference_logits("llama", source, Scheme.parse("W8A8"), torch.float32)
    assert verify(out, [example("llama")], [expected], dtype=torch.float32).max_abs_difference == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["folding", "publishing"])
def test_a_killed_export_never_looks_complete_and_can_be_repeated(moment, sources, tmp_path):
    source, out = sources("llama"), tmp_path / "out"
    if moment == "publishing":
        export("llama", source, out, "W8A8")  # an older export is there, and the new one is half in its place
    killed(source, out, moment)
    assert not looks_complete(out)
    export("llama", source, out, "W4A16")
    assert sorted(path.name for path in out.glob("*.safetensors*")) == ["model.safetensors"]
    assert not (out / output_folder.STAGE).exists()
    expected = reference_logits("llama", source, Scheme(4), torch.float32)
    assert verify(out, [example("llama")], [expected], dtype=torch.float32).max_abs_difference == 0.0


def test_everything_is_on_disk_before_config_json_has_its_name(sources, tmp_path, monkeypatch):
    """After a power cut there is no checkpoint, or a whole one."""
    synced: set[int] = set()
    fsync, replace = os.fsync, os.replace
    published: list[str] = []

    def spy_fsync(handle: int) -> None:
        fsync(handle)
        synced.add(os.fstat(handle).st_ino)

    def spy_replace(source: Path, target: Path) -> None:
        if Path(target).parent == out:
            assert os.stat(source).st_ino in synced, target
            published.append(Path(target).name)
            if published[-1] == "config.json":
                assert out.stat().st_ino in synced
            synced.discard(out.stat().st_ino)  # its entries change
        replace(source, target)

    out = tmp_path / "out"
    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    export("llama", sources("llama"), out, max_shard_bytes=500_000)
    assert published[-1] == "config.json"
    assert {path.name for path in out.iterdir()} == set(published)
    assert out.stat().st_ino in synced
