"""The origin of a candidate and its future: how it was made, and what servers make of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onptq.checkpoint.serving import serve_command, serving
from onptq.page.contract import Served
from onptq.registry import METHODS
from onptq.schemes import Floats, Grid, Scheme


def served_by(scheme: str | None) -> list[Served]:
    """What servers make of a checkpoint of the scheme; hardware on which it is the same is one entry."""
    hardware: dict[tuple[str, str, str, str], list[str]] = {}
    for row in serving(Scheme.parse(scheme)) if scheme else ():
        computes = {"refuses": "nothing", "doubtful": "unknown"}.get(row.verdict, row.computes)
        computes += f", not {scheme}" if row.verdict == "differs" else ""
        command = serve_command("DIR", row) if row.verdict == "serves" else ""
        hardware.setdefault((row.server, computes, command, row.note), []).append(row.hardware)
    return [Served(server, ", ".join(on), *rest) for (server, *rest), on in hardware.items()]


def how_made(identity: Mapping[str, Any]) -> str:
    """What was quantized and how, in a sentence, from the record of a candidate."""
    if "stored" in identity:
        return f"A checkpoint that was made elsewhere: {_formats(Scheme.parse(identity['stored']))}."
    if "scheme" not in identity:
        return "A checkpoint that was made elsewhere."
    bits = _formats(Scheme.parse(identity["scheme"]))
    recipe, method = identity.get("recipe"), identity.get("method")
    if recipe is not None:
        rounds = "one round" if recipe["rounds"] == 1 else f"{recipe['rounds']} rounds"
        return f"Decoder {bits}: {METHODS.label(recipe['init'])}, then {rounds} of {display(str(method))}."
    return f"Decoder {bits}: {METHODS.label(method)}." if method else f"Decoder {bits}, by a finished run."


def display(name: str) -> str:
    """The name of a method or a candidate as people write it."""
    return re.sub(r"^onptq(?=$|[:@#])", "OnPTQ", METHODS.label(name))


def _formats(scheme: Scheme) -> str:
    bits = f"weights in {_numbers(scheme.weight_grid)}"
    rows = f"{scheme.block_rows} x " if scheme.block_rows > 1 else ""
    bits += f" by groups of {rows}{scheme.group_size}" if scheme.group_size is not None else ""
    bits += (
        f", activations in {_numbers(scheme.activation_grid)}"
        if scheme.quantizes_activations
        else ", activations as they were"
    )
    bits += "" if scheme.cache_floats is None else f", KV cache in {_numbers(scheme.cache_floats)}"
    return bits + (f", and others for {', '.join(pattern for pattern, _ in scheme.others)}" if scheme.others else "")


def _numbers(grid: Grid) -> str:
    return f"{grid.bits}-bit floats" if isinstance(grid, Floats) else f"{grid} bits"
