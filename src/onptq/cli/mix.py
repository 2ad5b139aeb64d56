"""`onptq mix`: a scheme for every linear under a budget of bits, by what each saves of KL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onptq.cli import options
from onptq.cli.settings import ZOO, make_reporter, resolve_recipe, use_one_thread
from onptq.errors import OnPTQError
from onptq.schemes import Scheme

SHOWN = 10  # rows of the table


def mix(
    model: Annotated[str, typer.Argument(help="Model to mix for: a folder, a hub id, or a name of `onptq zoo list`.")],
    bits: Annotated[float, typer.Option(help="Bits a weight that the linears may take on average.")],
    raised: Annotated[str, typer.Option("--raise", help="Scheme of the linears that are raised.")],
    out: Annotated[Path, typer.Option(help="Folder of the table and of what was measured.")],
    scheme: options.Scheme = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Manifest of prompts.", show_default="the zoo's own for models of the zoo")
    ] = None,
    preset: options.Preset = None,
    changes: options.Changes = None,
    init: Annotated[str, typer.Option(help=options.INIT_HELP)] = "search",
    device: options.Device = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the mix, warnings and errors.")] = False,
) -> None:
    """Measure what raising single linears saves, and take the best under a budget. Killed, the same command continues.

    A mix that is worse than SCHEME on held-out prompts is refused.

    `onptq quantize --mix OUT/mix.json` quantizes with the result.
    """
    if calibration is None and not model.startswith(ZOO):
        raise OnPTQError("expected --calibration, a .jsonl or .parquet manifest of prompts")
    use_one_thread(model)
    chosen = {"scheme": scheme, "init": init, "compute.device": device}
    recipe = resolve_recipe(preset, None, chosen, changes, model=model)
    from onptq.checkpoint.source import find_source
    from onptq.evaluate.mixing import MIX, mix_under_budget
    from onptq.zoo.materials import draw_calibration

    reporter, source = make_reporter(quiet, False), find_source(model)
    prompts, held = (calibration, None) if calibration else draw_calibration(source.family.name, recipe.data, reporter)
    mix = mix_under_budget(source, out, recipe, Scheme.parse(raised), bits, prompts, held, reporter)
    allocation, judgement = mix.allocation, mix.judgement
    if not quiet:
        for number, gain in enumerate(allocation.gains[:SHOWN], 1):
            taken = "raised" if set(gain.linears) <= set(allocation.raised) else "left"
            typer.echo(
                f"{number:3} {taken:6} saves {gain.saved:.3g} of KL for {gain.bytes:,} bytes: {', '.join(gain.linears)}"
            )
    typer.echo(
        f"{allocation.bits:.3g} bits a weight, {allocation.chosen} of {len(allocation.gains)} groups raised to {raised}: "
        f"KL {allocation.kl:.4g} -> {allocation.measured:.4g} measured, {allocation.added:.4g} if savings added up"
    )
    if judgement is None:
        reporter.warn("no held-out prompts (data.holdout): whether the mix is better elsewhere was not measured")
    else:
        low, high = judgement.change.low, judgement.change.high
        interval = "" if low is None or high is None else f", difference [{low:.3g}, {high:.3g}]"
        typer.echo(
            f"{judgement.prompts} held-out prompts, each scheme on its own answers: KL {judgement.start:.4g} -> "
            f"{judgement.mix:.4g}{interval}"
        )
        if high is None or high >= 0:
            reporter.warn(
                "held-out prompts do not show that the mix is better than the scheme it starts from: more of them or "
                "longer answers may tell more"
            )
    typer.echo(f"onptq quantize {model} --scheme {recipe.scheme} --mix {out / MIX}")
