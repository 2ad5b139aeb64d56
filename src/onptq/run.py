"""A run is a folder: its identity (`recipe.yaml`), the files of every step, written whole or not at all, and a log."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from onptq.errors import OnPTQError
from onptq.files import TEMPORARY, atomically, explained, file_sha256, plain, read_json, to_json
from onptq.overrides import difference
from onptq.plain_yaml import read_yaml, to_yaml
from onptq.ranks import ALONE

HOME = "onptq"  # inside the output folder: the files of a comparison, and of a quantization by contract 1
CONTRACT = 2  # version of docs/run-folder.md: 1 has the run's files in DIR/onptq, 2 in DIR-run
RECORD = "recipe.yaml"
SUMMARY = "summary.json"
INIT = "init.safetensors"
CHOICE = ("final", "choice.json")  # whether the run ends with the calibrated theta or with its init
CALIBRATED, INIT_KEPT = "calibrated", "init"
LOG = "log.jsonl"
SCRATCH = ".scratch"
LOCK = ".lock"
SUMS = "SHA256SUMS"  # of every committed file, in the form of sha256sum
_SUM = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>.+)")
AGAIN = "and the same command computes it again"
SAFETENSORS_TEMPORARY = ".tmp*"  # where safetensors writes before it renames

T = TypeVar("T")


class Codec(NamedTuple, Generic[T]):
    """How a step's result is written to a file and read back."""

    write: Callable[[T, Path], None]
    read: Callable[[Path], T]


