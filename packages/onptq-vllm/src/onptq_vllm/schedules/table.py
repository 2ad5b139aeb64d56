"""The table of a tuning on a GPU.

It has schedules that replace humming's own for a GEMM and a number of rows, and the GEMMs whose activations are rounded
by the kernel that computes them.

Standard library only: vLLM reads this in its own environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError
from onptq.files import atomically, cache_folder

# Environment variable with the path of the file; by default one per GPU and version of humming in OnPTQ's cache folder.
FILE = "ONPTQ_SCHEDULES"
END = 1 << 30  # more rows than any GEMM has

Schedule = Mapping[str, Any]  # tile shapes, stages and so on, by humming's names
Seconds = Mapping[str, tuple[float, float]]  # rows -> humming's own, tuned
Interval = tuple[int, int, Schedule]  # for more rows than the first number, up to the second


@dataclass(frozen=True)
class Gemm:
    """The shape and the operands of a GEMM; the number of rows is left open."""

    outputs: int
    inputs: int
    activations: str  # int8, float16, bfloat16
    weights: str  # uint4: humming's codes begin at zero
    group: int = 0  # columns that share a scale; 0: one scale per output

    @classmethod
    def of(cls, layer: Any) -> Gemm:
        """The GEMM of humming's LayerConfig, with its padding."""
        group = int(layer.weight_scale_group_size)
        return cls(int(layer.shape_n), int(layer.shape_k), str(layer.a_dtype), str(layer.b_dtype), group)

    def __str__(self) -> str:
        return f"{self.outputs}x{self.inputs} {self.activations}x{self.weights}" + f" g{self.group}" * bool(self.group)


@dataclass(frozen=True)
class TunedSchedule:
    """A schedule for more than `above` and up to `upto` rows, and its seconds at the timed numbers of rows."""

    above: int
    upto: int
    schedule: Schedule
    seconds: Seconds

    @property
    def speedup(self) -> float:
        return mean_ratio(self.seconds)


def mean_ratio(seconds: Seconds) -> float:
    """The mean speedup over humming's own."""
    return sum(own / tuned for own, tuned in seconds.values()) / len(seconds)


@dataclass
class Table:
    device: str
    humming: str
    gemms: dict[str, list[TunedSchedule]] = field(default_factory=dict)
    rounding: dict[str, Seconds] = field(default_factory=dict)  # of computing and rounding the activations of a GEMM

    @classmethod
    def read(cls, path: Path) -> Table:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            gemms = {name: [_read_tuned(one) for one in spans] for name, spans in values["products"].items()}
            rounding = {name: _read_seconds(seconds) for name, seconds in values.get("rounding", {}).items()}
            return cls(values["device"], values["humming"], gemms, rounding)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OnPTQError(
                f"cannot read schedules from {path}: {error!r}; `onptq tune FOLDER` writes them"
            ) from error

    def check(self, path: Path, device: str, humming: str) -> None:
        if (self.device, self.humming) != (device, humming):
            raise OnPTQError(
                f"{path} was tuned on {self.device} with humming {self.humming}; expected a file for {device}, humming {humming}"
            )

    def text(self) -> str:
        values = {"products" if name == "gemms" else name: value for name, value in asdict(self).items()}
        return json.dumps(values, indent=1) + "\n"

    def write(self, path: Path) -> None:
        with atomically(path) as part:
            part.write_text(self.text(), encoding="utf-8")


def _read_tuned(values: Mapping[str, Any]) -> TunedSchedule:
    """An entry of the file. Its schedule may hold numbers and plain words only: humming writes them into a kernel's
    source."""
    for name, value in values["schedule"].items():
        words = value if isinstance(value, list) else [value]
        if not all(
            one is None or isinstance(one, int) or re.fullmatch(r"[a-z0-9_]{1,32}", one) for one in [name, *words]
        ):
            raise ValueError(
                f"{name}: {value!r} is not part of a schedule; expected numbers and words of a-z, 0-9 and _"
            )
    return TunedSchedule(
        int(values["above"]), int(values["upto"]), values["schedule"], _read_seconds(values["seconds"])
    )


def _read_seconds(values: Mapping[str, Any]) -> Seconds:
    return {str(rows): (float(own), float(tuned)) for rows, (own, tuned) in values.items()}


def table_path(device: str, humming: str) -> Path:
    if named := os.environ.get(FILE):
        return Path(named).expanduser()
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device} humming {humming}").lower()
    return _folder() / f"{name}.json"


def tables_exist() -> bool:
    """Whether there is a table of any GPU: the name of this one needs its driver."""
    return FILE in os.environ or any(_folder().glob("*.json"))


def _folder() -> Path:
    return cache_folder() / "schedules"


def overlay(own: Sequence[Interval], tuned: Sequence[TunedSchedule]) -> list[list[Any]]:
    """humming's intervals of rows, replaced by the tuned ones; as lists, like humming's."""
    tuned = sorted(tuned, key=lambda one: one.above)
    intervals: list[list[Any]] = [[one.above, one.upto, dict(one.schedule)] for one in tuned]
    for above, upto, schedule in own:
        at = above
        for one in tuned:
            if one.upto <= at or one.above >= upto:
                continue
            if one.above > at:
                intervals.append([at, one.above, dict(schedule)])
            at = min(one.upto, upto)
        if at < upto:
            intervals.append([at, upto, dict(schedule)])
    return sorted(intervals, key=lambda interval: int(interval[0]))
