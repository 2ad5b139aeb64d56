"""The page of a result: Markdown for reading, JSON for programs, SVG and PNG where pictures can be drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError
from onptq.files import atomically, to_json
from onptq.page.contract import Plot
from onptq.page.vega import INSTALL, category, coloured, picture, quantity, tips, values, write_png, write_svg
from onptq.reproduce.record import Cell, Picture, Result, Table

SUMMARY = "summary.md"
ROW_STEP = 22
EXPLAINED = (
    "A claim holds where the whole 95% interval speaks for it, does not hold where all of it speaks\n"
    "against it, and is open otherwise. A difference that fewer than six items or prompts show has no\n"
    "interval."
)
POINT = {"type": "point", "filled": True, "size": 60, "opacity": 1}


def write_page(
    result: Result, command: str, folder: Path, note: Callable[[str], None] = lambda text: None
) -> list[Path]:
    """Write NAME.json, NAME.md and, with `onptq[figures]`, NAME.svg and NAME.png; return what was written.

    `note` gets why there is no picture where one cannot be drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {".json": to_json(result.to_dict() | {"command": command}, indent=2) + "\n"}
    written: list[Path] = []
    if result.picture is not None and result.picture.marks:
        drawn = plot(result.name, result.picture)
        try:
            for write, suffix in ((write_svg, ".svg"), (write_png, ".png")):
                write(drawn, folder / f"{result.name}{suffix}")
                written.append(folder / f"{result.name}{suffix}")
        except OnPTQError as error:  # an optional package draws
            note(f"no picture of {result.name}: {error}")
    files[".md"] = markdown(result, command, drawn=bool(written))
    for suffix, text in files.items():
        path = folder / f"{result.name}{suffix}"
        with atomically(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def markdown(result: Result, command: str, drawn: bool = False) -> str:
    """The page as text."""
    lines = [
        f"# {result.title}",
        "",
        "```bash",
        command,
        "```",
        "",
        "| claim | paper | here | verdict |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {_cell(one.says)} | {_cell(one.paper)} | {_cell(one.here)} | **{one.verdict}** |" for one in result.claims
    ]
    lines += ["", EXPLAINED, ""]
    if drawn:
        lines += [f"![{result.title}]({result.name}.svg)", ""]
    elif result.picture is not None and result.picture.marks:
        lines += [f"No picture: `{INSTALL}` draws it.", ""]
    for table in result.tables:
        lines += [f"**{table.title}**", "", *_table(table), ""]
    lines += ["What differs from the paper:", "", *(f"- {text}" for text in result.differs), ""]
    lines += ["Settings: " + "; ".join(f"{name} {_setting(value)}" for name, value in result.settings.items()) + "."]
    return "\n".join(lines) + "\n"


def _setting(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _table(table: Table) -> list[str]:
    lines = ["| " + " | ".join(map(_cell, table.heads)) + " |", "|" + "---|" * len(table.heads)]
    for place, row in enumerate(table.rows):
        cells = [
            f"**{_cell(cell)}**" if (place, column) in table.best else _cell(cell) for column, cell in enumerate(row)
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(value: Cell) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def plot(name: str, drawn: Picture) -> Plot:
    """Values with their intervals, coloured by group; beside each other where a row has several."""
    rows = [
        {"row": one.row, "group": one.group, "value": one.value, "low": one.low, "high": one.high}
        for one in drawn.marks
    ]
    groups = list(dict.fromkeys(one.group for one in drawn.marks))
    names = list(dict.fromkeys(one.row for one in drawn.marks))
    beside = len(drawn.marks) > len(names)
    offset = {"yOffset": {"field": "group", "sort": groups}} if beside else {}
    body: dict[str, Any] = {
        "data": values(rows),
        "height": {"step": ROW_STEP * (len(groups) + 1) // 2 if beside else ROW_STEP, "for": "position"},
        "encoding": {
            "y": category("row", sort=names, axis={"labelLimit": 260}),
            "color": coloured("group", groups),
            **offset,
        },
        "layer": [
            {
                "mark": {"type": "bar", "opacity": 0.6} if drawn.bars else POINT,
                "encoding": {
                    "x": quantity("value", drawn.unit or "value", scale={"zero": drawn.bars}),
                    "tooltip": tips(("row", "row"), ("group", "group"), ("value", "value")),
                },
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2},
                "transform": [{"filter": "datum.low != null && datum.high != null"}],
                "encoding": {"x": quantity("low", drawn.unit or "value"), "x2": {"field": "high"}},
            },
        ],
    }
    return picture(name, drawn.title, f"{'Bars' if drawn.bars else 'Points'} with 95% intervals.", body)


def write_summary(folder: Path) -> Path:
    """Write the claims of all results in a folder, side by side with the paper's numbers."""
    path = folder / SUMMARY
    text = "# Results\n\n" + summary(read_results(folder), "")
    with atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def read_results(folder: Path) -> list[Mapping[str, Any]]:
    """The results in a folder, in the order of the catalog."""
    from onptq.reproduce.catalog import NAMES

    files = [folder / f"{name}.json" for name in NAMES]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]


def summary(results: Sequence[Mapping[str, Any]], where: str) -> str:
    """A table of claims: the paper's number, ours and the verdict; `where` leads from the text to the pages."""
    lines = ["| result | claim | paper | here | verdict |", "|---|---|---|---|---|"]
    for one in results:
        scale = f", {one['settings']['scale']}" if "scale" in one["settings"] else ""
        for place, claim in enumerate(one["claims"]):
            name = f"[{one['name']}]({where}{one['name']}.md){scale}" if place == 0 else ""
            cells = " | ".join(_cell(claim[part]) for part in ("says", "paper", "here"))
            lines.append(f"| {name} | {cells} | **{claim['verdict']}** |")
    counts = ["holds", "does not hold", "open", "not measured"]
    verdicts = [claim["verdict"] for one in results for claim in one["claims"]]
    total = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in counts if verdict in verdicts)
    return "\n".join(lines) + f"\n\n{EXPLAINED}\n\nOf {len(verdicts)} claims: {total}.\n"
