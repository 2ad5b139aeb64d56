"""A finished run on the terminal: its figures, the comparison with its baselines, and answers that differ."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onptq.cli.report_tables import print_table

if TYPE_CHECKING:
    from rich.text import Text

    from onptq.data.prompts import Prompt
    from onptq.evaluate.summary import Report
    from onptq.evaluate.tasks import Item

IMAGES = "examples"  # folder of the images of the examples, beside the comparison's report
IMAGE_COLUMNS = 32
NAMES = {"rtn": "RTN", "onptq": "OnPTQ"}


def overview(summary: Mapping[str, Any], path: Path | str) -> Iterator[tuple[str, str]]:
    """The few lines of a summary that a user wants to see at once; what the summary lacks is left out."""
    from onptq.files import size
    from onptq.run import run_home

    for name in ("scheme", "method"):
        if name in summary:
            yield name, str(summary[name])
    choice = _mapping(summary.get("choice"))
    held_out = _mapping(summary.get("holdout"))
    names = ("initial", "calibrated") if summary.get("rounds") else ("final",)
    sides = [_mapping(held_out.get(side)) for side in names]
    rounded = _mapping(held_out.get("rtn")) if summary.get("method") != "rtn" else {}
    for key, name, form in (
        ("mismatch_percent", "changed decisions", "{:.2f}%"),
        ("reworded_percent", "reworded answers", "{:.0f}%"),
        ("erosion", "margin erosion", "{:.4f}"),
        ("kl", "KL to dense", "{:.5f}"),
    ):
        values = [form.format(side[key]) for side in sides if isinstance(side.get(key), int | float)]
        if values:
            change = _change(_mapping(choice.get(key.removesuffix("_percent"))), form)
            notes = [f"init -> calibrated{change}"] if len(values) > 1 else []
            if isinstance(rounded.get(key), int | float):
                notes.append(f"plain rounding: {form.format(rounded[key])}")
            yield f"held-out {name}", " -> ".join(values) + (f" ({'; '.join(notes)})" if notes else "")
    same = (
        ("sqrt(KL / 2)", "tv_bound", "{:+.5f}"),
        ("KL", "kl", "{:+.5f}"),
        ("changed decisions", "mismatch", "{:+.2f}%"),
    )
    changes = [name + change for name, key, form in same if (change := _same_states(choice, key, form))]
    if changes:
        yield "on the same states", "; ".join(changes)
    if "kept" in choice:
        why = choice.get("why", "calibration did not help")
        yield "weights kept", "calibrated" if choice["kept"] == "calibrated" else f"those of the init: {why}"
    rounds = [_best_step(figures) for figures in summary.get("rounds") or () if "best_step" in figures]
    if rounds:
        yield "best theta", ", ".join(f"round {k}: {which}" for k, which in enumerate(rounds, 1))
    yield from _server_choices(summary.get("rounds") or ())
    steps: dict[str, float] = {}
    for phase, seconds in _mapping(summary.get("seconds")).items():
        step = phase.split()[0]  # "Follow 1" and "Follow 2" are both Follow
        steps[step] = steps.get(step, 0.0) + seconds
    if steps:
        parts = ", ".join(f"{step} {seconds:.1f}" for step, seconds in steps.items())
        yield "time", f"{sum(steps.values()):.0f} s ({parts})"
    weights = _mapping(summary.get("checkpoint")).get("bytes")
    if isinstance(weights, int | float):
        yield "weights", size(weights)
    yield "checkpoint", str(path)
    yield "run files", f"{run_home(path)} (hold the prompts: do not upload them)"


def _server_choices(rounds: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Of rounds whose rollouts a server wrote: how often it chose another token than Q."""
    from onptq.cycle.disagreements import sentence

    for k, figures in enumerate(rounds, 1):
        if "server_clear" in figures:
            yield f"vLLM's choices{f', round {k}' if len(rounds) > 1 else ''}", sentence(figures)


