"""A figure of `gpu_calibration.py --sweep`: seconds of each phase over the setting that was varied.

    python benchmarks/sweep_picture.py sweep.json more.json --out sweep.svg

If a setting is in several files, the last one counts.
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
    "media_tokens": "tokens of an image",
    "layers": "decoder layers",
}


def curves(reports: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, float]]]:
    """By setting that was varied: value -> phase -> seconds. A point of the same settings replaces an earlier one."""
    points: dict[str, dict[str, Any]] = {}
    varied: dict[str, list[str]] = {}
    for report in reports:
        for name, curve in report["sweep"]["curves"].items():
            for point in curve:
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


def draw(by_setting: dict[str, dict[int, dict[str, float]]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "onptq", "font.size": 9})
    figure, axes = pyplot.subplots(
        1, len(by_setting), figsize=(3.0 * len(by_setting), 3.0), sharey=True, layout="constrained"
    )
    for axis, (name, points) in zip(axes, by_setting.items(), strict=True):
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
