"""Shards are written tensor by tensor: ordinary safetensors files, and hardly anything of them in memory."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import onptq
from onptq.checkpoint.names import LINEARS
from onptq.checkpoint.shards import NAMES, ShardWriter, header_room
from onptq.checkpoint.source import open_checkpoint
from onptq.checkpoint.write import write_checkpoint
from onptq.errors import OnPTQError
from onptq.quantizer.folded import FoldedLinear
from onptq.recipe import Recipe
from onptq.run import run_home
from onptq.schemes import Scheme

WIDTH, FFN, LAYERS, SHARDS, VOCAB = 1024, 2048, 8, 4, 8192  # 201 MB in bfloat16
SLACK = 5e6  # scratch for packing, and what an allocator keeps


def write(folder: Path, tensors: dict[str, Tensor], limit: int = 10**9) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    with ShardWriter(folder, header_room(tensors), limit) as shards:
        for name, tensor in tensors.items():
            shards.add(name, tensor)
        shards.close()
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_every_type_and_shape_comes_back_bit_for_bit_in_whatever_order_it_was_added(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (), (0,), (7,), (2, 3, 2, 1, 3), (16, 16), (1,)]
    tensors = {
        f"{name}/{number}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for number, shape in enumerate(shapes)
        for dtype, name in NAMES.items()
    }
    found = write(tmp_path / "out", tensors)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_every_tensor_lies_where_its_type_can_be_mapped(tmp_path: Path) -> None:
    odd = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(5, dtype=torch.int8), "c": torch.ones(3)}
    write(tmp_path / "out", odd | {"d": torch.ones(2, dtype=torch.int64), "é": torch.ones(4, 4)})
    data = (tmp_path / "out/model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert size % 8 == 0
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]  # no holes, which readers refuse
    assert ends[-1][1] == len(data) - 8 - size
    widths = {"BF16": 2, "I8": 1, "F32": 4, "I64": 8}
    assert all(entry["data_offsets"][0] % widths[entry["dtype"]] == 0 for entry in header.values())


def test_views_are_written_as_the_values_they_show(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    found = write(tmp_path / "out", {"columns": whole[:, 2:4], "turned": whole.t()})
    assert torch.equal(found["columns"], whole[:, 2:4])
    assert torch.equal(found["turned"], whole.t())


def test_a_tensor_larger_than_the_limit_has_a_shard_of_its_own(tmp_path: Path) -> None:
    tensors = {"small": torch.ones(2), "huge": torch.ones(100), "other": torch.ones(3)}
    assert write(tmp_path / "out", tensors, limit=16).keys() == tensors.keys()
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 420
    assert len(set(index["weight_map"].values())) == 3
    assert not list((tmp_path / "out").glob("*.partial"))


def test_types_that_the_format_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OnPTQError, match=r"z is torch.complex64, .* expected one of F64"):
        write(tmp_path / "out", {"z": torch.ones(2, dtype=torch.complex64)})


# --- a whole export -------------------------------------------------------------------------------------------------


def write_large(folder: Path) -> Path:
    """A Llama in four shards of about the same size."""
    folder.mkdir()
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    for layer in range(LAYERS):
        for name in LINEARS:
            rows, columns = FFN if "gate" in name or "up" in name else WIDTH, FFN if "down" in name else WIDTH
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH}
    (folder / "config.json").write_text(json.dumps(config))
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        mine = names[number::SHARDS]
        save_file({name: torch.randn(shapes[name]).bfloat16() for name in mine}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def folded(source: Path) -> Any:
    checkpoint = open_checkpoint(str(source)).whole
    for layer in range(LAYERS):
        for name in (f"layers.{layer}.{linear}" for linear in LINEARS):
            [(_, weight)] = checkpoint.read([f"model.{name}.weight"])
            step = weight.abs().amax(-1, keepdim=True) / 7.5
            yield name, FoldedLinear((weight / step).round().clamp(-8, 7).to(torch.int8), step, None, None)


def export(source: Path, out: Path) -> None:
    write_checkpoint(open_checkpoint(str(source)), out, folded(source), Scheme.parse("W4A16"))


def measure(source: str, out: str) -> None:
    """In a process of its own, whose high-water mark nobody else has raised."""
    from onptq.evaluate.build import measured_peak

    with measured_peak(torch.device("cpu")) as before:
        write_checkpoint_imports()
    with measured_peak(torch.device("cpu")) as peak:
        export(Path(source), Path(out))
    print(json.dumps([before.bytes, peak.bytes]))


def write_checkpoint_imports() -> None:
    """What the first export of a process imports, which is no part of what it holds."""
    import compressed_tensors.compressors.pack_quantized.helpers as helpers

    helpers.pack_to_int32(torch.zeros(8, 8, dtype=torch.int8), 4)


@pytest.mark.slow
def test_an_export_holds_little_more_than_the_shard_it_reads(tmp_path: Path) -> None:
    source = write_large(tmp_path / "source")
    script = f"import test_export_shards as t; t.measure({str(source)!r}, {str(tmp_path / 'out')!r})"
    child = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, check=False)
    assert child.returncode == 0, child.stderr.decode()
    before, peak = json.loads(child.stdout.splitlines()[-1])
    if peak is None:
        pytest.skip("this system does not tell a process's peak")
    shard = max(path.stat().st_size for path in source.glob("*.safetensors"))
    model = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    layer = 2 * (4 * WIDTH * WIDTH + 3 * FFN * WIDTH)
    held = peak - before
    sizes = {"held": held, "shard": shard, "layer": layer, "model": model}
    assert held < shard + layer + SLACK, {name: f"{size / 1e6:.0f} MB" for name, size in sizes.items()}
    assert shard + layer + SLACK < 0.5 * model  # so that holding the model would be seen
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert torch.equal(
            file.get_tensor("lm_head.weight"),
            dict(open_checkpoint(str(source)).whole.read(["lm_head.weight"]))["lm_head.weight"],
        )


class FullDisk(io.FileIO):
    """A disk that takes so many bytes and then no more."""

    left = 0

    def write(self, data: Any) -> int:
        if len(data) > FullDisk.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        FullDisk.left -= len(data)
        return super().write(data)


@pytest.mark.parametrize("room", [0, 200_000])
def test_a_disk_that_fills_up_keeps_the_run_and_the_same_command_ends_it(
    room: int, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    FullDisk.left = room
    path_open = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        return FullDisk(path, "w") if path.suffix == ".partial" else path_open(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", opened)
    recipe = Recipe.preset("risk", {"method": "rtn", "rounds": 0, "compute.device": "cpu"})
    with pytest.raises(OnPTQError, match=r"cannot write the checkpoint to .*No space left on device.*it needs"):
        onptq.quantize(small, out, recipe=recipe)
    monkeypatch.undo()
    assert list(out.iterdir()) == []
    assert (run_home(out) / "init.safetensors").is_file()
    result = onptq.quantize(small, out, recipe=recipe)
    assert result.summary["verification"]["max_abs_difference"] == 0.0
