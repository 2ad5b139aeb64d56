"""The names of per-sample logs."""

from __future__ import annotations

import re
from pathlib import Path

from onptq.harness.benchmarks import PREFIX

DATE = re.compile(r"_\d{4}-\d{2}-\d{2}T[\d.:-]+$")


def task_of(file: Path) -> str:
    """The task in a log's name: DATE_samples_TASK.jsonl of lmms-eval, samples_TASK_DATE.jsonl of lm-eval, TASK.jsonl."""
    return DATE.sub("", file.stem.rpartition("samples_")[2]).removeprefix(PREFIX)
