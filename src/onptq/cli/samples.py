"""Comparisons of answers that are there already, in the logs of a benchmark tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from onptq.cli.report_tables import print_report
from onptq.cli.settings import make_reporter
from onptq.errors import OnPTQError


def compare_samples(
    dense: str, candidates: Sequence[str], metric: str | None, seed: int, out: Path | None, quiet: bool, json: bool
) -> None:
    """Compare logs; with `out`, write the report and the changed answers into that folder."""
    from onptq.evaluate.candidates import DENSE
    from onptq.evaluate.report import markdown
    from onptq.evaluate.sample_logs import changed_answers, paired_arms, read_arm
    from onptq.evaluate.statistics import Resampler
    from onptq.evaluate.summary import Results, summarize
    from onptq.files import atomically, to_json

    places = {DENSE: Path(dense)}
    for text in candidates:
        name, named, place = text.partition("=")
        path = Path(place if named else text)
        name = name if named else path.name.removesuffix(".jsonl")
        if name in places:
            raise OnPTQError(f"two logs are called {name}; expected NAME=LOG with different names")
        places[name] = path
    items, answers = paired_arms({name: read_arm(place, metric) for name, place in places.items()})
    results = {name: Results(given) for name, given in answers.items()}
    report = summarize(items, (), results, Resampler(seed), dense, f"{len(items)} items of per-sample logs")
    changed = list(changed_answers(answers))
    if out is not None:
        texts = {
            "report.json": to_json(report.to_dict(), indent=2) + "\n",
            "report.md": markdown(report),
            "changed.jsonl": "".join(to_json(one) + "\n" for one in changed),
        }
        for name, text in texts.items():
            with atomically(out / name) as path:
                path.write_text(text, encoding="utf-8")
    if json:
        make_reporter(quiet, json).result(report.to_dict() | {"changed": changed})
    elif not quiet:
        print_report(report)
        if out is not None:
            typer.echo(f"\nReport: {out / 'report.md'}; {len(changed)} changed answers: {out / 'changed.jsonl'}")
