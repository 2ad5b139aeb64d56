"""What is read off a checkpoint before and while it is loaded, and where it is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Tiny
from safetensors.torch import load_file, save_file

from onptq.checkpoint import source as loading
from onptq.checkpoint.source import choose_device, choose_dtype, find_source
from onptq.errors import OnPTQError

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny: Callable[[str], Tiny], tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama").folder, folder)
    return folder


def test_a_cpu_computes_in_float32_unless_asked_otherwise() -> None:
    assert choose_dtype("auto", CPU) == torch.float32
    assert choose_dtype("float32", CPU) == torch.float32


def test_a_cpu_that_refuses_16_bit_products_falls_back_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear
    notes: list[str] = []

    def refuse(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bfloat16:
            raise RuntimeError("could not create a primitive")
        return linear(x, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", refuse)
    assert choose_dtype("bfloat16", CPU, notes.append) == torch.float32
    assert len(notes) == 1
    assert "could not create a primitive" in notes[0]
    assert "float32" in notes[0]


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    if torch.cuda.is_available():
        assert choose_device("auto").type == "cuda"
    else:
        assert choose_device("auto") == CPU
        with pytest.raises(OnPTQError, match="no usable GPU"):
            choose_device("cuda:0")


def test_the_storage_dtype_is_that_of_most_weights_not_of_most_tensors(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    assert find_source(model).storage() == torch.bfloat16
    small = {name: tensor.float() if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}
    save_file(small, model / "model.safetensors", {"format": "pt"})
    assert find_source(model).storage() == torch.bfloat16
    save_file({name: tensor.float() for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    assert find_source(model).storage() == torch.float32


def test_tokens_that_end_a_response_come_from_the_generation_config_first(model: Path) -> None:
    assert len(find_source(model).eos()) == 2
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert find_source(model).eos() == (7,)
    (model / "generation_config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": [3, 4]}))
    assert find_source(model).eos() == (3, 4)


def test_the_hash_follows_everything_that_decides_what_the_model_computes(model: Path) -> None:
    before = find_source(model).sha256()
    (model / "notes.md").write_text("nothing that is read")
    assert find_source(model).sha256() == before
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        path = model / name
        whole = path.read_text()
        path.write_text(whole + " ")
        assert find_source(model).sha256() != before
        path.write_text(whole)
    assert find_source(model).sha256() == before


@pytest.mark.slow
def test_large_files_are_hashed_in_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = find_source(model).sha256()
    monkeypatch.setattr(loading, "PART", 64)
    monkeypatch.setattr(loading, "BLOCK", 16)
    source = find_source(model)
    done: list[int] = []
    before = source.sha256(done.append)
    assert before not in (whole, "")
    assert before == source.sha256()
    assert sum(done) == len(source.files) < len(done)
    shard = source.shards[0]
    values = shard.read_bytes()
    at = len(values) // 64 * 64 - 64
    for changed in (
        values[:at] + bytes([values[at] ^ 1]) + values[at + 1 :],  # a bit
        values[64:128] + values[:64] + values[128:],  # the order of parts
        values[:-1],
    ):
        shard.write_bytes(changed)
        assert source.sha256() != before
    shard.write_bytes(values)
    assert source.sha256() == before
