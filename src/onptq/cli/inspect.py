"""`onptq inspect`: a description of a checkpoint, whoever made it, and its defects."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from onptq.check.description import Description, Part
    from onptq.check.findings import Finding
    from onptq.check.fix import Fix
    from onptq.check.static import Inspection
    from onptq.checkpoint.served import Served


def inspect(
    checkpoint: Annotated[
        str, typer.Argument(metavar="FOLDER", help="The checkpoint's folder, or a name of `onptq zoo list`.")
    ],
    fix: Annotated[
        Path | None, typer.Option("--fix", metavar="OUT", help="Write a corrected copy into the new folder OUT.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only defects.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Describe the checkpoint in FOLDER and name its defects, from headers, scales and JSON alone.

    Exit code 1 if there are defects, or, with --fix, if some are left in the copy.
    """
    from onptq.check.fix import fix_folder
    from onptq.check.static import inspect_folder
    from onptq.checkpoint.catalogs import is_cataloged, locate

    folder = locate(checkpoint) if is_cataloged(checkpoint) else Path(checkpoint)
    result = fix_folder(folder, fix) if fix is not None else None
    inspection = result.before if result is not None else inspect_folder(folder)
    if as_json:
        typer.echo(json.dumps(_record(inspection, result), indent=2))
    else:
        _print(inspection, result, quiet)
    left = result.after if result is not None else inspection
    raise typer.Exit(1 if left.defects else 0)


def _record(inspection: Inspection, fix: Fix | None) -> dict[str, Any]:
    record: dict[str, Any] = asdict(inspection.description) | {
        "defects": [asdict(defect) for defect in inspection.defects],
        "notes": [asdict(note) for note in inspection.notes],
    }
    if fix is not None:
        record["fix"] = {
            "out": str(fix.out) if fix.out is not None else None,
            "changes": list(fix.changes),
            "left": [asdict(defect) for defect in fix.after.defects],
        }
    return record


def _print(inspection: Inspection, fix: Fix | None, quiet: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not quiet:
        _print_description(console, inspection.description)
    _print_findings(console, "defects", inspection.defects, "red")
    if not quiet:
        _print_findings(console, "notes", inspection.notes, "yellow")
        if not inspection.defects:
            console.print("\nno defects found", style="green")
        if fix is not None:
            _print_fix(console, fix)


def _print_description(console: Console, it: Description) -> None:
    from onptq.errors import printable
    from onptq.files import size

    rows = [
        ("architecture", f"{it.architecture or 'unknown'} ({it.family or 'a family that OnPTQ does not quantize'})"),
        ("weights", f"{size(it.bytes)} in {it.shards} shard{'s' if it.shards != 1 else ''}"),
        *(("", f"{part.name}: {size(part.bytes)}, {_quantized(part)}") for part in it.parts),
        *_quantization_rows(it),
        ("made by", "; ".join(it.makers) or "the files do not say"),
        ("beside it", ", ".join(f"{role} {file or '(missing)'}" for role, file in it.companions.items())),
        *((("served by" if not i else ""), _served(row)) for i, row in enumerate(it.serving)),
    ]
    if it.unchecked:
        rows.append(("not checked", f"names and shapes at run time: {it.unchecked}"))
    for name, value in rows:
        console.print(f"{name:14}{printable(value)}")


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


def _print_findings(console: Console, title: str, findings: tuple[Finding, ...], style: str) -> None:
    from onptq.errors import printable

    if not findings:
        return
    console.print(f"\n{len(findings)} {title if len(findings) > 1 else title.removesuffix('s')}", style=f"bold {style}")
    for finding in findings:
        console.print(f"  {finding.name}" + (" (--fix corrects it)" if finding.fixable else ""), style=style)
        console.print(f"    {printable(finding.what)}")
        console.print(f"    {finding.why}", style="dim")


def _print_fix(console: Console, fix: Fix) -> None:
    from onptq.errors import printable

    if fix.out is None:
        console.print("\nnothing that --fix can correct: no copy was written")
        return
    console.print(f"\nwrote {fix.out}", style="bold")
    for change in fix.changes:
        console.print(f"  {printable(change)}")
    left = ", ".join(defect.name for defect in fix.after.defects)
    console.print(f"left as it is: {left}" if left else "no defects left", style="red" if left else "green")


def _served(row: Served) -> str:
    with_switch = f" with {row.switch}" if row.switch else ""
    kernel = f" ({row.kernel})" if row.kernel else ""
    return f"{row.server} on {row.hardware}{with_switch}: {row.verdict}, {row.computes}{kernel}"


def _stored(it: Description) -> str:
    kinds = ", ".join(f"{count} modules {kind}" for kind, count in it.stored_as.items())
    return f"; stored: {kinds}" if kinds else "; no quantized tensors"


def _quantized(part: Part) -> str:
    return f"{part.quantized} quantized modules" if part.quantized else "dense"
