"""Suites: models x schemes x methods by one command. Every dense model is a benchmark in a folder of its own.

A benchmark is one comparison with all schemes and methods as candidates. The same command continues after a kill,
several processes can share the models, and the tables cover every benchmark in the folder.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.suite.tables import collect, markdown
from onptq.checkpoint.source import choose_device, find_source
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.candidates import folder_name, parse_candidates
from onptq.evaluate.comparison import compare_models
from onptq.evaluate.statistics import REPLICATES
from onptq.evaluate.tasks import Item
from onptq.files import atomically, to_json
from onptq.progress import NamedReporter, QuietReporter, Reporter
from onptq.recipe import CYCLES, Recipe
from onptq.run import check_place

TABLES_JSON, TABLES_TEXT, LOCK = "suite.json", "suite.md", ".suite-lock"


@dataclass(frozen=True)
class Suite:
    name: str
    models: tuple[str, ...]
    schemes: tuple[str, ...]
    methods: tuple[str, ...]
    items: int | None  # per task; None is the whole split
    prompts: int  # on which behaviour is compared
    kind: str = "captions"  # of embedded prompts, to calibrate on and to compare on; those of the published tables
    preset: str = "default"
    changes: tuple[str, ...] = ()  # of that preset
    caveats: tuple[str, ...] = ()  # shown with its goals


METHODS = (
    "rtn", "smoothquant", "awq", "mbq", "qig", "masquant", "blockwise", "gptq", "search", "search+signround",
    "static", "uniform", "onptq",
)  # fmt: skip
# Every control beside the method, which is also tried with risk weights and from another init.
CONTROLS = (
    "rtn", "awq", "gptq", "smoothquant+gptq", "search+gptq", "signround", "search+signround",
    "static", "offpolicy", "onptq", "onptq@calibrate.hidden=1,calibrate.pair=0.02", "onptq@init=awq",
)  # fmt: skip
ZOO = (
    "zoo:qwen2.5-vl",
    "zoo:qwen2.5-vl+outliers",
    "zoo:qwen3-vl",
    "zoo:qwen3-vl+outliers",
    "zoo:qwen2.5-omni",
)
SMALL_MODELS = ("calibrate.micro_batch=8", "calibrate.checkpointing=false")  # they leave room
# Of the published tables: `onptq` is weighted by risk there, `uniform` is the same with equal weights.
RISK_ON_FEW_PROMPTS = (
    "data.prompts=128", "data.holdout=32", "follow.max_tokens=64", "calibrate.hidden=1", "calibrate.pair=0.1",
    "calibrate.epochs=16",
)  # fmt: skip
SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "main",
            models=ZOO,
            schemes=("W4A16", "W8A8", "W4A8", "W4A6", "W3A8", "W3A6", "W4A4"),
            methods=METHODS,
            items=None,
            prompts=512,
            preset="best",
            changes=(*SMALL_MODELS, *RISK_ON_FEW_PROMPTS),
        ),
        Suite(
            "controls",
            models=ZOO,
            schemes=("W4A8", "W4A6", "W3A8"),
            methods=CONTROLS,
            items=None,
            prompts=512,
            kind="mix",
            changes=SMALL_MODELS,
        ),
        Suite(
            "floats",
            models=("zoo:qwen2.5-vl+outliers", "zoo:qwen3-vl"),
            schemes=("W8A8", "FP8", "W4A16", "NVFP4A16", "W4A8", "W4A8-g128", "NVFP4", "MXFP4"),
            methods=("rtn", "awq", "gptq", "signround", "search+signround", "offpolicy", "onptq"),
            items=100,
            prompts=96,
            kind="mix",
            preset="zoo",
            changes=("data.prompts=96",),
        ),
        Suite(
            "smoke",
            models=("zoo:qwen2.5-vl",),
            schemes=("W4A8",),
            methods=("rtn", "static", "onptq"),
            items=10,
            prompts=8,
            preset="zoo",
            changes=("data.prompts=8", "data.holdout=4", "calibrate.epochs=1", "follow.max_tokens=24"),
            caveats=("A smoke test: one epoch over a few prompts. Its goals say nothing about a method.",),
        ),
    )
}


@dataclass(frozen=True)
class BenchmarkData:
    """The data that candidates are built with and measured on."""

    items: Sequence[Item]
    prompts: Sequence[Prompt]
    calibration: Sequence[Prompt]
    holdout: Sequence[Prompt]
    origin: str = ""  # of items and prompts, in words


def run_suite(
    suite: Suite,
    out: str | Path,
    draw: Callable[[str, Reporter], BenchmarkData],
    recipe: Recipe,
    *,
    models: Sequence[str] = (),
    schemes: Sequence[str] = (),
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    check: Callable[[str], object] = lambda family: None,
    critical: bool = False,
    replicates: int = REPLICATES,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Run the benchmarks of the suite, or some of its `models`, `schemes` and `methods`, and write the tables of all in
    `out`.

    `draw` returns the data for a model family. `check` raises where they cannot be drawn, before any benchmark runs.
    `seeds` are further seeds of the methods that have one.
    """
    reporter, folder = reporter or QuietReporter(), Path(out)
    names = candidate_names(methods or suite.methods, schemes or suite.schemes, recipe.seed, seeds)
    candidates = parse_candidates(names, recipe)
    choose_device(recipe.compute.device)
    chosen = dict.fromkeys(models or suite.models)
    for model in chosen:
        check_place(benchmark_folder(folder, model))
    families = {model: _family(model, check) for model in chosen}
    for model, family in families.items():
        named = NamedReporter(reporter, model) if len(families) > 1 else reporter
        data = draw(family, named)
        compare_models(
            model,
            candidates,
            benchmark_folder(folder, model),
            items=data.items,
            prompts=data.prompts,
            calibration=data.calibration,
            holdout=data.holdout,
            origin=data.origin,
            recipe=recipe,
            critical=critical,
            replicates=replicates,
            reporter=named,
        )
        tables = write_tables(suite, folder)
    return tables


