"""The command line: one file per command; each parses, calls one library function and prints."""

from __future__ import annotations

import builtins
import errno
import os
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from onptq.cli import (
    advise,
    compare,
    data,
    diff,
    evaluate,
    inspect,
    list,
    mix,
    plan,
    quantize,
    recipe,
    report,
    reproduce,
    verify,
    view,
    zoo,
)
from onptq.errors import OnPTQError, RaisedElsewhereError, printable
from onptq.ranks import is_first, started

GROUP = "onptq.commands"  # entry points by which other packages add commands: a function each, as typer takes it
ELSEWHERE = {"bench": "onptq-vllm", "tune": "onptq-vllm"}  # the package that has a command
RESUMED = ("quantize", "compare", "diff", "eval")  # the same command goes on where a killed one was
SHARED = "quantize"  # the command that several processes work on
CONTINUES = "finished steps are kept, the same command continues the run"
SCARCE = {  # limits of a machine or a shell
    errno.EMFILE: "too many open files: raise the limit (`ulimit -n`)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENOMEM: "not enough memory",
}
ALLOCATOR = ("can't allocate memory", "std::bad_alloc", "out of memory")  # what torch says of it


class Commands(TyperGroup):
    """Errors a user can fix end with exit code 2 and no traceback; all others keep theirs."""

    def list_commands(self, ctx: Any) -> builtins.list[str]:
        return [*super().list_commands(ctx), *sorted(_contributed())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        if (entry := _contributed().get(cmd_name)) is not None:
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(cmd_name)(entry.load())
            return typer.main.get_command(alone)
        if cmd_name in ELSEWHERE:
            package = ELSEWHERE[cmd_name]
            raise OnPTQError(f"`onptq {cmd_name}` comes with another package: pip install {package}")
        return None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RaisedElsewhereError:
            raise typer.Exit(2) from None
        except OnPTQError as error:
            _complain(f"error: {error}")
            raise typer.Exit(2) from None
        except (MemoryError, OSError, RuntimeError) as error:
            lacking = _lacking(error)
            if lacking is None:
                raise
            _complain(f"error: {lacking}{_advice(ctx)}")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            _complain(f"interrupted{_advice(ctx)}")
            raise typer.Exit(130) from None


def _lacking(error: BaseException) -> str | None:
    """The limit that an error has met, in words; libraries in C++ say only in words of theirs which it was."""
    if isinstance(error, MemoryError):
        return SCARCE[errno.ENOMEM]
    if isinstance(error, OSError) and error.errno in SCARCE:
        return SCARCE[error.errno]
    text = str(error)
    numbers = [number for number in SCARCE if os.strerror(number).lower() in text.lower()]
    numbers += [errno.ENOMEM for words in ALLOCATOR if words in text]
    return SCARCE[numbers[0]] if numbers else None


def _complain(text: str) -> None:
    """Print an error, without the control characters that a file's name or content may have brought."""
    typer.echo(printable(text, also="\n\t"), err=True)


def _advice(ctx: Any) -> str:
    """What to do after an error that is no fault of the run."""
    return f": {CONTINUES}" if ctx.invoked_subcommand in RESUMED else ""


def _contributed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


app = typer.Typer(
    cls=Commands,
    help="On-policy post-training quantization for multimodal LLMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import onptq

        typer.echo(onptq.__version__)
        raise typer.Exit()


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if started() > 1 and context.invoked_subcommand != SHARED:
        shown = OnPTQError if is_first() else RaisedElsewhereError
        raise shown(f"torchrun started {started()} processes, and only `onptq {SHARED}` shares its work among them")


app.command("quantize")(quantize.quantize)
app.command("plan")(plan.plan)
app.command("advise")(advise.advise)
app.command("mix")(mix.mix)
app.command("verify")(verify.verify)
app.command("inspect")(inspect.inspect)
app.command("compare")(compare.compare)
app.command("diff")(diff.diff)
app.command("eval")(evaluate.evaluate)
app.command("report")(report.report)
app.command("view")(view.view)
app.command("recipe")(recipe.recipe)
app.command("list")(list.list_names)
app.add_typer(reproduce.app, name="reproduce")
app.add_typer(data.app, name="data")
app.add_typer(zoo.app, name="zoo")


def main() -> None:
    app()
