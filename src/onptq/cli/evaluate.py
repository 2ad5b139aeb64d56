"""`onptq eval`: benchmarks of lmms-eval, or tasks of lm-evaluation-harness, with the same settings for every model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onptq.cli import options
from onptq.cli.settings import make_reporter, short_name
from onptq.cli.terminal import make_table
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.harness.run import Arm

ALL = "mmmu,ocrbench,vizwiz,scienceqa,textvqa,librispeech,wenetspeech,omnibench"


def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint, dense or quantized: a folder, a hub id, or a name of `onptq zoo list`; with --endpoint what the "
            "server calls it."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help=f"Some of {ALL}; of a text model: tasks of lm-evaluation-harness, e.g. arc_easy,gsm8k."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of results and answers; tasks that are in it already are not run again.",
            show_default="the model's name, e.g. qwen2.5-vl-eval",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of local copies, and no network: TASK.parquet, TASK/*.parquet or TASK/ as `datasets` saves it, by "
            "lmms-eval's names of the tasks.",
            show_default="lmms-eval's own, from the hub",
        ),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Ask a server instead: its address up to /v1.")] = None,
    environment: Annotated[
        Path | None,
        typer.Option(help="Environment of the tools.", show_default="in OnPTQ's cache folder"),
    ] = None,
    make_environment: Annotated[
        Path | None, typer.Option(help="Make that environment in this folder, by pip: 2.5 GB.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first items of each task.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Items at a time.")] = 1,
    repetition_penalty: Annotated[float, typer.Option(min=0.1, help="The same for all arms; 1 is none.")] = 1.0,
    device: Annotated[str, typer.Option(help=options.DEVICE_HELP)] = "auto",
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--model-arg",
            metavar="NAME=VALUE",
            help="One more argument of the model, e.g. max_pixels=1003520; repeatable. The same for all arms.",
        ),
    ] = None,
    task_files: Annotated[
        Path | None, typer.Option(help="Folder of further task files of lm-evaluation-harness.")
    ] = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Run benchmarks on MODEL in an environment of their own, and keep every answer for `onptq compare --samples`."""
    from onptq.checkpoint.source import choose_device
    from onptq.files import cache_folder
    from onptq.harness.environment import Environment
    from onptq.harness.run import REQUIREMENTS, Evaluation, Settings, find_environment

    reporter = make_reporter(quiet, json)
    if make_environment is not None:
        seconds = Environment(make_environment.absolute(), REQUIREMENTS).make()
        typer.echo(f"{make_environment}: " + ("is there" if seconds is None else f"made in {seconds:.0f} s"))
        if model is None and tasks is None:
            return
    if model is None or tasks is None:
        raise OnPTQError("expected MODEL and --tasks, or --make-environment alone")
    tools = find_environment((make_environment or environment or cache_folder() / "harness").absolute())
    arm, text = find_arm(model, endpoint)
    extra = dict(one.partition("=")[::2] for one in arguments or [])
    chosen = None if arm.folder is None else str(choose_device(device))
    settings = Settings(repetition_penalty, limit, batch, chosen, extra)
    folder = out if out is not None else Path(f"{short_name(model)}-eval")
    evaluation = Evaluation(folder.absolute(), tools, arm, settings, reporter)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if text:
        if data is not None:
            raise OnPTQError("--data is for lmms-eval; a text model takes --task-files, which name their own data")
        results = evaluation.text_tasks(names, task_files)
    else:
        from onptq.harness.benchmarks import find_tasks

        results = evaluation.benchmarks(find_tasks(names), data)
    if json:
        reporter.result(results)
    elif not quiet:
        print_results(results, folder)


def find_arm(model: str, endpoint: str | None) -> tuple[Arm, bool]:
    """Who answers, and whether it is a text model, for which lm-evaluation-harness asks."""
    from onptq.harness.run import Arm

    if endpoint is not None:
        if not endpoint.startswith(("http://", "https://")):
            raise OnPTQError(f"--endpoint {endpoint}: expected an address such as http://127.0.0.1:8000/v1")
        return Arm(model, endpoint=endpoint), False
    from onptq.checkpoint.source import find_source, is_hub_id, open_checkpoint

    source = find_source(model) if is_hub_id(model) else open_checkpoint(model)
    return Arm(model, source.folder.absolute()), source.family.modalities == {"text"}


def print_results(results: dict[str, Any], folder: Path) -> None:
    from rich.console import Console

    table = make_table("task", "metric", "value >", "seconds >")
    for record in results.values():
        rows = [(task, name, value) for task, values in record["results"].items() for name, value in values.items()]
        for place, (task, name, value) in enumerate(rows):
            table.add_row(task, name, f"{value:.4g}", "" if place else f"{record['seconds']:.0f}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"Answers: {folder}. Compare with: onptq compare --samples DENSE-eval {folder}", markup=False)
