"""The command line: one file per command; each parses, calls one library function and prints."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from onptq.cli import bench, compare, inspect, plan, quantize, recipe, tune, verify, zoo
from onptq.errors import OnPTQError

RESUMED = ("quantize", "compare")  # the same command goes on where a killed one was


class Commands(TyperGroup):
    """Errors a user can mend end with exit code 2 and no traceback; all others keep theirs."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OnPTQError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            kept = ": finished steps are kept, the same command continues the run"
            typer.echo(f"interrupted{kept if ctx.invoked_subcommand in RESUMED else ''}", err=True)
            raise typer.Exit(130) from None


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
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("quantize")(quantize.quantize)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("inspect")(inspect.inspect)
app.command("compare")(compare.compare)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("recipe")(recipe.recipe)
app.add_typer(zoo.app, name="zoo")


def main() -> None:
    app()
