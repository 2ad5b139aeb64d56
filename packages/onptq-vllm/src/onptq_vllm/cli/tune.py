"""`onptq tune`: faster GEMM schedules for a checkpoint on this GPU, which vLLM then uses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onptq.cli.settings import make_reporter
from onptq.errors import OnPTQError
from onptq_vllm.schedules.table import Seconds, mean_ratio


def tune(
    folder: Annotated[str, typer.Argument(help="A quantized checkpoint: W4A8, W4A16 or W8A8.")],
    rows: Annotated[
        list[int] | None,
        typer.Option(
            "--rows",
            min=1,
            help="Tokens of a forward to tune for; repeatable. Each stands for the numbers down to its half, 8192 and above "
            "also for all larger ones.",
            show_default="powers of two to 16384",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float16 or bfloat16, as it will be served.", show_default="that of the checkpoint"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write; the server finds it by the environment variable ONPTQ_SCHEDULES.",
            show_default="in OnPTQ's cache folder",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only.")] = False,
) -> None:
    """Time other schedules than humming's own for the GEMMs of FOLDER, and write the faster ones to a file.

    Run it on the GPU that will serve, with vLLM's version of humming-kernels. With onptq-vllm installed beside vLLM,
    `vllm serve FOLDER --linear-backend humming` uses them.
    """
    from onptq.checkpoint.quantization import parse_quantization
    from onptq.checkpoint.source import open_checkpoint
    from onptq_vllm.bench.variants import Variant
    from onptq_vllm.schedules.search import ROWS
    from onptq_vllm.schedules.tune import tune as run

    source = open_checkpoint(folder)
    quantization = parse_quantization(source.config.get("quantization_config"))
    if quantization is None or quantization.scheme is None:
        raise OnPTQError(f"{folder} has no quantization that can be tuned; expected W4A8, W4A16 or W8A8")
    own_dtype = Variant("", source, quantization.scheme).dtype
    path, tuned, rounding = run(
        source, quantization.scheme, dtype or own_dtype, rows or ROWS, out, make_reporter(quiet, False)
    )
    for name, spans in tuned.items():
        for one in spans:
            typer.echo(_line(name, one.seconds))
        if not spans:
            typer.echo(f"{name:17} no faster schedule than humming's own")
    for name, seconds in rounding.items():
        if seconds:
            typer.echo(_line(f"input of {name}", seconds))
    typer.echo(f"written: {path}")


def _line(name: str, seconds: Seconds) -> str:
    """A line with the seconds at the largest timed number of rows, and the mean speedup over all."""
    most = max(seconds, key=int)
    own, best = seconds[most]
    return f"{name:17} {most:>6} rows  {1e6 * own:9.1f} -> {1e6 * best:9.1f} us  {mean_ratio(seconds):.2f}x"
