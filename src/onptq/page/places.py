"""Which results a folder holds, and where their page goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onptq.checkpoint.folder import CONFIG
from onptq.errors import OnPTQError
from onptq.evaluate.baselines import FOLDER
from onptq.evaluate.comparison import REPORT_JSON
from onptq.plain_yaml import read_yaml
from onptq.run import HOME, RECORD, SUMMARY, run_home

PAGE, RECEIPT = "page.html", "receipt.json"
MARKDOWN, JSON = "differences.md", "differences.json"


@dataclass(frozen=True)
class Comparison:
    """The folder of a comparison; `run` has the files of the run that it judges, if it is one's."""

    folder: Path
    run: Path | None = None

    @property
    def home(self) -> Path:
        return self.folder / HOME


@dataclass(frozen=True)
class RunAlone:
    """The files of a run, beside its checkpoint."""

    folder: Path
    checkpoint: Path

    @property
    def home(self) -> Path:
        return self.folder


Place = Comparison | RunAlone


def find(path: Path) -> Place:
    """What is in the folder: a comparison; a checkpoint whose run, or a run whose comparison, lies beside or in it."""
    if not path.is_dir():
        raise OnPTQError(f"{path} is no folder; expected that of a comparison, of a run (DIR-run) or of its checkpoint")
    if is_comparison(path):
        return Comparison(path)
    home = path if (path / RECORD).is_file() else run_home(path)
    if is_comparison(home / FOLDER):
        return Comparison(home / FOLDER, home)
    if (home / RECORD).is_file() and not is_comparison_record(home / RECORD):
        return RunAlone(home, path if home != path else checkpoint_of(home))
    raise OnPTQError(
        f"{path} has no results to show; expected the folder of `onptq compare --out`, of a run (DIR-run, with "
        f"{SUMMARY}), or a checkpoint beside its run"
    )


def is_comparison(folder: Path) -> bool:
    record = folder / HOME / RECORD
    return (folder / REPORT_JSON).is_file() and record.is_file() and is_comparison_record(record)


def is_comparison_record(record: Path) -> bool:
    content = read_yaml(record)
    return isinstance(content, dict) and "comparison" in content


def checkpoint_of(home: Path) -> Path:
    """The folder of the checkpoint that belongs to the files of a run."""
    named = home if home.name else home.absolute()
    return named.parent if named.name == HOME else named.with_name(named.name.removesuffix("-run"))


def as_candidate(text: str) -> str:
    """The candidate as it is named, but by its checkpoint where the files of its run (DIR-run) are named."""
    name, separator, body = text.rpartition("=")
    home = Path(body)
    if not (home / RECORD).is_file() or (home / CONFIG).is_file() or is_comparison_record(home / RECORD):
        return text
    checkpoint = checkpoint_of(home)
    if not (checkpoint / CONFIG).is_file():
        raise OnPTQError(
            f"{home} holds a run, and {checkpoint} no checkpoint of it; expected the folder of a checkpoint"
        )
    return f"{name}{separator}{checkpoint}"


def page_of(places: Sequence[Place]) -> Path:
    """Where the page of one folder goes; of several, the current folder."""
    return places[0].folder / PAGE if len(places) == 1 else Path(PAGE)


def beside(page: Path, name: str) -> Path:
    """Where a file that belongs to a page goes: under its own name, or behind that of a page of another name."""
    return page.with_name(name if page.name == PAGE else f"{page.stem}-{name}")
