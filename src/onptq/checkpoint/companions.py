"""The output folder and the files beside the weights.

A checkpoint is written aside and moved into place, config.json last, so a killed export never looks complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onptq.checkpoint.folder import CONFIG, INDEX
from onptq.errors import OnPTQError
from onptq.files import lies_inside, size, sync

STAGE = ".onptq-export"  # inside the output folder, so that moving is renaming on one file system
RUN = "onptq"  # where runs of contract 1 have their records, which are never touched
STAGED_CONFIG = CONFIG + ".staged"  # under its own name even the staging folder would look like a checkpoint

_WEIGHTS = {".safetensors", ".bin", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".tflite"}
_REWRITTEN = {CONFIG, STAGED_CONFIG, "README.md"}  # the source's card is about other weights; ours names and links it
_TRAINING = {"optimizer.pt", "scheduler.pt", "scaler.pt", "trainer_state.json", "runs", "log.jsonl", "outliers.json"}
_NOT_COPIED = {RUN, STAGE, *_REWRITTEN, *_TRAINING, "original", ".git", ".cache", "__pycache__"}
_PROMPTS, _MEDIA = "prompts.jsonl", "media"  # prompts beside an embedded model are no part of it


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
    """Turn a failed write into an error that says how many bytes the checkpoint needs and how many are free."""
    try:
        yield
    except OSError as error:
        raise OnPTQError(
            f"cannot write the checkpoint to {out}: {error}; it needs {size(needed)}, {_free(out)}"
        ) from error


def companions(source: Path) -> list[Path]:
    """The files, relative to the folder, that a checkpoint has beside weights and config: tokenizer, processor, chat
    template, speakers, license. Training records and other weights are left out, in whatever folder they are.

    Only regular files and links to them; links to folders are not followed.
    """
    left_out = _NOT_COPIED | ({_PROMPTS, _MEDIA} if (source / _PROMPTS).is_file() else set())
    files = []
    for path in sorted(source.iterdir()):
        if path.name in left_out or path.name.startswith("checkpoint-"):
            continue
        files += sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else [path]
    return [path.relative_to(source) for path in files if path.is_file() and not _is_weights(path)]


def check_links(source: Path, *more: Path) -> None:
    """Refuse links that would carry files from elsewhere into a copy: companions, and the files in `more`."""
    for path in (*(source / name for name in companions(source)), *more):
        if not lies_inside(source, path):
            raise OnPTQError(
                f"{path} is a link to {path.resolve()}, outside the model folder: its content would be copied into the "
                "checkpoint; replace the link by the file, or delete it"
            )


def copy_companions(source: Path, stage: Path) -> None:
    """Copy the bytes of all companions, pickles unopened. Only links within the model are followed."""
    check_links(source)
    for path in companions(source):
        (stage / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, stage / path)


def companion_bytes(source: Path) -> int:
    return sum((source / path).stat().st_size for path in companions(source))


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _publish(stage: Path, out: Path) -> None:
    """Move the staged files into place. Until the last line there is no config.json, which every reader looks for."""
    for path in stage.rglob("*"):
        sync(path)
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
    sync(out)  # config.json must not be there before what it describes, whenever the power fails
    os.replace(stage / STAGED_CONFIG, out / CONFIG)
    sync(out)


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS or path.name.endswith((".safetensors.index.json", ".bin.index.json"))


def check_room(out: Path, needed: int) -> None:
    """Refuse a disk on which the checkpoint does not fit; nothing is created."""
    with reported(out, needed):
        _check_free(next(path for path in (out, *out.absolute().parents) if path.is_dir()), needed)


def _check_free(out: Path, needed: int) -> None:
    if shutil.disk_usage(out).free < needed:
        raise OSError(f"not enough room on the disk of {out}")


def _free(out: Path) -> str:
    existing = next(path for path in (out, *out.absolute().parents) if path.is_dir())
    return f"{size(shutil.disk_usage(existing).free)} are free there"
