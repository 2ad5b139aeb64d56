"""Progress of a run: bars, only warnings, or JSON lines; and the same in its log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from onptq.errors import OnPTQError, printable
from onptq.files import to_json

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

ADVANCE_SECONDS = 1.0  # JSON lines of one phase come no faster than this
KEPT = "\n\t"  # control characters that may be shown
BEGUN_SECONDS = 2.0  # after which a log file, where bars appear only at their end, has a line that a phase has begun


class Bar(Protocol):
    """The progress of one phase."""

    def advance(self, n: int = 1, **info: Any) -> None:
        """`n` more are done; `info` is shown beside the bar, e.g. loss=0.12."""


class Reporter(Protocol):
    """The receiver of progress, notes, warnings and the result."""

    def phase(self, name: str, total: int | None = None, unit: str = "") -> AbstractContextManager[Bar]: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def result(self, values: Mapping[str, Any]) -> None: ...


class _Silent:
    def advance(self, n: int = 1, **info: Any) -> None:
        pass


class QuietReporter:
    """Only warnings, on stderr."""

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        yield _Silent()

    def note(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        sys.stderr.write(f"warning: {printable(text, also=KEPT)}\n")

    def result(self, values: Mapping[str, Any]) -> None:
        pass


class JsonReporter:
    """One JSON object per line on stdout: phase (start, advance, end, failed), note, warning, result."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        bar = _JsonBar(self, name, total, unit)
        bar.emit("start")
        try:
            yield bar
        except BaseException:
            bar.emit("failed")
            raise
        bar.emit("end")

    def note(self, text: str) -> None:
        self.emit("note", text=text)

    def warn(self, text: str) -> None:
        self.emit("warning", text=text)

    def result(self, values: Mapping[str, Any]) -> None:
        self.emit("result", result=values)

    def emit(self, event: str, **fields: Any) -> None:
        stream = self._stream or sys.stdout
        stream.write(to_json({"event": event, **fields}) + "\n")
        stream.flush()


class _JsonBar:
    def __init__(self, reporter: JsonReporter, name: str, total: int | None, unit: str) -> None:
        self._reporter = reporter
        self._phase = {"phase": name, "total": total, "unit": unit}
        self._done = 0
        self._info: dict[str, Any] = {}
        self._began = self._emitted = time.monotonic()

    def advance(self, n: int = 1, **info: Any) -> None:
        self._done += n
        self._info.update(info)
        if time.monotonic() - self._emitted >= ADVANCE_SECONDS:
            self.emit("advance")

    def emit(self, state: str) -> None:
        self._emitted = time.monotonic()
        seconds = round(self._emitted - self._began, 3)
        self._reporter.emit("phase", state=state, **self._phase, done=self._done, seconds=seconds, **self._extra())

    def _extra(self) -> dict[str, Any]:
        return {"info": self._info} if self._info else {}


class SilentReporter(QuietReporter):
    """For processes that leave it to another one to print warnings, too."""

    def warn(self, text: str) -> None:
        pass


