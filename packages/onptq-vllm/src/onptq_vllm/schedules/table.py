"""What was found on a GPU: for a product and a number of rows, the schedule that takes the place of humming's own, and the
products whose activations are rounded by the kernel that makes them.

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

# Names the file; else it lies in OnPTQ's cache folder, one for each GPU and version of humming.
FILE = "ONPTQ_SCHEDULES"
END = 1 << 30  # more rows than any product has

Schedule = Mapping[str, Any]  # tile shapes, stages and the like, as humming names them
Seconds = Mapping[str, tuple[float, float]]  # rows -> as it was, as it was found
Interval = tuple[int, int, Schedule]  # for products of more rows than the first number, up to the second


@dataclass(frozen=True)
class Product:
    """Rows of activations times one weight matrix."""

    outputs: int
    inputs: int
    activations: str  # int8, float16, bfloat16
    weights: str  # uint4, as humming counts codes from zero
    group: int = 0  # columns that share a step; 0: one step a row

    @classmethod
    def of(cls, layer: Any) -> Product:
        """Of humming's LayerConfig, as padded."""
        group = int(layer.weight_scale_group_size)
        return cls(int(layer.shape_n), int(layer.shape_k), str(layer.a_dtype), str(layer.b_dtype), group)

    def __str__(self) -> str:
        return f"{self.outputs}x{self.inputs} {self.activations}x{self.weights}" + f" g{self.group}" * bool(self.group)


@dataclass(frozen=True)
class Found:
    """One schedule, and by how much it was faster at the numbers of rows that were timed."""

    above: int
    upto: int
    schedule: Schedule
    seconds: Seconds

    @property
    def times(self) -> float:
        return mean_ratio(self.seconds)


def mean_ratio(seconds: Seconds) -> float:
    return sum(own / found for own, found in seconds.values()) / len(seconds)


@dataclass
class Table:
    device: str
    humming: str
    products: dict[str, list[Found]] = field(default_factory=dict)
    rounding: dict[str, Seconds] = field(default_factory=dict)  # what enters it, made and rounded

    @classmethod
    def read(cls, path: Path) -> Table:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            products = {name: [_read_found(one) for one in found] for name, found in values["products"].items()}
            rounding = {name: _read_seconds(seconds) for name, seconds in values.get("rounding", {}).items()}
            return cls(values["device"], values["humming"], products, rounding)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OnPTQError(
                f"cannot read schedules from {path}: {error!r}; `onptq tune FOLDER` writes them"
            ) from error

    def check(self, path: Path, device: str, humming: str) -> None:
        if (self.device, self.humming) != (device, humming):
            raise OnPTQError(
                f"{path} is of {self.device}, humming {self.humming}; here are {device}, humming {humming}: expected another file"
            )

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def write(self, path: Path) -> None:
        with atomically(path) as part:
            part.write_text(self.text(), encoding="utf-8")


def _read_found(values: Mapping[str, Any]) -> Found:
    """Of a schedule only numbers and plain words: humming writes them into the source of a kernel."""
    for name, value in values["schedule"].items():
        words = value if isinstance(value, list) else [value]
        if not all(
            one is None or isinstance(one, int) or re.fullmatch(r"[a-z0-9_]{1,32}", one) for one in [name, *words]
        ):
            raise ValueError(f"{name}: {value!r} is no part of a schedule")
    return Found(int(values["above"]), int(values["upto"]), values["schedule"], _read_seconds(values["seconds"]))


def _read_seconds(values: Mapping[str, Any]) -> Seconds:
    return {str(rows): (float(own), float(found)) for rows, (own, found) in values.items()}


def table_path(device: str, humming: str) -> Path:
    if named := os.environ.get(FILE):
        return Path(named).expanduser()
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device} humming {humming}").lower()
    return _folder() / f"{name}.json"


def tables_exist() -> bool:
    """Of whatever GPU: to ask which one is here takes its driver."""
    return FILE in os.environ or any(_folder().glob("*.json"))


def _folder() -> Path:
    return cache_folder() / "schedules"


def overlay(own: Sequence[Interval], found: Sequence[Found]) -> list[list[Any]]:
    """humming's intervals of rows with those that were found in their place; lists, as humming makes them."""
    found = sorted(found, key=lambda one: one.above)
    kept: list[list[Any]] = [[one.above, one.upto, dict(one.schedule)] for one in found]
    for above, upto, schedule in own:
        at = above
        for one in found:
            if one.upto <= at or one.above >= upto:
                continue
            if one.above > at:
                kept.append([at, one.above, dict(schedule)])
            at = min(one.upto, upto)
        if at < upto:
            kept.append([at, upto, dict(schedule)])
    return sorted(kept, key=lambda interval: int(interval[0]))
