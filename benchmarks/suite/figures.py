"""A figure of a suite: every method's on-policy behaviour with its interval, model by model and scheme by scheme.

python -m benchmarks.suite.figures main-suite/suite.json suite-mismatch.svg --measure mismatch
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS = "onptq"
COLORS = {"onptq": "#c1121f", "static": "#1d3557", "uniform": "#457b9d"}
AXES = {
    "mismatch": "changed decisions, %",
    "erosion": "erosion, logits",
    "kl": "on-policy KL, nats",
    "flips": "flips, %",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="suite.json")
    parser.add_argument("out", type=Path, help="an .svg or .png")
    parser.add_argument("--measure", choices=sorted(AXES), default="mismatch")
    args = parser.parse_args()
    draw(json.loads(args.tables.read_text(encoding="utf-8")), args.measure, args.out)


def draw(tables: Mapping[str, Any], measure: str, path: Path) -> None:
    """One panel for every pair of a model and a scheme, on a logarithmic axis that a scheme's panels share."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    benchmarks = tables["benchmarks"]
    schemes = list(dict.fromkeys(one["scheme"] for benchmark in benchmarks for one in benchmark["schemes"]))
    methods = _methods(benchmarks)
    size = (1.2 + 1.75 * len(schemes), 0.6 + (0.35 + 0.15 * len(methods)) * len(benchmarks))
    figure, panels = plt.subplots(
        len(benchmarks), len(schemes), figsize=size, sharex="col", sharey=True, squeeze=False, layout="constrained"
    )
    for line, benchmark in zip(panels, benchmarks, strict=True):
        by_scheme = {one["scheme"]: one for one in benchmark["schemes"]}
        for axes, scheme in zip(line, schemes, strict=True):
            if scheme in by_scheme:
                _panel(axes, by_scheme[scheme]["rows"].values(), methods, measure)
            _style(axes)
        line[0].set_ylabel(benchmark["model"].partition(":")[2], fontsize=8)
    for axes, scheme in zip(panels[0], schemes, strict=True):
        axes.set_title(scheme, fontsize=9)
    panels[0][0].set_yticks(range(len(methods)), methods)
    panels[0][0].invert_yaxis()
    figure.supxlabel(AXES[measure], fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _methods(benchmarks: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [one for benchmark in benchmarks for scheme in benchmark["schemes"] for one in scheme["rows"].values()]
    return list(dict.fromkeys(one["label"] for one in rows if one["of_the_suite"] and "#" not in one["label"]))


def _panel(axes: Any, rows: Any, methods: Sequence[str], measure: str) -> None:
    for one in rows:
        interval = one["figures"].get(measure)
        if one["label"] not in methods or interval is None or not interval["value"]:
            continue
        place, color = methods.index(one["label"]), COLORS.get(one["label"], "#6c757d")
        axes.plot([interval["low"], interval["high"]], [place, place], color=color, linewidth=1.4)
        axes.plot([interval["value"]], [place], "o", color=color, markersize=4 if one["label"] == OURS else 3)


def _style(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=7)
    axes.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    main()