class RichReporter:
    """Bars with phase, done/total, rate, elapsed and remaining time on stderr; the result as a table on stdout."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._open = 0

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        if self._progress is None:
            self._progress = _bars(self._console)
            self._progress.start()
        self._open += 1
        task = self._progress.add_task(name, total=total, count=_count(0, total, unit), rate="", info="")
        bar = _RichBar(self._progress, task, total, unit)
        begun = threading.Timer(BEGUN_SECONDS, self.note, [f"{name} has begun"])
        begun.daemon = True
        if not self._console.is_terminal:
            begun.start()
        try:
            yield bar
            bar.end()
        finally:
            begun.cancel()
            self._progress.stop_task(task)
            self._open -= 1
            if not self._open:  # nested phases share one display
                self._progress.stop()
                self._progress = None

    def note(self, text: str) -> None:
        self._console.print(printable(text, also=KEPT), markup=False)

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {printable(text, also=KEPT)}", markup=False, style="yellow")

    def result(self, values: Mapping[str, Any]) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, value in values.items():
            table.add_row(Text(str(name), style="bold"), Text(printable(str(value), also=KEPT), overflow="fold"))
        Console(highlight=False).print(table)


class _RichBar:
    def __init__(self, progress: Progress, task: TaskID, total: int | None, unit: str) -> None:
        self._progress = progress
        self._task = task
        self._total = total
        self._unit = unit
        self._done = 0
        self._began = time.monotonic()

    def advance(self, n: int = 1, **info: Any) -> None:
        self._done += n
        rate = self._done / max(time.monotonic() - self._began, 1e-9)
        fields: dict[str, Any] = {"count": _count(self._done, self._total, self._unit), "rate": f"{rate:.3g}/s"}
        if info:
            fields["info"] = "  ".join(f"{name} {_short(value)}" for name, value in info.items())
        self._progress.update(self._task, advance=n, **fields)

    def end(self) -> None:
        """A phase that ended well and counted nothing had nothing to do: it is not left looking stuck at zero."""
        if not self._done and self._total:
            self._progress.update(self._task, completed=self._total, count=_count(self._total, self._total, self._unit))


class LoggedReporter:
    """Another reporter, whose phases, notes and warnings also go to a run's log, with the seconds of every phase.

    With `peak`, the log also says how many bytes had been held at most when a phase ended.
    """

    def __init__(self, inner: Reporter, log: Callable[..., None], peak: Callable[[], int] | None = None) -> None:
        self._inner = inner
        self._log = log
        self._peak = peak

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        self._log("phase", state="start", phase=name, total=total, unit=unit)
        began = time.monotonic()
        with self._inner.phase(name, total, unit) as bar:
            counted = _CountedBar(bar)
            try:
                yield counted
            except BaseException as error:
                with suppress(OnPTQError, OSError):  # a full disk must not hide what happened
                    seconds = round(time.monotonic() - began, 3)
                    self._log(
                        "phase", state="failed", phase=name, done=counted.done, seconds=seconds, error=repr(error)
                    )
                raise
        seconds = round(time.monotonic() - began, 3)
        held = {} if self._peak is None else {"peak_bytes": self._peak()}
        self._log("phase", state="end", phase=name, done=counted.done, seconds=seconds, **held)

    def note(self, text: str) -> None:
        self._log("note", text=text)
        self._inner.note(text)

    def warn(self, text: str) -> None:
        self._log("warning", text=text)
        self._inner.warn(text)

    def result(self, values: Mapping[str, Any]) -> None:
        self._inner.result(values)


class NamedReporter:
    """Another reporter, whose phases, notes and warnings begin with a name, e.g. that of an arm."""

    def __init__(self, inner: Reporter, name: str) -> None:
        self._inner = inner
        self._name = name

    def phase(self, name: str, total: int | None = None, unit: str = "") -> AbstractContextManager[Bar]:
        return self._inner.phase(f"{self._name} {name}", total, unit)

    def note(self, text: str) -> None:
        self._inner.note(f"{self._name}: {text}")

    def warn(self, text: str) -> None:
        self._inner.warn(f"{self._name}: {text}")

    def result(self, values: Mapping[str, Any]) -> None:
        self._inner.result(values)


class _CountedBar:
    def __init__(self, inner: Bar) -> None:
        self.done = 0
        self._inner = inner

    def advance(self, n: int = 1, **info: Any) -> None:
        self.done += n
        self._inner.advance(n, **info)


def _bars(console: Any) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[info]}", style="dim", markup=False),
        console=console,
        speed_estimate_period=300,  # one prompt of a large model on a CPU takes longer than the usual 30 s
    )


def _count(done: int, total: int | None, unit: str) -> str:
    return f"{done}{'' if total is None else f'/{total}'} {unit}".rstrip()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
