"""Copies of published data: a path, or files of a hub repository where one is named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from onptq.data.manifest import SHOWN_ERRORS, manifest_digest
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError

HUB = "hub:"
FORM = f"{HUB}OWNER/NAME, or {HUB}OWNER/NAME@REVISION"


def local_copy(place: str, patterns: Sequence[str]) -> Path:
    """The path; for `hub:OWNER/NAME[@REVISION]` the folder that the matching files were downloaded to."""
    if place.startswith(HUB):
        return _download(place, patterns)
    path = Path(place)
    if not path.exists():
        raise OnPTQError(f"{place} is not there: expected a file or folder, or {FORM} to download it")
    return path


def require_all(missing: Sequence[str], total: int, what: str) -> None:
    """Raise with the names of what is missing, if anything is."""
    if missing:
        shown = ", ".join(missing[:SHOWN_ERRORS]) + (", ..." if len(missing) > SHOWN_ERRORS else "")
        raise OnPTQError(f"{len(missing)} of {total} {what}: {shown}")


def check_digest(prompts: Iterable[Prompt], expected: str | None) -> str:
    """The SHA-256 over the prompts and their media; raise where another one was expected."""
    digest = manifest_digest(prompts)
    if expected is not None and digest != expected.lower():
        raise OnPTQError(f"--sha256 {expected}: the prompts and their media have {digest}; they are not the same")
    return digest


def _download(place: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = place.removeprefix(HUB).partition("@")
    if name.count("/") != 1:
        raise OnPTQError(f"{place!r} names no hub repository; expected {FORM}")
    try:
        folder = snapshot_download(name, repo_type="dataset", revision=revision or None, allow_patterns=list(patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise OnPTQError(f"cannot fetch {place} from the hub: {error}") from error
    return Path(folder)
