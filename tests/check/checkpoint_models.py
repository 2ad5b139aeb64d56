"""Checkpoints to inspect: exported ones of every family, and ways to damage them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from onptq.check.inspected import open_inspected
from onptq.check.static import inspect_folder
from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import find_source
from onptq.checkpoint.write import write_checkpoint
from onptq.cli import Commands
from onptq.cli.inspect import inspect
from onptq.data.manifest import load_manifest
from onptq.methods.rtn import rtn
from onptq.models.processing import PromptProcessor
from onptq.quantizer.policy import Policy
from onptq.schemes import Scheme
from onptq.zoo.random import write_random

SIZE = {"hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 128, "vocab": 512, "image_size": 56}
IMAGE_PROMPT = 2  # a prompt with an image


class Checkpoints:
    """Dense and exported checkpoints, each written once, under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def dense(self, family: str, **options: Any) -> Path:
        name = "-".join([family, *(f"{key}{value}" for key, value in options.items())])
        folder = self.folder / name
        if not folder.exists():
            write_random(family, folder, prompts=IMAGE_PROMPT + 1, **(SIZE | options))
            if family == "qwen2.5-omni":
                (folder / "spk_dict.pt").write_bytes(b"speakers")
        return folder

    def exported(self, family: str, scheme: str, *, shard_bytes: int = 10**9, **options: Any) -> Path:
        dense = self.dense(family, **options)
        out = dense.with_name(f"{dense.name}-{scheme}-{shard_bytes}")
        if not out.exists():
            source = find_source(dense)
            model = load_model(source, torch.float32, torch.device("cpu"))
            policy = Policy(model, Scheme.parse(scheme), storage=source.storage(), eos=source.eos())
            policy.freeze(rtn(policy, ()))
            write_checkpoint(source, out, policy.folded(), policy.scheme, max_shard_bytes=shard_bytes)
        return out

    def inputs(self, family: str) -> dict[str, Tensor]:
        """A prompt with an image, as the model takes it."""
        folder = self.dense(family)
        source = find_source(folder)
        processor = PromptProcessor.from_folder(folder, source.family, source.config)
        prompt = processor(load_manifest(folder / "prompts.jsonl")[IMAGE_PROMPT])
        assert "pixel_values" in prompt.tensors
        return dict(prompt.tensors)


def copied(folder: Path, out: Path) -> Path:
    return Path(shutil.copytree(folder, out))


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content, indent=2))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint with one shard."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def exact_names(folder: Path) -> list[str]:
    """An ignore list as llm-compressor writes it: the dense linears, under their names on disk."""
    return [linear.on_disk for linear in open_inspected(folder).linears.values() if linear.storage is None]


def set_ignore(folder: Path, ignore: list[str]) -> None:
    with edited(folder / "config.json") as config:
        for part in (config, config.get("thinker_config", {})):
            if "quantization_config" in part:
                part["quantization_config"]["ignore"] = ignore


def defects(folder: Path) -> list[str]:
    return [finding.name for finding in inspect_folder(folder).defects]


def notes(folder: Path) -> list[str]:
    return [finding.name for finding in inspect_folder(folder).notes]


def what(folder: Path, name: str) -> str:
    """What the finding of that name has to say."""
    return next(finding.what for finding in inspect_folder(folder).findings if finding.name == name)


def run(*arguments: str | Path) -> Any:
    app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command("inspect")(inspect)
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])
