"""The last steps of a training: choose the outlier channels and write the scores into the model card."""

from __future__ import annotations

from pathlib import Path

from onptq.checkpoint.source import find_source
from onptq.progress import Reporter
from onptq.zoo.suite import prompts
from tools.zoo.exam import examine
from tools.zoo.outliers import write_outliers
from tools.zoo.train.card import add_scores

PROMPTS = 64  # by which outlier channels are chosen


def finish(folder: Path, items: int | None, reporter: Reporter) -> None:
    """Write outliers.json and the scores of `items` per task, or of the whole test split."""
    family = find_source(folder).family.name
    with reporter.phase("Choose outliers", total=1, unit="model") as bar:
        write_outliers(folder, prompts(family, "calibration", PROMPTS, "captions"))
        bar.advance()
    add_scores(folder, examine(folder, count=items, reporter=reporter).tasks)
