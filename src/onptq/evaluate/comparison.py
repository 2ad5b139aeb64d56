"""The comparison: the dense model and its candidates on the same items and prompts, every result in one folder.

A killed comparison goes on after its finished results. A later one with the same dense model, items and prompts adds
candidates to those that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from onptq.checkpoint.exportable import check_exportable, check_groups
from onptq.checkpoint.quantization import compressed_scheme
from onptq.checkpoint.source import Source, choose_device, choose_dtype, find_source, open_checkpoint
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.build import build
from onptq.evaluate.candidates import (
    Candidate,
    CheckpointCandidate,
    MethodCandidate,
    RunCandidate,
    check_names,
    parse_candidates,
    with_seeds,
)
from onptq.evaluate.measure import measure, measure_critical
from onptq.evaluate.previews import keep_previews
from onptq.evaluate.report import markdown
from onptq.evaluate.session import Session
from onptq.evaluate.statistics import REPLICATES, Resampler
from onptq.evaluate.store import (
    read_results,
    read_seeds,
    write_identities,
    write_inputs,
    write_seeds,
    write_tokens,
)
from onptq.evaluate.summary import Report, summarize
from onptq.evaluate.tasks import Item, check_items, items_digest
from onptq.files import atomically, file_sha256, to_json
from onptq.methods.experts import check_method
from onptq.progress import QuietReporter, Reporter
from onptq.recipe import Recipe
from onptq.run import INIT, Run
from onptq.version import __version__

REPORT_JSON, REPORT_TEXT = "report.json", "report.md"


def compare_models(
    dense: str | Path | Source,
    candidates: Sequence[Candidate | str],
    out: str | Path,
    *,
    items: Sequence[Item] = (),
    prompts: Sequence[Prompt] = (),
    calibration: Sequence[Prompt] = (),
    holdout: Sequence[Prompt] = (),
    origin: str = "",
    recipe: Recipe | None = None,
    critical: bool = False,
    damage: bool = True,
    seeds: int = 1,
    replicates: int = REPLICATES,
    alone: str | None = None,
    reporter: Reporter | None = None,
) -> Report:
    """The report over all results in `out`, those of `candidates` included.

    `items` are answered and graded; `prompts` are followed and compared with the dense model; `origin` says in the report
    where both come from. `calibration` and `holdout` are for candidates that are made here: the first so many of them as the
    candidate's recipe says. `recipe` gives the device, the length of a rollout, the seed, and what candidates follow that name
    no preset. Candidates that calibrate are made with so many `seeds`, each one's own and those that follow. With `critical`,
    margins are also taken on the joint-critical states of plain rounding, which then is a candidate too. Without `damage`,
    mismatches have no consequences and the dense model's responses are not read. With a name in `alone`, the report is over
    these candidates and no others, and is written under that name.
    """
    recipe, reporter = recipe or Recipe(), reporter or QuietReporter()
    if not items and not prompts:
        raise OnPTQError("there is nothing to compare by; expected items, prompts, or both")
    if items:
        check_items(items)
    parsed = [one if not isinstance(one, str) else parse_candidates([one], recipe)[0] for one in candidates]
    banks = _bank_candidates(parsed, recipe) if critical and prompts else {}
    parsed += [one for one in banks.values() if one.name not in {other.name for other in parsed}]
    seeded = [with_seeds(one, seeds) for one in parsed]
    parsed = [one for group in seeded for one in group]
    check_names(parsed)
    source = dense if isinstance(dense, Source) else find_source(dense)
    _check_schemes(parsed, source)
    prompts = [replace(prompt, ordinal=ordinal) for ordinal, prompt in enumerate(prompts)]
    records = {one.name: _record(one, source, calibration, holdout) for one in parsed}
    device = choose_device(recipe.compute.device)
    dtype = choose_dtype(recipe.compute.dtype, device, reporter.note)
    with reporter.phase("Hash the model", total=len(source.files), unit="files") as bar:
        identity = _identity(source, source.sha256(bar.advance), items, prompts, recipe, dtype)
    with Run.open(out, identity, warn=reporter.warn) as run:
        write_identities(run, records)
        for group in seeded:
            write_seeds(run, [one.name for one in group])
        write_inputs(run, prompts, items)
        keep_previews(run, [*prompts, *(one.prompt for one in items)], recipe.report.detail)
        session = Session(source, recipe, device, dtype, items, prompts, calibration, holdout, run, reporter)
        by_theta = [one for one in parsed if not isinstance(one, CheckpointCandidate)]
        build(by_theta, session)
        measure(parsed, session, damage)
        measure_critical(by_theta, banks, session)
        write_tokens(run, session.processor.tokenizer)
        names = None if alone is None else {one.name for one in parsed}
        results = read_results(run, bool(items), bool(prompts), names)
        ordinals = [prompt.ordinal for prompt in prompts]
        resampler = Resampler(recipe.seed, replicates)
        report = summarize(items, ordinals, results, resampler, source.name, origin, read_seeds(run, results))
        for name, text in ((REPORT_JSON, to_json(report.to_dict(), indent=2) + "\n"), (REPORT_TEXT, markdown(report))):
            file = name if alone is None else f"{alone}{Path(name).suffix}"
            with atomically(run.folder / file) as path:
                path.write_text(text, encoding="utf-8")
    return report


def _check_schemes(candidates: Sequence[Candidate], source: Source) -> None:
    """Refuse schemes and methods that do not fit the model, before it is loaded."""
    schemes = {one.scheme for one in candidates if not isinstance(one, CheckpointCandidate)}
    if schemes:
        check_exportable(source)
        for scheme in schemes:
            check_groups(source, scheme)
        for one in candidates:
            if isinstance(one, MethodCandidate):
                check_method(one.recipe.init, source.family)


def _bank_candidates(candidates: Sequence[Candidate], recipe: Recipe) -> dict[str, MethodCandidate]:
    """Plain rounding by scheme: the candidate whose states are the frozen bank.

    The paper judges variants of one initial checkpoint on that checkpoint's bank. Here methods of every kind are judged. A bank
    of any of them would hold the mistakes of just that one and of its descendants.
    """
    schemes = dict.fromkeys(str(one.scheme) for one in candidates if isinstance(one, MethodCandidate))
    parsed = parse_candidates([f"rtn:{scheme}" for scheme in schemes], recipe) if schemes else []
    return {str(one.scheme): one for one in parsed if isinstance(one, MethodCandidate)}


def _identity(
    source: Source, sha256: str, items: Sequence[Item], prompts: Sequence[Prompt], recipe: Recipe, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "comparison": {
            "max_tokens": recipe.follow.max_tokens,
            "batch_tokens": recipe.compute.batch_tokens,
            "dtype": str(dtype).removeprefix("torch."),
        },
        "model": {"source": source.name, "family": source.family.name, "sha256": sha256},
        "items": {"sha256": items_digest(items), "count": len(items)},
        "prompts": {"sha256": manifest_digest(prompts), "count": len(prompts)},
        "versions": {"onptq": __version__, **{name: version(name) for name in ("torch", "transformers")}},
    }


def _record(
    candidate: Candidate, dense: Source, calibration: Sequence[Prompt], holdout: Sequence[Prompt]
) -> dict[str, Any]:
    """The facts by which results are known to be this candidate's."""
    if isinstance(candidate, RunCandidate):
        scheme = str(candidate.scheme)
        return {"name": candidate.name, "theta": file_sha256(candidate.theta), "scheme": scheme}
    if isinstance(candidate, CheckpointCandidate):
        source = open_checkpoint(candidate.folder)
        if source.family != dense.family:
            raise OnPTQError(
                f"{candidate.folder} is a {source.family.name} model, the dense one is {dense.family.name}; expected a "
                "quantized version of the same model"
            )
        stored = compressed_scheme(source.checkpoint.quantization)
        record: dict[str, Any] = {"name": candidate.name, "checkpoint": source.sha256()}
        return record if stored is None else record | {"stored": str(stored)}
    recipe, data = candidate.recipe, candidate.recipe.data
    used = calibration[: data.prompts] if recipe.needs_prompts else []
    if recipe.needs_prompts and not used:
        raise OnPTQError(f"{candidate.name} needs calibration prompts to be built; give a manifest (JSONL or parquet)")
    record = {"name": candidate.name, "method": recipe.method, "scheme": str(candidate.scheme)}
    record["calibration"] = manifest_digest(used)
    if recipe.init_steps is not None:
        record["init_steps"] = recipe.init_steps
    if recipe.rounds:
        settings = recipe.model_dump(exclude={"compute", "report"})
        if candidate.init_run is not None:
            record["init"] = file_sha256(candidate.init_run / INIT)
        return record | {"holdout": manifest_digest(holdout[: data.holdout]), "recipe": settings}
    return record