def candidate_names(
    methods: Sequence[str], schemes: Sequence[str], seed: int = 0, seeds: Sequence[int] = ()
) -> list[str]:
    """`method:scheme` of every pair, and `method:scheme#seed` for every further seed where the method has one."""
    marks = ["", *(f"#{other}" for other in dict.fromkeys(seeds) if other != seed)]
    return [
        f"{method}:{scheme}{mark}"
        for scheme in dict.fromkeys(schemes)
        for method in dict.fromkeys(methods)
        for mark in (marks if method in CYCLES else marks[:1])
    ]


def benchmark_folder(out: Path, model: str) -> Path:
    return out / folder_name(model.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1])


def write_tables(suite: Suite, out: Path) -> dict[str, Any]:
    """Write suite.json and suite.md over every benchmark in `out`, whichever process ran it."""
    with _locked(out):
        tables = collect(out, suite.name, suite.models, suite.schemes, suite.methods)
        for name, text in ((TABLES_JSON, to_json(tables, indent=2) + "\n"), (TABLES_TEXT, markdown(tables))):
            with atomically(out / name) as path:
                path.write_text(text, encoding="utf-8")
    return tables


def _family(model: str, check: Callable[[str], object]) -> str:
    try:
        family = find_source(model).family.name
    except OnPTQError as error:
        raise OnPTQError(f"{error}. --models runs the suite on those that are there") from error
    try:
        check(family)
    except OnPTQError as error:
        raise OnPTQError(f"{model}: {error}. --models runs the suite on others") from error
    return family


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Tables are written by one process at a time, so that two benchmarks that end together are both in them."""
    with (out / LOCK).open("w") as lock:
        with suppress(OSError):  # a file system without locks: the next command writes the tables again
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
