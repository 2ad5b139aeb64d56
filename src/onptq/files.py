"""Files that are written whole or not at all, disk errors with a remedy, JSON for every reader, and the cache."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError

TEMPORARY = ".onptq-tmp-"
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS})


def cache_folder() -> Path:
    """The folder for files that can be computed again."""
    if own := os.environ.get("ONPTQ_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "onptq"


@contextmanager
def atomically(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target` that replaces it, synced to disk, if the block succeeds."""
    temporary = target.with_name(f"{TEMPORARY}{os.getpid()}-{target.name}")  # keeps the suffix: some writers look at it
    try:
        with explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch()
            mode = temporary.stat().st_mode  # as the umask has it; safetensors lets only the owner read its files
            yield temporary
            temporary.chmod(mode)
            sync(temporary)
            os.replace(temporary, target)
            sync(target.parent)
    finally:
        with suppress(OSError):  # on a disk gone read-only, the first error is the one to show
            temporary.unlink(missing_ok=True)


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """A context that turns the errors of a full or forbidden disk into one with a remedy."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OnPTQError) or _disk_error(error) not in DISK_ERRORS:
            raise
        raise OnPTQError(
            f"cannot write {target}: {error} ({_free(target)} free there). Finished steps are kept; "
            "once this is fixed the same command continues after the last of them"
        ) from error


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: paths as text, arrays and tensors as numbers, NaN and infinity as null."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def plain(value: Any) -> Any:
    """The value as JSON and YAML have it: mappings, lists, text, numbers and None."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def sync(path: Path) -> None:
    """Wait until a file or the entries of a folder are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size(count: float) -> str:
    """Bytes in the largest unit of which there is one."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lies_inside(folder: Path, path: Path) -> bool:
    """Whether a file lies below a folder, links followed; of a snapshot in a hub cache, also among its blobs."""
    folder, target = folder.resolve(), path.resolve()
    homes = (folder, folder.parents[1] / "blobs") if folder.parent.name == "snapshots" else (folder,)
    return any(target.is_relative_to(home) for home in homes)


def cached_hub_id(folder: Path) -> str | None:
    """The hub id of a model's snapshot in a hub cache; None for any other folder."""
    folder = folder.absolute()
    cached = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    return folder.parents[1].name.removeprefix("models--").replace("--", "/") if cached else None


def _disk_error(error: Exception) -> int | None:
    """The operating system's error number; safetensors gives it only in words."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def _free(path: Path) -> str:
    while not path.exists() and path != path.parent:
        path = path.parent
    return size(shutil.disk_usage(path).free)
