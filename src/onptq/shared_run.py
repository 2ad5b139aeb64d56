"""A run that several ranks work on: the first one has it and writes, the others read what it has written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from onptq.ranks import Ranks
from onptq.run import Run


class FollowedRun(Run):
    """The run as ranks other than the first see it: nothing that they write reaches it. They need its file system."""

    def scratch(self, name: str) -> Path:
        return super().scratch(f"{name}-{self.ranks.rank}")

    @contextmanager
    def writing(self, *parts: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="onptq-") as folder:
            yield Path(folder) / Path(*parts).name

    def write_behind(self, write: Callable[[Path], None], *parts: str, instead_of: Path | None = None) -> None:
        pass

    def log(self, event: str, **fields: Any) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def open_run(
    out: str | Path,
    home: Path,
    identify: Callable[[], Mapping[str, Any]],
    ranks: Ranks,
    warn: Callable[[str], None] | None = None,
) -> Run:
    """The run of `Run.open`, opened by the first rank, which alone computes its identity."""

    def opened() -> Run:
        if ranks.is_first:
            return Run.open(out, identify(), home=home, warn=warn)
        return FollowedRun(Path(out), home, None)

    run = ranks.after_first(opened)
    run.ranks = ranks
    return run