def print_comparison(report: Report, out: Path) -> None:
    from dataclasses import replace

    from rich.console import Console

    from onptq.evaluate.baselines import comparison_folder
    from onptq.evaluate.comparison import REPORT_TEXT
    from onptq.evaluate.report import summary_table

    console = Console(highlight=False)
    table = summary_table(report)
    print_table(console, replace(table, rows=[[NAMES.get(row[0], row[0]), *row[1:]] for row in table.rows]))
    console.print(f"With intervals: {comparison_folder(out) / REPORT_TEXT}", style="dim", markup=False, soft_wrap=True)
    console.print()


def print_examples(items: Sequence[Item], out: Path, method: str) -> None:
    """Up to three answers that plain rounding spoils and the result gets right, each with its image."""
    from rich.console import Console

    from onptq.evaluate.baselines import comparison_folder, telling_examples
    from onptq.files import atomically

    examples = telling_examples(items, out, method)
    if not examples:
        return
    console = Console(highlight=False)
    console.print()
    console.print("Answers that plain rounding spoils:", style="bold")
    for number, example in enumerate(examples, start=1):
        console.print()
        images = example.item.prompt.images
        for image in images:
            if console.color_system in ("256", "truecolor"):
                console.print(_drawn(image.read()))
        console.print(_words(example.item.prompt), markup=False)
        for name, text in example.answers.items():
            console.print(f"  {NAMES.get(name, name):8}{text}", markup=False)
        if images:
            file = comparison_folder(out) / IMAGES / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomically(file) as path:
                path.write_bytes(images[0].read())
            console.print(f"  image   {file}", style="dim", markup=False, soft_wrap=True)


def print_next(summary: Mapping[str, Any], path: str, model: str) -> None:
    """Commands that a user is likely to want now."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)  # a command must not be broken into lines
    console.print("\nNext:", style="bold")
    for command in _next_commands(summary, path, model):
        console.print(f"  {command}", markup=False)


def _next_commands(summary: Mapping[str, Any], path: str, model: str) -> Iterator[str]:
    from onptq.checkpoint.serving import recommended, serve_command
    from onptq.schemes import Scheme

    folder = shlex.quote(path)
    yield f"onptq verify {folder} --against {shlex.quote(model)}"
    best = recommended(Scheme.parse(summary["scheme"])) if "scheme" in summary else None
    if best is not None:
        yield serve_command(folder, best)


def _words(prompt: Prompt) -> str:
    """The text of the last message."""
    return " ".join(part["text"] for part in prompt.messages[-1]["content"] if part["type"] == "text").strip()


def _drawn(data: bytes) -> Text:
    """An image in coloured half blocks, two pixels in one character."""
    from rich.text import Text

    from onptq.data.media import read_image

    image = read_image(data)
    rows = 2 * max(1, round(IMAGE_COLUMNS * image.height / image.width / 2))
    pixels = image.resize((IMAGE_COLUMNS, rows))
    text = Text()
    for row in range(0, rows, 2):
        for column in range(IMAGE_COLUMNS):
            above, below = (pixels.getpixel((column, row + half)) for half in (0, 1))
            text.append("▀", f"rgb{above} on rgb{below}".replace(" ", "").replace("onrgb", " on rgb"))
        text.append("\n")
    return text


def _same_states(choice: Mapping[str, Any], key: str, form: str) -> str:
    return _change(_mapping(choice.get(f"same_states_{key}")), form).replace(";", "", 1)


def _change(interval: Mapping[str, Any], form: str) -> str:
    """A difference with its interval, and what it says."""
    low, high = interval.get("low"), interval.get("high")
    if low is None or high is None:
        return ""
    word = "better" if high < 0 else "worse" if low > 0 else "may be chance"
    return f"; {form.format(interval['value'])} [{form.format(low)}, {form.format(high)}], {word}"


def _best_step(figures: Mapping[str, Any]) -> str:
    best, steps = figures["best_step"], figures["steps"]
    return f"step {best} of {steps}" if best else f"the init, none of {steps} steps was better"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
