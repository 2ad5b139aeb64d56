"""Short forms of the fault campaign and of the soak, so that neither is found broken when it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from soak import ALLOWED, growth, soak

CAMPAIGN = Path(__file__).parent / "campaign.py"


@pytest.mark.slow
def test_a_few_faults_of_the_campaign_are_survived(tmp_path: Path) -> None:
    options = ["--kills", "1", "--damages", "4", "--others", "0", "--recipes", "1", "--snapshots", "1"]
    command = [sys.executable, str(CAMPAIGN), *options, "--folder", str(tmp_path / "faults")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    tried = int(done.stdout.split(" faults tried")[0].split()[-1])
    assert tried >= 5
    assert f"{tried} faults tried, {tried} survived" in done.stdout


@pytest.mark.slow
def test_runs_one_after_another_leave_no_files_open_and_little_memory(small: Path, tmp_path: Path) -> None:
    """`python tests/faults/soak.py --runs 200` looks closer: the allocator settles only after some dozens of runs."""
    files, memory = growth(soak(small, 12, tmp_path))
    assert files == 0
    assert memory < 8 * ALLOWED
