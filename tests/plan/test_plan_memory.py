"""Predicted against measured memory of a real run: the same model, recipe and prompts, on a CPU.

Compared are bytes above what the process holds before the run: the model's tensors and everything made from them. The
model is large enough (about 70 MB of float32) that these, and not Python's own objects, are what is measured.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import onptq
from onptq.plan.planning import Plan, make_plan
from onptq.progress import Bar, QuietReporter
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.zoo.random import write_random

TOLERANCE, LAYERS = 0.25, 2
COMPARED = ("Load", "Follow", "Compare", "Branch", "Calibrate", "Export", "Verify")
RECIPE: dict[str, Any] = {
    "scheme": "W4A8",
    "init": "rtn",
    "rounds": 1,
    "data.prompts": 4,
    "data.holdout": 1,
    "follow.max_tokens": 8,
    "calibrate.epochs": 2,  # from the second update on an optimizer has its moments
    "calibrate.evaluations": 1,
    "compute.device": "cpu",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says what a process held"),
]

# So many steps that every block learns something: one that does not has no offsets. One prompt, so that they are quick.
LEARNED_INIT = {"init": "search+signround", "init_steps": 12, "data.prompts": 1}
RUNS: dict[str, dict[str, Any]] = {
    "learned": {"calibrate.codes": "learned"},
    "settled after signround": {"calibrate.codes": "settled", **LEARNED_INIT},
}


@pytest.fixture(scope="module", params=RUNS)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, dict[str, Any]]:
    """The plan, and what the run then took."""
    folder = tmp_path_factory.mktemp("memory")
    model = write_random(
        "qwen2.5-vl", folder / "model", prompts=5, hidden=768, heads=6, kv_heads=2, ffn=2048, layers=LAYERS, vocab=2048
    )
    warm = write_random(
        "qwen2.5-vl", folder / "small", prompts=3, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512, image_size=56
    )
    recipe = Recipe.preset("risk").with_overrides(RECIPE | RUNS[request.param])
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    script = Path(__file__).with_name("plan_run.py")
    arguments = [str(path) for path in (model, folder / "recipe.yaml", folder / "out", warm)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "524288", "MALLOC_TRIM_THRESHOLD_": "524288"}
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    plan = make_plan(model, recipe, calibration=model / "prompts.jsonl")
    return plan, json.loads(done.stdout.splitlines()[-1])


def test_the_peak_of_the_run_is_as_predicted(measured: tuple[Plan, dict[str, Any]]) -> None:
    plan, run = measured
    predicted = max(phase.host_bytes - phase.host["process"] for phase in plan.phases)
    assert predicted == pytest.approx(max(run["peaks"].values()) - run["before"], rel=TOLERANCE)


@pytest.mark.parametrize("name", COMPARED)
def test_the_peak_of_each_phase_is_as_predicted(measured: tuple[Plan, dict[str, Any]], name: str) -> None:
    plan, run = measured
    phase = next(phase for phase in plan.phases if phase.name == name)
    predicted = phase.host_bytes - phase.host["process"]
    assert predicted == pytest.approx(run["peaks"][name] - run["before"], rel=TOLERANCE)


def test_the_peak_of_a_learned_init_is_as_predicted(measured: tuple[Plan, dict[str, Any]]) -> None:
    plan, run = measured
    if plan.recipe.init == "rtn":
        pytest.skip("plain rounding learns nothing, and is over before it is seen")
    phase = next(phase for phase in plan.phases if phase.name == "Initialize")
    predicted = phase.host_bytes - phase.host["process"]
    assert predicted == pytest.approx(run["peaks"]["Initialize"] - run["before"], rel=TOLERANCE)
    kind = "halved" if plan.recipe.settles else "offset"
    assert run["init"][kind] == 7 * LAYERS, "every linear was to have learned something: are there too few steps?"


class Counting(QuietReporter):
    """How many thetas with offsets are alive at the end of each phase."""

    def __init__(self) -> None:
        self.alive: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        with super().phase(name, total, unit) as bar:
            yield bar
        gc.collect()
        self.alive[name] = sum(type(one) is Theta and bool(one.offset) for one in gc.get_objects())


@pytest.mark.parametrize("codes", ["settled", "free"])
def test_the_offsets_of_the_init_are_freed_where_they_are_not_counted(small: Path, tmp_path: Path, codes: str) -> None:
    """Settled codes need none; free ones those of theta, and in an update those of its origin and of the best."""
    reporter, init = Counting(), {"init": "signround", "init_steps": 12}
    recipe = Recipe.preset("risk").with_overrides(RECIPE | init | {"calibrate.codes": codes, "rounds": 2})
    onptq.quantize(small, tmp_path, calibration=small / "prompts.jsonl", recipe=recipe, reporter=reporter, verify=False)
    alive = reporter.alive
    assert alive["Initialize (signround)"] == (codes == "free")
    assert [alive[f"{name} {k}"] for k in (1, 2) for name in ("Follow", "Compare", "Branch")] == 6 * [codes == "free"]
    assert alive["Calibrate 1"] == alive["Calibrate 2"] == (3 if codes == "free" else 0)
    assert alive["Export"] == (codes == "free")


def test_the_process_itself_is_as_large_as_said(measured: tuple[Plan, dict[str, Any]]) -> None:
    plan, run = measured
    assert plan.phases[0].host["process"] == pytest.approx(run["before"], rel=TOLERANCE)
