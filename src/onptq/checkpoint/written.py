"""What a run has written to its output folder, and whether it is still there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onptq.checkpoint.companions import companions
from onptq.checkpoint.folder import CONFIG, INDEX
from onptq.files import file_sha256

WEIGHTS = "*.safetensors"


def record(source: Path, out: Path) -> dict[str, Any]:
    """The size of a checkpoint's weights, and the hashes of the files by which it works: weights, config, tokenizer,
    processor; not its card."""
    weights = sorted(file.name for pattern in (WEIGHTS, INDEX) for file in out.glob(pattern))
    names = [CONFIG, *weights, *map(str, companions(source))]
    return {"bytes": _weight_bytes(out), "sha256": {name: file_sha256(out / name) for name in names}}


def damage(out: Path, written: Mapping[str, Any]) -> str | None:
    """The first difference of a checkpoint from its record; None if there is none."""
    for name, digest in written.get("sha256", {CONFIG: None}).items():
        if not (out / name).is_file():
            return f"{out / name} is missing"
        if digest is not None and file_sha256(out / name) != digest:
            return f"{out / name} has changed"
    size, before = _weight_bytes(out), written.get("bytes", 0)
    return None if size == before else f"{out} has {size:,} bytes of weights, not {before:,}"


def _weight_bytes(out: Path) -> int:
    return sum(file.stat().st_size for file in out.glob(WEIGHTS))
