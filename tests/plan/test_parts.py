"""What a run quantizes and copies, read from headers alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from conftest import FAMILIES, Tiny
from plan_models import GIB, QWEN3_VL_30B_A3B, write_mixture, write_sparse
from safetensors.torch import load_file, save_file

import onptq
from onptq.checkpoint.exportable import check_exportable
from onptq.checkpoint.source import find_source
from onptq.models.experts import linearize
from onptq.models.structure import find_structure
from onptq.plan.parts import AUDIO, EMBEDDINGS, LINEARS, OTHER_MODELS, VISION, Part, Parts, find_parts
from onptq.quantizer.theta import Theta, log_scales_in, log_scales_out
from onptq.quantizer.weights import smoothed
from onptq.recipe import Recipe
from onptq.schemes import Scheme


def parts_of(folder: Path, scheme: str = "W4A8") -> Parts:
    return find_parts(find_source(folder), Scheme.parse(scheme))


def by_name(parts: Parts) -> Mapping[str, Part]:
    return {part.name: part for part in parts.parts}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_decoders_linears_are_quantized_in_every_family(tiny: Callable[[str], Tiny], family: str) -> None:
    folder = tiny(family).folder
    parts = parts_of(folder)
    named, tensors = by_name(parts), load_file(folder / "model.safetensors")
    assert [name for name, part in named.items() if part.quantized] == [LINEARS]
    assert named[LINEARS].modules == 7 * 2
    assert sum(part.bytes for part in parts.parts) == sum(tensor.nbytes for tensor in tensors.values())
    assert (VISION in named) == any("visual." in name for name in tensors)
    assert (AUDIO in named) == any("audio_tower." in name for name in tensors)
    assert (OTHER_MODELS in named) == any(name.startswith("talker.") for name in tensors)
    assert named[LINEARS].output_bytes < 0.3 * named[LINEARS].bytes
    assert not parts.unmatched
    others = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith(("talker.", "token2wav.")))
    assert parts.shapes.loaded == sum(tensor.numel() for tensor in tensors.values()) - others
    assert bool(others) == (family == "qwen2.5-omni"), "Omni's speaking models are in the folder, but not loaded"


@pytest.mark.parametrize("scheme", ["W4A8", "W8A8", "W4A16-g32-asym", "NVFP4"])
def test_the_output_is_as_large_as_said(small: Path, tmp_path: Path, scheme: str) -> None:
    out = tmp_path / "out"
    onptq.quantize(small, out, recipe=Recipe.preset("default", {"scheme": scheme, "method": "rtn"}), verify=False)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert parts_of(small, scheme).output_bytes == pytest.approx(written, rel=0.1)


def test_a_7b_model_is_read_from_its_headers_alone(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    seven = write_sparse(tmp_path, "qwen2.5-vl-7b", tiny("qwen2.5-vl").folder)
    shards = list(seven.glob("*.safetensors"))
    assert sum(shard.stat().st_size for shard in shards) > 15 * GIB
    assert sum(shard.stat().st_blocks * 512 for shard in shards) < 2**20
    began = time.monotonic()
    parts = parts_of(seven)
    assert time.monotonic() - began < 5
    named = by_name(parts)
    assert named[LINEARS].parameters == 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 18944 * 3584) + 28 * (3584 + 2 * 512)
    assert named[EMBEDDINGS].parameters == 2 * 152064 * 3584
    assert (parts.decoder.prefix, parts.decoder.layers) == ("model.", 28)
    assert 5.5 * GIB < parts.output_bytes < 7 * GIB


def test_a_tower_pattern_that_matches_nothing_is_named(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    source = tiny("qwen2.5-omni").folder
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if "audio_tower." not in name}
    save_file(without, tmp_path / "model.safetensors")
    parts = parts_of(tmp_path)
    assert parts.unmatched == (r"re:.*audio_tower\..*",)
    assert AUDIO not in by_name(parts)


def test_a_thinker_alone_misses_no_pattern_of_the_other_models(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    source = tiny("qwen2.5-omni").folder
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    thinker = {key: value for key, value in tensors.items() if key.startswith("thinker.")}
    save_file(thinker, tmp_path / "model.safetensors")
    parts = parts_of(tmp_path)
    assert parts.unmatched == ()
    assert OTHER_MODELS not in by_name(parts)


@pytest.mark.slow
def test_a_mixture_of_experts_is_read_from_its_headers_and_fits_its_class(tmp_path: Path) -> None:
    """Qwen3-VL-30B-A3B, whose experts are stored in two tensors a layer."""
    source, scheme = find_source(write_mixture(tmp_path)), Scheme.parse("W4A16-g128")
    parts = find_parts(source, scheme)
    expert, attention = 3 * 768 * 2048, 2 * 2048 * (4096 + 512)
    linears = next(part for part in parts.parts if part.quantized)
    assert linears.name == LINEARS
    assert (linears.modules, linears.parameters) == (48 * (4 + 3 * 128), 48 * (128 * expert + attention))
    assert linears.output_bytes < 0.27 * linears.bytes
    shapes = parts.shapes
    assert (shapes.active, shapes.block) == (8 * expert + attention, 128 * expert + attention)
    assert (shapes.ffn, shapes.query, shapes.kv, shapes.hidden, shapes.modules) == (8 * 768, 4096, 512, 2048, 388)
    check_exportable(source)
    with torch.device("meta"):
        model = linearize(
            transformers.Qwen3VLMoeForConditionalGeneration(transformers.Qwen3VLMoeConfig.from_dict(QWEN3_VL_30B_A3B))
        )
    structure = find_structure(model)
    theta = Theta.rtn(structure.blocks, scheme, "meta")
    for block in (structure.blocks[0], structure.blocks[-1]):
        assert len(block.producers) == 3 + 128
        for name in (*block.linears, *block.followers("norm_gate_up")):
            weight = block.child(name).weight
            folded = smoothed(weight, log_scales_in(theta, block, name), log_scales_out(theta, block, name))  # type: ignore[arg-type]
            stored = source.whole.tensors[f"{source.decoder.prefix}{block.path(name)}.weight"]
            assert folded.shape == weight.shape == stored.shape  # type: ignore[union-attr]
