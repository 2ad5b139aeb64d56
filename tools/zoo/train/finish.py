"""What a trained folder still lacks to be shipped: its outlier channels, and its scores on the test split."""

from __future__ import annotations

from pathlib import Path

from onptq.checkpoint.source import find_source
from onptq.progress import Reporter
from onptq.zoo.suite import prompts
from tools.zoo.exam import examine
from tools.zoo.outliers import write_outliers
from tools.zoo.train.card import add_scores

PROMPTS = 64  # that outlier channels are chosen by


def finish(folder: Path, items: int | None, reporter: Reporter) -> None:
    """`items` per task, or the whole test split."""
    family = find_source(folder).family.name
    with reporter.phase("Choose outliers", total=1, unit="model") as bar:
        write_outliers(folder, prompts(family, "calibration", PROMPTS))
        bar.advance()
    add_scores(folder, examine(folder, count=items, reporter=reporter).tasks)
