"""`onptq inspect`: what a checkpoint is, whoever made it, and what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from onptq.check.defects import Inspection
    from onptq.check.description import Description
    from onptq.check.fix import Mended
    from onptq.check.subject import Defect


def inspect(
    checkpoint: Annotated[
        str, typer.Argument(metavar="FOLDER", help="The checkpoint's folder, or a name of `onptq zoo list`.")
    ],
    fix: Annotated[
        Path | None, typer.Option("--fix", metavar="OUT", help="Write a corrected copy into the new folder OUT.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what the checkpoint in FOLDER is and name its known defects, from headers and JSON alone.

    Exit code 1 if there are defects, or, with --fix, if some are left in the copy.
    """
    from onptq.check.defects import inspect_folder
    from onptq.check.fix import mend_folder
    from onptq.checkpoint.catalogs import is_cataloged, locate

    folder = locate(checkpoint) if is_cataloged(checkpoint) else Path(checkpoint)
    mended = mend_folder(folder, fix) if fix is not None else None
    inspection = mended.before if mended is not None else inspect_folder(folder)
    if as_json:
        typer.echo(json.dumps(_record(inspection, mended), indent=2))
    else:
        _print(inspection, mended)
    left = mended.after if mended is not None else inspection
    raise typer.Exit(1 if left.defects else 0)


def _record(inspection: Inspection, mended: Mended | None) -> dict[str, Any]:
    record: dict[str, Any] = asdict(inspection.description) | {
        "defects": [asdict(defect) for defect in inspection.defects],
        "notes": [asdict(note) for note in inspection.notes],
    }
    if mended is not None:
        record["fix"] = {
            "out": str(mended.out) if mended.out is not None else None,
            "changes": list(mended.changes),
            "left": [asdict(defect) for defect in mended.after.defects],
        }
    return record


def _print(inspection: Inspection, mended: Mended | None) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    _print_description(console, inspection.description)
    _print_findings(console, "defects", inspection.defects, "red")
    _print_findings(console, "notes", inspection.notes, "yellow")
    if not inspection.defects:
        console.print("\nno defects found", style="green")
    if mended is not None:
        _print_mended(console, mended)


def _print_description(console: Console, it: Description) -> None:
    rows = [
        ("architecture", f"{it.architecture or 'unknown'} ({it.family or 'a family that OnPTQ does not quantize'})"),
        ("weights", f"{_size(it.bytes)} in {it.shards} shard{'s' if it.shards != 1 else ''}"),
        *(("", f"{part.name}: {_size(part.bytes)}, {_carried(part.quantized)}") for part in it.parts),
        *_quantization_rows(it),
        ("made by", "; ".join(it.makers) or "the files do not say"),
        ("beside it", ", ".join(f"{role} {file or '(missing)'}" for role, file in it.companions.items())),
        *((("served by" if not i else ""), _served(row)) for i, row in enumerate(it.serving)),
    ]
    if it.unchecked:
        rows.append(("not checked", f"names and shapes at run time: {it.unchecked}"))
    for name, value in rows:
        console.print(f"{name:14}{value}")


def _quantization_rows(it: Description) -> list[tuple[str, str]]:
    stated = it.quantization
    if stated is None:
        return [("quantization", f"none declared{_stored(it)}")]
    rows = [("quantization", f"{it.scheme + ', ' if it.scheme else ''}{stated.method}, {stated.format}{_stored(it)}")]
    for group in stated.groups:
        rows.append(("", f"weights {group.weights or 'unchanged'}; activations {group.activations or 'unchanged'}"))
        rows.append(("", f"targets {', '.join(group.targets)}"))
    shown = ", ".join(stated.ignore[:5]) + (f" and {len(stated.ignore) - 5} more" if len(stated.ignore) > 5 else "")
    return [*rows, ("", f"ignored: {shown or 'nothing'}"), ("", f"KV cache: {stated.kv_cache or 'unchanged'}")]


def _print_findings(console: Console, title: str, findings: tuple[Defect, ...], style: str) -> None:
    if not findings:
        return
    console.print(f"\n{len(findings)} {title if len(findings) > 1 else title.removesuffix('s')}", style=f"bold {style}")
    for finding in findings:
        console.print(f"  {finding.name}" + (" (--fix mends it)" if finding.mendable else ""), style=style)
        console.print(f"    {finding.found}")
        console.print(f"    {finding.why}", style="dim")


def _print_mended(console: Console, mended: Mended) -> None:
    if mended.out is None:
        console.print("\nnothing that --fix can mend: no copy was written")
        return
    console.print(f"\nwrote {mended.out}", style="bold")
    for change in mended.changes:
        console.print(f"  {change}")
    left = ", ".join(defect.name for defect in mended.after.defects)
    console.print(f"left as it is: {left}" if left else "no defects left", style="red" if left else "green")


def _served(row: Any) -> str:
    with_switch = f" with {row.switch}" if row.switch else ""
    kernel = f" ({row.kernel})" if row.kernel else ""
    return f"{row.server} on {row.hardware}{with_switch}: {row.verdict}, {row.computes}{kernel}"


def _stored(it: Description) -> str:
    kinds = ", ".join(f"{count} modules {kind}" for kind, count in it.stored_as.items())
    return f"; stored: {kinds}" if kinds else "; no quantized tensors"


def _carried(quantized: int) -> str:
    return f"{quantized} quantized modules" if quantized else "dense"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
