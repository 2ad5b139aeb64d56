"""`onptq advise`: which scheme to take for a GPU and a model, and why."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer

from onptq.checkpoint.served import EVIDENCE
from onptq.checkpoint.serving import serve_command
from onptq.errors import printable

if TYPE_CHECKING:
    from onptq.plan.advice import Advice, Choice


def advise(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model whose size decides what fits: a folder, a downloaded hub id, or a name of `onptq zoo list`.",
            show_default="none: schemes by rule alone",
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="GPU that will serve it: a100-40g, h200, l4-24g, rtx5090, ..., or its generation.")
    ] = ...,  # type: ignore[assignment]
    memory: Annotated[
        float | None, typer.Option(min=1, help="GiB that there are for the model.", show_default="all of the GPU's")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the KV cache, of all requests together.")] = 8192,
    json: Annotated[bool, typer.Option("--json", help="Print the advice as JSON.")] = False,
) -> None:
    """Say which scheme to take, and why, without loading a weight.

    Exit code 1 where nothing fits.
    """
    from onptq.plan.advice import advise as advise_for

    result = advise_for(gpu, memory, model, context)
    typer.echo(json_format.dumps(result.to_json(), indent=2) if json else "\n".join(_lines(result)))
    if result.best is None:
        raise typer.Exit(1)


def _lines(advice: Advice) -> list[str]:
    from onptq.plan.advice import SHARE

    target, best = advice.target, advice.best
    room = "" if target.gib is None else f", {target.gib:g} GiB"
    where = f"{target.name} ({target.generation}{room})"
    whose = "" if advice.model is None else f" of {printable(advice.model)}"
    lines = [f"nothing{whose} fits on {where}" if best is None else f"take {best.scheme}{whose} on {where}"]
    if advice.model is not None:
        lines.append(
            f"fits: weights and the KV cache of {advice.context:,} tokens take at most {SHARE:.0%} of the memory; the "
            "rest is assumed to do for activations and the server"
        )
    for number, choice in enumerate(advice.choices, 1):
        lines += ["", *_choice(number, choice)]
    lines += ["", "left out:", *(f"- {one.scheme}: {one.why}" for one in advice.left_out)] if advice.left_out else []
    return lines


def _choice(number: int, choice: Choice) -> list[str]:
    from onptq.files import size

    row = choice.row
    if choice.weight_bytes is None or choice.cache_bytes is None:
        room = f"{choice.bits:g} bits a weight"
    else:
        verdict = "fits" if choice.fits else "does not fit"
        room = f"{size(choice.weight_bytes)} of weights + {size(choice.cache_bytes)} of KV cache: {verdict}"
    note = [f"   {row.note}"] if row.note else []
    return [
        f"{number}. {choice.scheme}: {room}",
        f"   why: {choice.reason}",
        f"   {row.server}, {row.kernel}: {row.computes} ({row.evidence}: {EVIDENCE[row.evidence]})",
        *note,
        f"   {serve_command('FOLDER', row)}",
        *(f"   also {one.server}, {one.kernel}: {one.computes} ({one.evidence})" for one in choice.also),
    ]
