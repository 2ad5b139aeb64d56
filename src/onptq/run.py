"""A run is a folder: what it is (`onptq/recipe.yaml`), every step's files written whole or not at all, and a log."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from onptq.errors import OnPTQError
from onptq.files import TEMPORARY, atomically, explained, plain, to_json
from onptq.recipe import difference

HOME = "onptq"  # what the run says about itself; the checkpoint lies beside it
RECORD = "recipe.yaml"
SUMMARY = "summary.json"
LOG = "log.jsonl"
LOCK = ".lock"


class Run:
    """An open run. Only one process has it; closing it (or ending) lets the next one in."""

    def __init__(self, folder: Path, lock: int | None, arm: str | None = None) -> None:
        self.folder = folder
        self._arm = arm
        self._begun_here = False
        self._behind: Future[None] | None = None
        self._unlock = None if lock is None else weakref.finalize(self, os.close, lock)

    @classmethod
    def open(cls, path: str | Path, identity: Mapping[str, Any], *, warn: Callable[[str], None] | None = None) -> Run:
        """Begin the run in `path`, or continue it if it was begun with the same identity.

        `identity` is plain data: recipe, model (source, sha256), prompts (source, sha256, count), versions, seeds.
        Everything in it decides whether two runs are the same, except `versions` (told to `warn`) and every `source`.
        """
        folder = Path(path)
        with _usable(folder):
            _recorded(folder, identity)  # before anything is created
            (folder / HOME).mkdir(parents=True, exist_ok=True)
            run = cls(folder, _lock(folder))
        try:
            run._begin(_recorded(folder, identity), identity, warn)  # asked again: nobody else changes it from here on
        except BaseException:
            run.close()
            raise
        return run

    def _begin(
        self, recorded: Mapping[str, Any] | None, identity: Mapping[str, Any], warn: Callable[[str], None] | None
    ) -> None:
        with explained(self.folder):
            for stale in (*self.folder.glob(f"{TEMPORARY}*"), *self.file().rglob(f"{TEMPORARY}*")):
                stale.unlink()
            _drop_torn_line(self.file(LOG))
        if recorded is None:
            self._begun_here = True
            with self.writing(RECORD) as temporary:
                temporary.write_text(yaml.safe_dump(plain(identity), sort_keys=False), encoding="utf-8")
        versions = plain(identity).get("versions") or {}
        self.log("open", resumed=recorded is not None, versions=versions)
        changed = difference(recorded.get("versions") or {}, versions) if recorded is not None else []
        if changed:
            text = "this run was begun with other versions, so its end may differ: " + "; ".join(changed)
            self.log("warning", text=text)
            if warn is not None:
                warn(text)

    def arm(self, name: str) -> Run:
        """Another arm of the same run: its files lie in a folder of that name, its lines of the log say whose they are."""
        return Run(self.folder, None, name)

    def file(self, *parts: str) -> Path:
        return self.folder.joinpath(HOME, *(() if self._arm is None else (self._arm,)), *parts)

    def has(self, *parts: str) -> bool:
        return self.file(*parts).exists()

    @property
    def finished(self) -> bool:
        return self.has(SUMMARY)

    @contextmanager
    def writing(self, *parts: str) -> Iterator[Path]:
        """Write to the path given; the file appears under its name once whole, and never otherwise."""
        self.wait()
        with atomically(self.file(*parts)) as temporary:
            yield temporary

    def write_behind(self, write: Callable[[Path], None], *parts: str, instead_of: Path | None = None) -> None:
        """The same while the run goes on: what it writes next waits for this, so files appear in the order of their steps. The
        file that it stands `instead_of` goes when it is there."""

        def work() -> None:
            with atomically(self.file(*parts)) as temporary:
                write(temporary)
            if instead_of is not None:
                instead_of.unlink(missing_ok=True)

        self.wait()
        pool = ThreadPoolExecutor(1, "onptq-write")
        self._behind = pool.submit(work)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Until everything is on disk; what went wrong there is raised here."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()

    def write_json(self, value: Any, *parts: str) -> None:
        with self.writing(*parts) as temporary:
            temporary.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")

    def read_json(self, *parts: str) -> Any:
        return json.loads(self.file(*parts).read_text(encoding="utf-8"))

    def log(self, event: str, **fields: Any) -> None:
        """Append one line to the log."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        whose = {} if self._arm is None else {"arm": self._arm}
        line = to_json({"time": time, "event": event, **whose, **fields}) + "\n"
        log = self.folder / HOME / LOG
        with explained(log), log.open("a", encoding="utf-8") as file:
            file.write(line)

    def events(self) -> Iterator[dict[str, Any]]:
        """The log so far, of all arms; a last line that a kill cut short is left out."""
        log = self.folder / HOME / LOG
        if log.exists():
            with log.open(encoding="utf-8", errors="replace") as file:
                yield from (json.loads(line) for line in file if line.endswith("\n"))

    def close(self) -> None:
        if self._unlock is not None:
            self._unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except OnPTQError:
            if error is None:  # else the first error is the one to show
                raise
        finally:
            if isinstance(error, OnPTQError):
                self._withdraw()
            self.close()

    def _withdraw(self) -> None:
        """A run that failed before its first step leaves nothing behind that the mended command would stumble over."""
        if self._begun_here and {item.name for item in self.file().iterdir()} <= {RECORD, LOG, LOCK}:
            shutil.rmtree(self.file())
            with suppress(OSError):  # not empty: the folder was there before
                self.folder.rmdir()


