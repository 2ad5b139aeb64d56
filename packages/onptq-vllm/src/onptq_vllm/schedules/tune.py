"""Tune the GEMMs of a checkpoint on this GPU, one after another; the table is written after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from onptq.checkpoint.source import DTYPES, Source
from onptq.errors import OnPTQError
from onptq.progress import Reporter
from onptq.schemes import Scheme
from onptq_vllm.schedules.activations import WAYS
from onptq_vllm.schedules.plugin import PACKAGE
from onptq_vllm.schedules.search import Bench, search, search_rounding
from onptq_vllm.schedules.shapes import shapes_of
from onptq_vllm.schedules.table import Seconds, Table, TunedSchedule, table_path

MakeBench = Callable[[int, int, int, int, int, torch.dtype], Bench]


def tune(
    source: Source,
    scheme: Scheme,
    dtype: str,
    rows: Sequence[int],
    path: Path | None,
    reporter: Reporter,
    make: MakeBench | None = None,
) -> tuple[Path, dict[str, list[TunedSchedule]], dict[str, Seconds]]:
    """Write the table; return its path, the tuned schedules by linear, and the seconds of rounding by linear.

    `make` builds the GEMM to be timed; without it that is humming on the GPU.
    """
    if dtype not in DTYPES:
        raise OnPTQError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if scheme.activation_bits not in (8, 16) or scheme.weight_bits > 8 or not scheme.of_integers:
        raise OnPTQError(f"{scheme}: nothing to tune; expected integers, weights of at most 8 bits and A8 or A16")
    if make is None:
        make, table = _humming()
    else:
        table = Table("", "")
    path = path or table_path(table.device, table.humming)
    if path.is_file():
        earlier = Table.read(path)
        earlier.check(path, table.device, table.humming)
        table = earlier
    shapes = shapes_of(source.config)
    tuned: dict[str, list[TunedSchedule]] = {}
    rounding: dict[str, Seconds] = {}
    rounds = scheme.activation_bits == 8
    with reporter.phase("Tune", total=(1 + rounds) * len(shapes) * len(set(rows)), unit="spans of rows") as bar:
        for name, (outputs, inputs) in shapes.items():
            bits = scheme.weight_bits, scheme.activation_bits
            bench = make(outputs, inputs, *bits, scheme.group_size or 0, DTYPES[dtype])
            tuned[name] = search(bench, rows, bar.advance)
            table.gemms[str(bench.gemm)] = tuned[name]
            if rounds:
                rounding[name] = search_rounding(bench, WAYS[name], rows, bar.advance)
                table.rounding[str(bench.gemm)] = rounding[name]
            table.write(path)
    return path, tuned, rounding


def _humming() -> tuple[MakeBench, Table]:
    if not torch.cuda.is_available():
        raise OnPTQError("no CUDA GPU: expected the GPU that will serve")
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError as error:
        raise OnPTQError(f"tuning needs {PACKAGE}: pip install {PACKAGE}") from error
    if find_spec("humming.forward") is None:
        raise OnPTQError(f"{PACKAGE} {installed} is too old; expected 0.1.17 or later")
    from onptq_vllm.schedules.humming import HummingGemm

    return HummingGemm, Table(torch.cuda.get_device_name(), installed)