class Run:
    """An open run. Only one process has it; closing it (or ending) lets the next one in.

    `folder` holds its output, `home` its own files.
    """

    def __init__(self, folder: Path, home: Path, lock: int | None, arm: str | None = None) -> None:
        self.folder, self.home = folder, home
        self._arm = arm
        self.ranks = ALONE  # the processes that work on it together
        self.resumed = False  # an earlier process began it
        self._behind: Future[None] | None = None
        self._intact: set[str] = set()  # files that this process has written, or compared with their sums
        self._unlock = None if lock is None else weakref.finalize(self, os.close, lock)

    @classmethod
    def open(
        cls,
        path: str | Path,
        identity: Mapping[str, Any],
        *,
        home: Path | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> Run:
        """Begin the run with output in `path` and files in `home`, or continue it if it has the same identity.

        `identity` is plain data: recipe, model (source, sha256), prompts (source, sha256, count), versions, seeds.
        Two runs are the same if all of it is, except `versions` (a difference goes to `warn`) and every `source`.
        """
        folder = Path(path)
        home = folder / HOME if home is None else home
        with _usable(folder):
            _recorded(folder, home, identity)  # before anything is created
            home.mkdir(parents=True, exist_ok=True)
            run = cls(folder, home, _lock(folder, home))
        try:
            run._begin(_recorded(folder, home, identity), identity, warn)  # under the lock: final from here on
        except BaseException:
            run.close()
            raise
        return run

    def _begin(
        self, recorded: Mapping[str, Any] | None, identity: Mapping[str, Any], warn: Callable[[str], None] | None
    ) -> None:
        with explained(self.folder):
            for pattern in (f"{TEMPORARY}*", SAFETENSORS_TEMPORARY):
                for stale in (*self.folder.glob(pattern), *self.home.rglob(pattern)):
                    stale.unlink()
            remove(self.home / SCRATCH)
            _drop_torn_line(self.file(LOG))
        self.resumed = recorded is not None
        if self.resumed:
            self._check(RECORD, self._sums().get(RECORD, set()))
        else:
            with self.writing(RECORD) as temporary:
                record = {"contract": CONTRACT} | plain(identity)
                temporary.write_text(to_yaml(record), encoding="utf-8")
        versions = plain(identity).get("versions") or {}
        self.log("open", resumed=self.resumed, versions=versions)
        before = (recorded or {}).get("versions")
        changed = difference(before, versions) if isinstance(before, Mapping) else []
        if changed:
            text = "this run was begun with other versions, so its end may differ: " + "; ".join(changed)
            self.log("warning", text=text)
            if warn is not None:
                warn(text)

    def arm(self, name: str) -> Run:
        """Another arm of the same run: its files are in a folder of that name, and its log lines carry the name."""
        return Run(self.folder, self.home, None, name)

    def file(self, *parts: str) -> Path:
        return self.home.joinpath(*(() if self._arm is None else (self._arm,)), *parts)

    def has(self, *parts: str) -> bool:
        return self.file(*parts).exists()

    def scratch(self, name: str) -> Path:
        """A folder for what does not fit into memory, which nobody else may read; it is gone when the run is closed or opened
        again."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / SCRATCH).mkdir(mode=0o700, exist_ok=True)
        return self.home / SCRATCH / name

    @property
    def finished(self) -> bool:
        return self.has(SUMMARY)

    @contextmanager
    def writing(self, *parts: str) -> Iterator[Path]:
        """A context with a path to write to; the file appears under its name once the context ends without an error."""
        self.wait()
        with self._committing(self.file(*parts)) as temporary:
            yield temporary

    def write_behind(self, write: Callable[[Path], None], *parts: str, instead_of: Path | None = None) -> None:
        """Commit a file in a thread while the run goes on; the next write waits for it, so files appear in order.

        `instead_of` names a file or folder that is deleted once this file is there."""

        def work() -> None:
            with self._committing(self.file(*parts)) as temporary:
                write(temporary)
            if instead_of is not None:
                remove(instead_of)

        self.wait()
        pool = ThreadPoolExecutor(1, "onptq-write")
        self._behind = pool.submit(work)
        pool.shutdown(wait=False)

    @contextmanager
    def _committing(self, target: Path) -> Iterator[Path]:
        name = str(target.relative_to(self.file()))
        if name != RECORD:
            self._require_folder()
        try:
            with atomically(target) as temporary:
                yield temporary
                # Before the file has its name: a kill in between leaves a sum too many, never a file without one.
                _append(self.file(SUMS), f"{file_sha256(temporary)}  {name}")
        except FileNotFoundError as error:
            if self.home.is_dir():
                raise
            raise self._deleted() from error
        self._intact.add(name)

    def _require_folder(self) -> None:
        """Write nothing into the place of a folder that is gone: the same command would refuse what is left there."""
        if not (self.home / RECORD).exists():
            raise self._deleted()

    def _deleted(self) -> OnPTQError:
        return OnPTQError(f"{self.home} was deleted while the run went on: begin it again with the same command")

    def step(self, name: str, codec: Codec[T], compute: Callable[[], T]) -> T:
        """The value that an earlier process committed as `name`, or else the computed one, now committed.

        A computed value is read back too, so that a continued run and an unbroken one go on with the same bits.
        """
        if self.ranks.lead(lambda: self.has(name)):
            return self.read(name, codec.read)
        value = compute()
        if self.ranks.is_first:
            with self.writing(name) as path:
                codec.write(value, path)
        self.ranks.meet()  # the others read what the first has written
        return codec.read(self.file(name))

    def read(self, name: str, reader: Callable[[Path], T]) -> T:
        """A committed file, checked against the sum it was committed with."""
        path = self.file(name)
        try:
            self._check(name, self._sums().get(name, set()))
            return reader(path)
        except OnPTQError:
            raise
        except Exception as error:  # every format has exceptions of its own
            self._require_folder()
            raise OnPTQError(f"cannot read {path} ({error}): delete {_unit(path)}, {AGAIN}") from error

    def missing(self) -> list[str]:
        """The committed files that are gone. An error where one that is there has changed."""
        sums = self._sums()
        for name in sums:
            if name not in self._intact and self._is_file(name):
                self._check(name, sums[name])
        return [name for name in sums if not self._is_file(name)]

    def _check(self, name: str, sums: set[str]) -> None:
        """Refuse a file that none of its sums fits."""
        path = self.file(name)
        if sums and file_sha256(path) not in sums:
            advice = "restore it, or choose another --out" if name == RECORD else f"delete {_unit(path)}, {AGAIN}"
            raise OnPTQError(f"{path} has changed since it was written: {advice}")
        self._intact.add(name)

    def _sums(self) -> dict[str, set[str]]:
        """By name, every sum that the file was committed with; a file that is written again has several.

        Lines that a kill or damage cut short are left out."""
        sums: dict[str, set[str]] = {}
        if self.has(SUMS):
            for line in self.file(SUMS).read_text(encoding="utf-8", errors="replace").splitlines():
                if (found := _SUM.fullmatch(line)) is not None:
                    sums.setdefault(found["name"], set()).add(found["digest"])
        return sums

    def _is_file(self, name: str) -> bool:
        """Whether a name that is in the sums is that of a file. Half a name may be a folder's, a damaged one nobody's."""
        try:
            return self.file(name).is_file()
        except OSError:
            return False

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Commit the summary, the run's last file, and leave the sums of the files that are there.

        Files of earlier processes that this one did not need must still be what they were."""
        self.wait()
        self.missing()
        self.write_json(summary, SUMMARY)
        files = sorted(str(path.relative_to(self.home)) for path in self.home.rglob("*") if path.is_file())
        written = self._sums()
        once = {name: digests.pop() for name, digests in written.items() if len(digests) == 1}
        lines = [f"{once.get(name) or file_sha256(self.home / name)}  {name}\n" for name in files if name in written]
        with atomically(self.file(SUMS)) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")

    def wait(self) -> None:
        """Wait until everything is on disk; an error of the thread is raised here."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()

    def write_json(self, value: Any, *parts: str) -> None:
        with self.writing(*parts) as temporary:
            temporary.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")

    def read_json(self, *parts: str) -> Any:
        return self.read("/".join(parts), read_json)

    def log(self, event: str, **fields: Any) -> None:
        """Append one line to the log."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        whose = {} if self._arm is None else {"arm": self._arm}
        self._require_folder()
        _append(self.home / LOG, to_json({"time": time, "event": event, **whose, **fields}))

    def events(self) -> Iterator[dict[str, Any]]:
        """The log so far, of all arms; lines that a kill or a full disk cut short are left out."""
        log = self.home / LOG
        if log.exists():
            with log.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    with suppress(ValueError, RecursionError):
                        event = json.loads(line)
                        if isinstance(event, dict) and "event" in event:
                            yield event

    def seconds(self) -> dict[str, float]:
        """Seconds of every phase, over all processes that worked on it."""
        seconds: dict[str, float] = {}
        for event in self.events():
            own = event.get("arm") == self._arm
            if own and event["event"] == "phase" and event.get("state") in ("end", "failed"):
                phase, took = event.get("phase"), event.get("seconds")
                if isinstance(phase, str) and isinstance(took, int | float):  # else the line was damaged
                    seconds[phase] = round(seconds.get(phase, 0.0) + took, 3)
        return seconds

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
            remove(self.home / SCRATCH)
            if isinstance(error, OnPTQError):
                self._withdraw()
            self.close()

    def _withdraw(self) -> None:
        """Delete a run that failed before its first step, so that the corrected command can use the folder."""
        if not self.home.is_dir():  # somebody else deleted it
            return
        if not self.resumed and {item.name for item in self.home.iterdir()} <= {RECORD, LOG, LOCK, SUMS}:
            shutil.rmtree(self.home)
            with suppress(OSError):  # not empty: the folder was there before
                self.folder.rmdir()


def run_home(out: str | Path) -> Path:
    """The folder with the files of the quantization whose checkpoint goes to `out`.

    `DIR-run` beside it, so that nobody uploads prompts with a checkpoint; `DIR/onptq` of a run of contract 1.
    """
    folder = Path(out)
    inside = folder / HOME
    if (inside / RECORD).exists():
        return inside
    named = folder if folder.name else folder.absolute()
    return named.with_name(f"{named.name}-run")


def is_contract_1(out: str | Path) -> bool:
    """Whether the run of `out` is one of contract 1, which took the first prompts of its manifest as they are."""
    return run_home(out) == Path(out) / HOME


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def final_theta(out: str | Path, rounds: int) -> Path:
    """The file of the theta that the checkpoint in `out` was folded from, by a run of so many rounds."""
    home = run_home(out)
    choice = home.joinpath(*CHOICE)
    init_kept = choice.is_file() and read_json(choice).get("kept") == INIT_KEPT
    parts = ("rounds", str(rounds - 1), "theta.safetensors") if rounds and not init_kept else (INIT,)
    return home.joinpath(*parts)


def check_place(path: str | Path, home: Path | None = None) -> None:
    """Refuse folders that can hold no run, or that another process has now. Nothing is created."""
    folder = Path(path)
    home = folder / HOME if home is None else home
    with _usable(folder):
        _record(folder, home)
        for place in (folder, home):
            if not os.access(_nearest(place), os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if (home / LOCK).exists():
            os.close(_lock(folder, home))


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OnPTQError(f"cannot use {folder} for the run: {error.strerror or error}") from error


def _recorded(folder: Path, home: Path, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The identity of the run that is there, None if there is none; refuse any other run."""
    there = _record(folder, home)
    differences = [] if there is None else difference(_decisive(there), _decisive(plain(identity)))
    if differences:
        raise OnPTQError(
            f"{folder} holds another run (there -> here):\n  "
            + "\n  ".join(differences)
            + "\nUse another --out, or the same settings to continue that run. Nothing was changed"
        )
    return there


def _record(folder: Path, home: Path) -> Mapping[str, Any] | None:
    """The content of recipe.yaml, None if no run is there; refuse folders with anything else in them."""
    record = home / RECORD
    for place in (folder, home):
        nearest = _nearest(place)
        if not nearest.is_dir():
            raise OnPTQError(f"{nearest} is a file; expected a folder for the run: choose another --out")
    if not record.exists():
        for place in (folder, home):
            if not _untouched(place, home):
                raise OnPTQError(f"{place} is not empty and not a run (no {record}): choose another --out")
        return None
    try:
        there = read_yaml(record)
    except OnPTQError as error:
        raise OnPTQError(f"{error}; {record.name} says what the run is: restore it, or choose another --out") from error
    if not isinstance(there, Mapping) or not isinstance(there.get("versions") or {}, Mapping):
        raise OnPTQError(f"cannot read {record}, which says what the run is: expected a mapping, and `versions` as one")
    contract = there.get("contract", 1)
    if not isinstance(contract, int) or contract > CONTRACT:
        raise OnPTQError(
            f"{record} is of contract {contract!r}, of a newer onptq; this one reads 1 to {CONTRACT}: update onptq"
        )
    return there


def _nearest(folder: Path) -> Path:
    """The folder itself, or the lowest of those above it that is there."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _untouched(place: Path, home: Path) -> bool:
    """Whether `place` is absent, empty, or holds only what a run killed in its first moment leaves."""
    if not place.exists():
        return True
    if place != home:
        return all(item == home for item in place.iterdir())
    return all(item.name in (LOCK, SUMS, SCRATCH) or item.name.startswith(TEMPORARY) for item in place.iterdir())


def _decisive(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part that must be equal for a run to be continued: not where its inputs lie, nor the versions."""
    return {
        name: {key: item for key, item in value.items() if key != "source"} if isinstance(value, Mapping) else value
        for name, value in identity.items()
        if name not in ("versions", "contract", "evaluation")
    }


def _unit(path: Path) -> Path:
    """What to delete together with a file: all of its round, or of the end, whose files are made from one another."""
    whole = path.parent.parent.name == "rounds" or path.parent.name == CHOICE[0]
    return path.parent if whole else path


def _lock(folder: Path, home: Path) -> int:
    lock = os.open(home / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise OnPTQError(f"{folder} is in use by another process: wait for it, or choose another --out") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            os.close(lock)
            raise
        # A file system without locks: the run works, but a second process is not refused.
    return lock


def _drop_torn_line(log: Path) -> None:
    if log.exists():
        whole = log.read_bytes().rfind(b"\n") + 1
        if whole != log.stat().st_size:
            os.truncate(log, whole)


def _append(path: Path, line: str) -> None:
    """Add a line to a file, after the end of one that was cut short."""
    with explained(path), path.open("ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            line = "\n" + line
        file.write(line.encode() + b"\n")
