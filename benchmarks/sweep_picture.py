"""Curves of `gpu_calibration.py --sweep` as a picture: seconds of each phase over what was varied.

    python benchmarks/sweep_picture.py sweep.json more.json --out sweep.svg

Of a setting that is in several files the last one counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PHASES = ("Encode", "Initialize", "Follow", "Compare", "Branch", "Calibrate")
NAMES = {
    "prompts": "prompts",
    "tokens": "tokens of a response",
    "horizon": "horizon H",
    "media_tokens": "tokens of a picture",
    "layers": "decoder layers",
}


def curves(reports: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, float]]]:
    """By what was varied: value -> phase -> seconds. Every point is a setting, so that a base run again replaces the first."""
    points: dict[str, dict[str, Any]] = {}
    varied: dict[str, list[str]] = {}
    for report in reports:
        for name, found in report["sweep"]["curves"].items():
            for point in found:
                key = json.dumps(point["setting"], sort_keys=True)
                points[key] = point
                if key not in varied.setdefault(name, []):
                    varied[name].append(key)
    return {
        name: {
            points[key]["setting"][name]: {
                phase: row["seconds"] for phase, row in points[key]["phases"].items() if phase in PHASES
            }
            for key in sorted(keys, key=lambda key: int(points[key]["setting"][name]))
        }
        for name, keys in varied.items()
    }


def draw(found: dict[str, dict[int, dict[str, float]]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "onptq", "font.size": 9})
    figure, axes = pyplot.subplots(1, len(found), figsize=(3.0 * len(found), 3.0), sharey=True, layout="constrained")
    for axis, (name, points) in zip(axes, found.items(), strict=True):
        for phase in PHASES:
            axis.plot(list(points), [seconds[phase] for seconds in points.values()], marker="o", ms=3, label=phase)
        axis.set(xlabel=NAMES[name])
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("seconds")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args(argv)
    draw(curves([json.loads(path.read_text(encoding="utf-8")) for path in arguments.reports]), arguments.out)


if __name__ == "__main__":
    main()
