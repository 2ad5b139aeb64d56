"""`onptq tune`: faster products for a checkpoint on this GPU, which vLLM then takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onptq.cli.quantize import make_reporter
from onptq.errors import OnPTQError
from onptq_vllm.schedules.table import Seconds, mean_ratio


def tune(
    folder: Annotated[str, typer.Argument(help="A quantized checkpoint: W4A8, W4A16 or W8A8.")],
    rows: Annotated[
        list[int] | None,
        typer.Option(
            "--rows",
            min=1,
            help="Tokens of a forward, repeatable: each for those above its half or the one before, from 8192 on for all beyond.",
            show_default="powers of two to 16384",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float16 or bfloat16, as it will be served.", show_default="as the checkpoint states it"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file; serve with ONPTQ_SCHEDULES naming it.", show_default="in OnPTQ's cache folder"),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only.")] = False,
) -> None:
    """Time other schedules than humming's own for the products of FOLDER, and write down those that are faster.

    Run it on the GPU that will serve, with vLLM's version of humming-kernels. Where OnPTQ is installed beside vLLM, `vllm serve
    FOLDER --linear-backend humming` takes them.
    """
    from onptq.checkpoint.quantization import parse_quantization
    from onptq.checkpoint.source import open_checkpoint
    from onptq_vllm.bench.variants import Variant
    from onptq_vllm.schedules.search import ROWS
    from onptq_vllm.schedules.tune import tune as run

    source = open_checkpoint(folder)
    quantization = parse_quantization(source.config.get("quantization_config"))
    if quantization is None or quantization.scheme is None:
        raise OnPTQError(f"{folder} is not quantized in a way that OnPTQ knows; expected W4A8, W4A16 or W8A8")
    stated = Variant("", source, quantization.scheme).dtype
    path, found, rounding = run(
        source, quantization.scheme, dtype or stated, rows or ROWS, out, make_reporter(quiet, False)
    )
    for name, spans in found.items():
        for one in spans:
            typer.echo(_line(name, one.seconds))
        if not spans:
            typer.echo(f"{name:17} humming's own are the fastest that were tried")
    for name, seconds in rounding.items():
        if seconds:
            typer.echo(_line(f"into {name}", seconds))
    typer.echo(f"written: {path}")


def _line(name: str, seconds: Seconds) -> str:
    """At the most rows that were timed; the ratio is the mean over all."""
    most = max(seconds, key=int)
    own, best = seconds[most]
    return f"{name:17} {most:>6} rows  {1e6 * own:9.1f} -> {1e6 * best:9.1f} us  {mean_ratio(seconds):.2f}x"
