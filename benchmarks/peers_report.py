"""The report of gpu_peers.py from its records: the seconds that are compared, ratios and a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

TOOLS = ("onptq", "autoround")
START, LOADING, SAVING = "Start", ("Hash", "Load"), ("Export",)


def counted(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the seconds that are compared, and those of loading and saving."""
    if "error" in record:
        return dict(record)
    phases: Mapping[str, float] = record["phases"]
    load, save = (sum(phases.get(phase, 0.0) for phase in named) for named in (LOADING, SAVING))
    apart = {START, *LOADING, *SAVING}
    seconds = sum(spent for phase, spent in phases.items() if phase not in apart)
    return {"seconds": seconds, "load": load, "save": save, **record}


def ratios(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """OnPTQ over AutoRound: seconds, seconds with loading and saving, memory. Empty where one of the two failed."""
    if any("seconds" not in arms.get(tool, {}) for tool in TOOLS):
        return {}
    ours, theirs = (arms[tool] for tool in TOOLS)
    result = {"seconds": ours["seconds"] / theirs["seconds"]}
    if theirs["save"]:
        whole = [arm["load"] + arm["seconds"] + arm["save"] for arm in (ours, theirs)]
        result["whole"] = whole[0] / whole[1]
    if ours["peak_bytes"] and theirs["peak_bytes"]:
        result["peak"] = ours["peak_bytes"] / theirs["peak_bytes"]
    return result


def show(console: Console, report: Mapping[str, Any]) -> None:
    table = Table("setting", "tool", box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("seconds", "of that Encode", "load", "save", "peak GiB"):
        table.add_column(head, justify="right")
    for setting, arms in report["arms"].items():
        for tool, record in arms.items():
            if "error" in record:
                table.add_row(setting, tool, "failed", "", "", "", "")
                continue
            seconds = [record["seconds"], record["phases"]["Encode"], record["load"], record["save"]]
            peak = record["peak_bytes"]
            row = [f"{each:.2f}" for each in seconds] + ["" if peak is None else f"{peak / 2**30:.2f}"]
            table.add_row(setting, tool, *row)
    console.print(table)
    for setting, ratio in report["ratios"].items():
        if ratio:
            whole = f", {ratio['whole']:.2f} with loading and saving" if "whole" in ratio else ""
            console.print(f"{setting}: OnPTQ takes {ratio['seconds']:.2f} of AutoRound's time{whole}")
