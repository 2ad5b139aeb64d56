"""The runs behind a reproduction: comparisons by the one harness, and sessions for what is measured state by state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from onptq import __version__
from onptq.checkpoint.source import Source, choose_device, choose_dtype, find_source
from onptq.data.manifest import load_manifest, manifest_digest
from onptq.data.prompts import Prompt
from onptq.evaluate.candidates import Candidate, MethodCandidate, folder_name, with_seeds
from onptq.evaluate.comparison import compare_models
from onptq.evaluate.session import Session
from onptq.evaluate.tasks import Item
from onptq.progress import QuietReporter, Reporter
from onptq.recipe import Recipe
from onptq.reproduce.compared import Compared
from onptq.reproduce.settings import Settings
from onptq.run import Run
from onptq.zoo.materials import draw_items, draw_prompts

CAPTIONS = "captions"  # what the paper's calibration prompts ask for


class Experiment:
    """A model and its prompts, and a folder in which every finished step is written."""

    def __init__(self, settings: Settings, reporter: Reporter | None = None) -> None:
        self.settings, self.reporter = settings, reporter or QuietReporter()

    def of_model(self, model: str) -> Experiment:
        return self if model == self.settings.model else Experiment(replace(self.settings, model=model), self.reporter)

    @cached_property
    def source(self) -> Source:
        return find_source(self.settings.model)

    @property
    def family(self) -> str:
        return self.source.family.name

    @property
    def folder(self) -> Path:
        """Of all runs with this model, scale and init."""
        s = self.settings
        name = folder_name(Path(s.model).name if Path(s.model).is_dir() else s.model)
        return Path(s.out) / "runs" / f"{name}-{s.scale.name}-{s.init}"

    def recipe(self, scheme: str, changes: Mapping[str, Any] | None = None) -> Recipe:
        return self.settings.recipe(scheme, changes)

    def base(self, method: str, scheme: str) -> MethodCandidate:
        """A base method alone."""
        return MethodCandidate(f"{method}:{scheme}", self.recipe(scheme, {"method": method, "init": method}))

    def cycle(self, name: str, scheme: str, changes: Mapping[str, Any] | None = None) -> MethodCandidate:
        """A method that calibrates in rounds, by the paper's recipe with some fields changed."""
        return MethodCandidate(f"{name}:{scheme}", self.recipe(scheme, changes))

    def cycles(self, name: str, scheme: str, changes: Mapping[str, Any] | None = None) -> list[MethodCandidate]:
        """The same with each of the seeds."""
        every = with_seeds(self.cycle(name, scheme, changes), self.settings.seeds)
        return [one for one in every if isinstance(one, MethodCandidate)]

    def calibration(self, count: int | None = None) -> list[Prompt]:
        return self._drawn("calibration", self.settings.scale.prompts if count is None else count)

    def bank_prompts(self) -> list[Prompt]:
        """Held-out prompts whose states are analysed."""
        return self._drawn("held-out", self.settings.scale.bank)

    def examples(self) -> list[Prompt]:
        """Prompts that are in neither of the others."""
        return self._drawn("test", self.settings.scale.examples)

    def items(self) -> list[Item]:
        return draw_items(self.family, None, self.settings.scale.items, "test", self.reporter)

    def _drawn(self, split: str, count: int) -> list[Prompt]:
        """Prompts of the manifests, or embedded ones; held-out and test prompts of one manifest follow each other."""
        s = self.settings
        if split == "calibration" and s.calibration is not None:
            return load_manifest(s.calibration, limit=count)
        if split != "calibration" and s.prompts is not None:
            first = s.scale.bank if split == "test" else 0
            return load_manifest(s.prompts, limit=first + count)[first:]
        return draw_prompts(self.family, split, count, self.reporter, kind=CAPTIONS)

    def compare(
        self, name: str, candidates: Sequence[Candidate], scheme: str, *, prompts: Sequence[Prompt] | None = None
    ) -> Compared:
        """The candidates beside the dense model, on items and prompts, by the harness of `onptq compare`.

        All comparisons on the same prompts have one folder, so that each candidate is made and measured once, and each
        writes its report there under its name.
        """
        s = self.settings
        folder = self.folder / ("compared" if prompts is None else f"compared-{manifest_digest(prompts)[:12]}")
        report = compare_models(
            self.source,
            candidates,
            folder,
            items=self.items(),
            prompts=self.bank_prompts() if prompts is None else prompts,
            calibration=self.calibration(),
            recipe=self.recipe(scheme),
            damage=False,  # no result of the paper looks at it
            seeds=s.seeds,
            alone=name,
            origin=f"scale {s.scale.name}",
            reporter=self.reporter,
        )
        return Compared(report, folder)

    @contextmanager
    def session(self, name: str, scheme: str, prompts: Sequence[Prompt]) -> Iterator[Session]:
        """A session of the harness, in a folder of its own, for what is measured at single states."""
        recipe = self.recipe(scheme)
        device = choose_device(recipe.compute.device)
        dtype = choose_dtype(recipe.compute.dtype, device, self.reporter.note)
        prompts = [replace(prompt, ordinal=place) for place, prompt in enumerate(prompts)]
        calibration = self.calibration()
        identity = {
            "recipe": recipe.model_dump(exclude={"compute", "report"}),
            "model": {"source": self.source.name, "sha256": self.source.sha256()},
            "prompts": {"sha256": manifest_digest(prompts), "count": len(prompts)},
            "calibration": {"sha256": manifest_digest(calibration), "count": len(calibration)},
            "versions": {"onptq": __version__},
        }
        with Run.open(self.folder / name, identity, warn=self.reporter.warn) as run:
            session = Session(self.source, recipe, device, dtype, (), prompts, calibration, (), run, self.reporter)
            try:
                yield session
            finally:
                session.release()