def check_place(path: str | Path) -> None:
    """Refuse a folder that can hold no run, or that another process has now. Nothing is created."""
    folder = Path(path)
    with _usable(folder):
        _record(folder)
        if not os.access(_nearest(folder), os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if (folder / HOME / LOCK).exists():
            os.close(_lock(folder))


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OnPTQError(f"cannot use {folder} for the run: {error.strerror or error}") from error


def _recorded(folder: Path, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The identity of the run in `folder`, None if there is no run; refuse what is not ours or not the same."""
    there = _record(folder)
    differences = [] if there is None else difference(_decisive(there), _decisive(plain(identity)))
    if differences:
        raise OnPTQError(
            f"{folder} holds another run (there -> here):\n  "
            + "\n  ".join(differences)
            + "\nUse another --out, or the same settings to continue that run. Nothing was changed"
        )
    return there


def _record(folder: Path) -> Mapping[str, Any] | None:
    """What the run in `folder` says it is, None if there is no run; refuse what is not ours."""
    nearest, record = _nearest(folder), folder / HOME / RECORD
    if not nearest.is_dir():
        raise OnPTQError(f"{nearest} is a file; expected a folder for the run: choose another --out")
    if not record.exists():
        if folder.exists() and not _untouched(folder):
            raise OnPTQError(f"{folder} is not empty and not a run (no {HOME}/{RECORD}): choose another --out")
        return None
    try:
        there = yaml.safe_load(record.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OnPTQError(f"cannot read {record}, which says what the run is: {error}") from error
    if not isinstance(there, Mapping):
        raise OnPTQError(f"cannot read {record}, which says what the run is: expected a mapping")
    return there


def _nearest(folder: Path) -> Path:
    """The folder itself, or the lowest of those above it that is there."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _untouched(folder: Path) -> bool:
    """Whether `folder` is empty, or holds only what a run killed in its first moment leaves."""
    home = folder / HOME
    if any(item != home for item in folder.iterdir()):
        return False
    return not home.exists() or (
        home.is_dir() and all(item.name == LOCK or item.name.startswith(TEMPORARY) for item in home.iterdir())
    )


def _decisive(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for a run to be continued: where the inputs lie and who computes may change."""
    return {
        name: {key: item for key, item in value.items() if key != "source"} if isinstance(value, Mapping) else value
        for name, value in identity.items()
        if name != "versions"
    }


def _lock(folder: Path) -> int:
    lock = os.open(folder / HOME / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise OnPTQError(f"{folder} is in use by another process: wait for it, or choose another --out") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            os.close(lock)
            raise
        # A file system without locks: the run still works, only nobody is kept out.
    return lock


def _drop_torn_line(log: Path) -> None:
    if log.exists():
        whole = log.read_bytes().rfind(b"\n") + 1
        if whole != log.stat().st_size:
            os.truncate(log, whole)
