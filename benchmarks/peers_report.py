"""What gpu_peers.py makes of its records: the seconds that are compared, ratios and a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

TOOLS = ("onptq", "autoround")
START, LOADING, SAVING = "Start", ("Hash", "Load"), ("Export",)


def counted(record: Mapping[str, Any]) -> dict[str, Any]:
    """With the seconds that the comparison is about, and those before and after."""
    if "error" in record:
        return dict(record)
    phases: Mapping[str, float] = record["phases"]
    load, save = (sum(phases.get(phase, 0.0) for phase in named) for named in (LOADING, SAVING))
    apart = {START, *LOADING, *SAVING}
    seconds = sum(spent for phase, spent in phases.items() if phase not in apart)
    return {"seconds": seconds, "load": load, "save": save, **record}


def ratios(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """OnPTQ over AutoRound: seconds, seconds with loading and saving, and memory; nothing where one of them is missing."""
    if any("seconds" not in arms.get(tool, {}) for tool in TOOLS):
        return {}
    ours, theirs = (arms[tool] for tool in TOOLS)
    found = {"seconds": ours["seconds"] / theirs["seconds"]}
    if theirs["save"]:
        whole = [arm["load"] + arm["seconds"] + arm["save"] for arm in (ours, theirs)]
        found["whole"] = whole[0] / whole[1]
    if ours["peak_bytes"] and theirs["peak_bytes"]:
        found["peak"] = ours["peak_bytes"] / theirs["peak_bytes"]
    return found


def show(console: Console, report: Mapping[str, Any]) -> None:
    table = Table("setting", "tool", box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("seconds", "of that Encode", "load", "save", "peak GiB"):
        table.add_column(head, justify="right")
    for setting, arms in report["arms"].items():
        for tool, found in arms.items():
            if "error" in found:
                table.add_row(setting, tool, "failed", "", "", "", "")
                continue
            seconds = [found["seconds"], found["phases"]["Encode"], found["load"], found["save"]]
            peak = found["peak_bytes"]
            row = [f"{each:.2f}" for each in seconds] + ["" if peak is None else f"{peak / 2**30:.2f}"]
            table.add_row(setting, tool, *row)
    console.print(table)
    for setting, found in report["ratios"].items():
        if found:
            whole = f", {found['whole']:.2f} with loading and saving" if "whole" in found else ""
            console.print(f"{setting}: OnPTQ takes {found['seconds']:.2f} of AutoRound's time{whole}")
