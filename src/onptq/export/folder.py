"""The output folder: written aside and moved into place, config.json last, so a killed export never looks complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from onptq.errors import OnPTQError
from onptq.export.checkpoint import INDEX, SINGLE

MAX_SHARD_BYTES = 5 * 10**9
STAGE = ".onptq-export"  # inside the output folder, so that moving is renaming on one file system
RUN = "onptq"  # the run's own records live beside the checkpoint and are never touched
CONFIG = "config.json"
STAGED_CONFIG = CONFIG + ".staged"  # under its own name even the staging folder would look like a checkpoint

_WEIGHTS = {".safetensors", ".bin", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf"}
_NOT_COPIED = {RUN, STAGE, CONFIG, STAGED_CONFIG, "README.md", "original", ".git", ".cache", "__pycache__"} | {
    "outliers.json",  # how an embedded model was made, not what it is
    "log.jsonl",
}


@contextmanager
def staged(out: Path, needed: int) -> Iterator[Path]:
    """A fresh folder to write into; it becomes the content of `out` if the body succeeds and vanishes if it fails."""
    stage = out / STAGE
    try:
        with reported(out, needed):
            stage.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(stage, ignore_errors=True)  # left by a killed export
            _check_free(out, needed)
            stage.mkdir()
        yield stage
        with reported(out, needed):
            _publish(stage, out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def reported(out: Path, needed: int) -> Iterator[None]:
    """Turns a failed write into a message that says how much room the checkpoint wants and how much there is."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OnPTQError(
            f"cannot write the checkpoint to {out}: {error}; it needs {_size(needed)}, {_free(out)}"
        ) from error


@dataclass
class ShardWriter:
    """Collects tensors and writes a shard whenever the next one would not fit; holds at most one shard in memory."""

    stage: Path
    limit: int = MAX_SHARD_BYTES
    _pending: dict[str, Tensor] = field(default_factory=dict)
    _pending_bytes: int = 0
    _shards: list[list[str]] = field(default_factory=list)
    _total_bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self.limit:
            self._flush()
        self._pending[name] = _own(tensor)
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def close(self) -> None:
        """Gives the shards their final names, which say how many there are, and writes the index."""
        self._flush()
        count = len(self._shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE]
        for position, name in enumerate(names):
            self._path(position).rename(self.stage / name)
        if count > 1:
            weight_map = {tensor: name for name, shard in zip(names, self._shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            write_text(self.stage / INDEX, json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        path = self._path(len(self._shards))
        path.touch()
        mode = path.stat().st_mode  # as the user's umask has it; safetensors 0.8 lets only the owner read its files
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(mode)
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _path(self, position: int) -> Path:
        return self.stage / f"shard-{position}.partial"


def companions(source: Path) -> list[Path]:
    """What a source folder holds beside its weights and config: tokenizer, processor, chat template, speakers."""
    entries = (path for path in source.iterdir() if path.name not in _NOT_COPIED)
    return sorted(path for path in entries if path.is_dir() or not _is_weights(path))


def copy_companions(source: Path, stage: Path) -> None:
    for path in companions(source):
        if path.is_dir():
            # Links are followed: a hub cache stores every file as a link into its blobs.
            shutil.copytree(path, stage / path.name, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(path, stage / path.name)


def companion_bytes(source: Path) -> int:
    files = (file for path in companions(source) for file in (path.rglob("*") if path.is_dir() else (path,)))
    return sum(file.stat().st_size for file in files if file.is_file())


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _publish(stage: Path, out: Path) -> None:
    """From the first line to the last the folder has no config.json, which is what every reader looks for."""
    (out / CONFIG).unlink(missing_ok=True)
    for stale in (*out.glob("model*.safetensors"), out / INDEX):
        stale.unlink(missing_ok=True)
    for path in sorted(stage.iterdir()):
        if path.name == STAGED_CONFIG:
            continue
        target = out / path.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        os.replace(path, target)
    os.replace(stage / STAGED_CONFIG, out / CONFIG)


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS or path.name.endswith((".safetensors.index.json", ".bin.index.json"))


def _own(tensor: Tensor) -> Tensor:
    """Contiguous, on the host, and not a view that would keep a larger storage alive."""
    tensor = tensor.detach().to("cpu").contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _check_free(out: Path, needed: int) -> None:
    if shutil.disk_usage(out).free < needed:
        raise OSError(f"not enough room on the disk of {out}")


def _free(out: Path) -> str:
    existing = next(path for path in (out, *out.absolute().parents) if path.is_dir())
    return f"{_size(shutil.disk_usage(existing).free)} are free there"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
