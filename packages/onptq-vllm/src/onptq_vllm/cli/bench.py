"""`onptq bench`: the speed of checkpoints in a real engine, and their kernels."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onptq.cli.settings import make_reporter
from onptq.cli.terminal import make_table
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq_vllm.bench.running import Settings


def bench(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Checkpoint folders, at most one of them dense. FOLDER@marlin names vLLM's kernels for one. qwen2.5-vl-7b, "
            "qwen3-vl-8b, qwen3-vl-30b-a3b and qwen2.5-omni-7b are these shapes with random weights.",
        ),
    ],
    engine: Annotated[str, typer.Option(help="vllm or transformers.")] = "vllm",
    schemes: Annotated[
        str, typer.Option(help="Schemes to export by plain rounding, if one dense model is given alone.")
    ] = "W4A8,W8A8,W4A16",
    modes: Annotated[
        list[str] | None,
        typer.Option("--mode", help="eager, or compiled with CUDA graphs; repeatable.", show_default="eager"),
    ] = None,
    batches: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="Prompts at once; repeatable.", show_default="1 and 8")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2048,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode after the first.")] = 64,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed runs, after as many untimed ones; medians are reported.")
    ] = 16,
    dtype: Annotated[
        str | None, typer.Option(help="float16, bfloat16 or float32.", show_default="that of each checkpoint")
    ] = None,
    linear_backend: Annotated[
        str | None,
        typer.Option(
            help="Kernels for quantized checkpoints. On a GPU: one of vLLM's. In transformers: torch, humming (on a GPU) or "
            "simulated.",
            show_default="vLLM: humming for W4A8, else its own choice; transformers: torch",
        ),
    ] = None,
    graph_sizes: Annotated[
        list[int] | None,
        typer.Option(
            "--graph-size",
            min=1,
            help="Tokens of a captured forward; repeatable.",
            show_default="those of the measured forwards",
        ),
    ] = None,
    cache_gib: Annotated[float, typer.Option(help="vLLM's key-value cache on a GPU, GiB.")] = 4.0,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OPTION=VALUE",
            help="An option of vLLM's LLM class, such as compilation_config.cudagraph_mode=FULL; repeatable.",
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder blocks of a model with random weights.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder for exported models and logs.", show_default="a temporary folder")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Interpreter that has vLLM.", show_default="the one that runs this")
    ] = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Start all checkpoints of a mode at once, then measure them in turn. Needs memory for all.",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one checkpoint in one mode.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="Write every number to this JSON file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the tables only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the same JSON instead of tables.")] = False,
) -> None:
    """Measure prefill, decode and peak memory of MODEL, dense and quantized, in one engine with one setting.

    Exit code 1 if a checkpoint did not run, or its log-probabilities are wrong.
    """
    from onptq.overrides import parse_override, put
    from onptq_vllm.bench.running import Settings
    from onptq_vllm.bench.scratch import scratch_folder
    from onptq_vllm.bench.tables import problem

    options: dict[str, Any] = {}
    for path, value in map(parse_override, overrides or ()):
        put(options, path, value)
    settings = Settings(
        engine=engine,  # type: ignore[arg-type]
        modes=tuple(modes or ("eager",)),  # type: ignore[arg-type]
        batches=tuple(sorted(set(batches or (1, 8)))),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        dtype=dtype,
        linear_backend=linear_backend,
        graph_sizes=tuple(sorted(set(graph_sizes or ()))),
        cache_gib=cache_gib,
        options=options,
        timeout=timeout,
        together=together,
        python=python or sys.executable,
    )
    with scratch_folder() as scratch:
        report = _measure(models, schemes, settings, work or scratch, layers, out, quiet or json)
    if json:
        typer.echo(json_format.dumps(report, indent=2))
    else:
        _print(report)
    if any(map(problem, report["results"])):
        raise typer.Exit(1)


def _measure(
    models: list[str],
    schemes: str,
    settings: Settings,
    work: Path,
    layers: int | None,
    out: Path | None,
    quiet: bool,
) -> dict[str, Any]:
    from onptq.checkpoint.source import DTYPES
    from onptq.files import atomically
    from onptq_vllm.bench.running import run_bench
    from onptq_vllm.bench.variants import choose_variants

    if settings.dtype is not None and settings.dtype not in DTYPES:
        raise OnPTQError(f"--dtype {settings.dtype}: expected one of {', '.join(DTYPES)}")
    reporter = make_reporter(quiet, False)
    wanted = [scheme.strip() for scheme in schemes.split(",") if scheme.strip()]
    work.mkdir(parents=True, exist_ok=True)
    variants = choose_variants(models, wanted, work, reporter, layers=layers)

    def save(report: dict[str, Any]) -> None:
        if out is not None:
            with atomically(out) as part:
                part.write_text(json_format.dumps(report, indent=2) + "\n", encoding="utf-8")

    names = " ".join(Path(model).name if Path(model).is_dir() else model for model in models)
    return run_bench(names, variants, settings, reporter, work / "logs", save)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    from onptq_vllm.bench.paper import PAPER
    from onptq_vllm.bench.tables import HEADS, PAPER_HEAD, between_lines, kernel_lines, problem, rows

    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width of its own
        console.width = 140
    settings, results, paper = report["settings"], report["results"], report["papers_model"]
    for mode in settings["modes"]:
        console.print(
            f"{settings['engine']}, {mode}, {settings['prompt_tokens']} prompt tokens, medians of {settings['repeats']}, "
            f"on {report['device']}",
            style="bold",
            markup=False,
        )
        heads = (*HEADS, PAPER_HEAD) if paper else HEADS
        table = make_table(*(head if head in ("checkpoint", PAPER_HEAD) else f"{head} >" for head in heads))
        for row in rows(results, mode, paper):
            table.add_row(*row)
        console.print(table)
        for line in (*between_lines(results, mode), *kernel_lines(results, mode)):
            console.print(line, markup=False)
        for one in results:
            if one["mode"] == mode and (trouble := problem(one)):
                console.print(f"{one['name']}: failed, {trouble}", style="red", markup=False)
        console.print()
    if paper:
        console.print(
            f"paper: {PAPER['model']} on a {PAPER['device']}, {PAPER['prompt_tokens']:,} tokens, GB of 10^9 bytes"
        )
