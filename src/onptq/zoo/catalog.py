"""The catalog of models that come with OnPTQ: what they are, where they lie, and how the derived ones are made."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from onptq.checkpoint.catalogs import did_you_mean
from onptq.errors import OnPTQError
from onptq.files import cache_folder

MODELS = Path(__file__).parent / "models"  # part of the package: read, never written to
OUTLIERS = "+outliers"
CHOSEN = "outliers.json"  # the outlier channels, beside the weights that they belong to
RECORDS = ("log.jsonl", CHOSEN)  # files about the making of a model: no part of its checkpoint
PARTIAL = ".partial-"
ABANDONED = 3600  # seconds after which an unfinished folder in the cache belongs to a process that died


@dataclass(frozen=True)
class Entry:
    name: str
    what: str
    does: str


_TRAINED = {
    "zoo:qwen2.5-vl": ("small Qwen2.5-VL", "sees, reads"),
    "zoo:qwen3-vl": ("small Qwen3-VL", "sees, reads"),
    "zoo:qwen2.5-omni": ("small Qwen2.5-Omni", "sees, reads, hears"),
}
SMOLLM2 = Entry("real:smollm2", "SmolLM2-135M (4-bit grid)", "chats")
ENTRIES = {
    entry.name: entry
    for entry in (
        *(Entry(name, what, does) for name, (what, does) in _TRAINED.items()),
        *(Entry(name + OUTLIERS, "same, with outliers", does) for name, (_, does) in _TRAINED.items()),
        SMOLLM2,
    )
}


@dataclass(frozen=True)
class Derivation:
    """A folder in the cache: a function of `inputs` and of the code that writes it, and named after both."""

    label: str
    inputs: Sequence[Path]
    code: str  # the module beside this one that holds `write`; a change of its text makes a new folder
    files: Collection[str]  # that `write` writes
    write: Callable[[Path], None]

    @property
    def folder(self) -> Path:
        digest = hashlib.sha256()
        for path in (*self.inputs, Path(__file__).with_name(f"{self.code}.py")):
            with path.open("rb") as file:
                digest.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return cache_folder() / f"{self.label}-{digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class Status:
    """A row of `onptq zoo list`."""

    entry: Entry
    available: bool
    note: str = ""  # why it is not available
    folder: Path | None = None  # None until it is derived, on first use
    parameters: int | None = None
    bytes: int | None = None


def locate(name: str) -> Path:
    """The checkpoint folder of a name in the catalog. A derived one is written into the cache on first use."""
    _require(name)
    derivation = _derivation(name)
    return _shipped(name) if derivation is None else _derived(derivation)


def export(name: str, out: Path) -> None:
    """Copy the checkpoint of that name into `out`, a new or empty folder.

    config.json comes last, so that an interrupted copy does not look like a checkpoint.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OnPTQError(f"{out} exists and is not an empty folder: expected a new or empty folder")
    folder = locate(name)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in RECORDS]
    files.sort(key=lambda path: path.name == "config.json")
    try:
        for path in files:
            target = out / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    except OSError as error:
        raise OnPTQError(f"cannot write {name} to {out}: {error}") from error


def describe(name: str) -> Status:
    """The status of a model, without deriving it."""
    entry = _require(name)
    try:
        derivation = _derivation(name)
        folder = _shipped(name) if derivation is None else derivation.folder
    except OnPTQError as error:
        return Status(entry, False, str(error))
    if not _is_complete(folder, () if derivation is None else derivation.files):
        return Status(entry, True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Status(entry, True, folder=folder, parameters=_parameters(folder), bytes=size)


def names() -> tuple[str, ...]:
    """All names that `locate` resolves."""
    return tuple(ENTRIES)


def _require(name: str) -> Entry:
    if name not in ENTRIES:
        raise OnPTQError(f"unknown model {name!r}{did_you_mean(name)}: expected one of {', '.join(ENTRIES)}")
    return ENTRIES[name]


def _shipped(name: str) -> Path:
    folder = MODELS / name.removeprefix("zoo:")
    if not (folder / "config.json").is_file():
        raise OnPTQError(f"{name} is not part of this installation: {folder} holds no checkpoint")
    return folder


def _derivation(name: str) -> Derivation | None:
    """The derivation of a derived model; None for one that is shipped."""
    if name == SMOLLM2.name:
        from onptq.zoo import smollm2

        gguf = smollm2.find_gguf()
        return Derivation("smollm2", [gguf], "smollm2", smollm2.FILES, lambda out: smollm2.convert(gguf, out))
    if not name.endswith(OUTLIERS):
        return None
    base = name.removesuffix(OUTLIERS)
    folder = _shipped(base)

    def write(out: Path) -> None:
        from onptq.zoo.outliers import derive

        derive(folder, out, base)

    inputs = sorted(path for path in folder.iterdir() if path.is_file())
    if CHOSEN not in {path.name for path in inputs}:
        raise OnPTQError(f"{name} cannot be derived: {folder} has no {CHOSEN}")
    files = [path.name for path in inputs if path.name not in RECORDS]
    return Derivation(f"{folder.name}{OUTLIERS}", inputs, "outliers", files, write)


def _derived(derivation: Derivation) -> Path:
    """The folder of a derived model: the one in the cache, or a new one if that is missing or damaged.

    A new one is written aside and renamed, so that of two processes the second uses the folder of the first.
    """
    target = derivation.folder
    if _is_complete(target, derivation.files):
        return target
    cache, stage = target.parent, None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        stage = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=cache))
        fresh = stage / "model"  # mkdtemp lets only the owner in; its child has the user's own mode
        fresh.mkdir()
        derivation.write(fresh)
        with contextlib.suppress(FileNotFoundError):
            if not _is_complete(target, derivation.files):
                target.rename(stage / "damaged")
        try:
            fresh.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        raise OnPTQError(
            f"cannot write {target}: {error}; the environment variable ONPTQ_CACHE names another folder for it"
        ) from error
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
    return target


def _is_complete(folder: Path, files: Collection[str]) -> bool:
    """Whether `files` are there, the JSON files can be parsed and the weights are as long as their headers say."""
    from safetensors import SafetensorError, safe_open

    weights = list(folder.glob("*.safetensors"))
    try:
        for path in (folder / "config.json", *folder.glob("*.json")):
            json.loads(path.read_bytes())
        for path in weights:
            with safe_open(path, "np"):
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return bool(weights) and all((folder / name).is_file() for name in files)


def _sweep(cache: Path) -> None:
    for unfinished in cache.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - unfinished.stat().st_mtime > ABANDONED:
                shutil.rmtree(unfinished, ignore_errors=True)


def _parameters(folder: Path) -> int:
    """The number of parameters of a checkpoint, from the headers of its shards."""
    from safetensors import safe_open

    count = 0
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "np") as file:
            count += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    return count
