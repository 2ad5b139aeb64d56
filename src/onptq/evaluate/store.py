"""What a comparison folder keeps of every candidate, in files of its own, and when that is the candidate asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from onptq.bank import States
from onptq.errors import OnPTQError
from onptq.evaluate.answers import read_answers
from onptq.evaluate.candidates import DENSE, folder_name
from onptq.evaluate.margins import Margins
from onptq.evaluate.summary import Results
from onptq.files import to_json
from onptq.overrides import difference
from onptq.run import Run

IDENTITY, THETA, COST = "identity.json", "theta.safetensors", "cost.json"
ANSWERS, ROLLOUTS, STATES = "answers.parquet", "trajectories.parquet", "states.parquet"
MARGINS = "margins.parquet"  # on joint-critical states


def check_same(run: Run, name: str, record: Mapping[str, Any]) -> None:
    home = run.file(*parts(name))
    if not any(path.name != IDENTITY for path in home.glob("*")):  # nothing is kept of it
        return
    differences = difference(run.read_json(*parts(name, IDENTITY)), json.loads(to_json(record)))
    if differences:
        raise OnPTQError(
            f"{run.folder} has results of another {name} (there -> here):\n  "
            + "\n  ".join(differences)
            + "\nGive this one another name (NAME=FOLDER, METHOD:SCHEME@PRESET), or use another --out. Nothing was changed"
        )


def note_identity(run: Run, name: str, record: Mapping[str, Any]) -> None:
    home = parts(name, IDENTITY)
    if not run.has(*home) or run.read_json(*home) != json.loads(to_json(record)):
        run.write_json(record, *home)


def kept(run: Run, with_answers: bool, with_states: bool) -> dict[str, Results]:
    """The dense model's results, then those of every candidate that is complete, in the order they were begun."""
    folders = sorted(run.file("candidates").glob(f"*/{IDENTITY}"), key=lambda path: (path.stat().st_mtime_ns, path))
    records = {record["name"]: record for record in (json.loads(path.read_text(encoding="utf-8")) for path in folders)}
    complete = [name for name in records if is_complete(run, name, with_answers, with_states)]
    homes = {DENSE: (DENSE,)} | {name: parts(name) for name in complete}
    return {
        name: Results(
            read_answers(run.file(*home, ANSWERS))[name] if with_answers else (),
            States.read(run.file(*home, STATES)) if with_states and name != DENSE else None,
            run.read_json(*home, COST),
            records.get(name, {}).get("scheme"),
            Margins.read(run.file(*home, MARGINS)) if run.has(*home, MARGINS) else None,
        )
        for name, home in homes.items()
    }


def is_complete(run: Run, name: str, with_answers: bool, with_states: bool) -> bool:
    needed = [COST, *([ANSWERS] if with_answers else []), *([STATES] if with_states else [])]
    return all(run.has(*parts(name, file)) for file in needed)


def parts(name: str, *file: str) -> tuple[str, ...]:
    return "candidates", folder_name(name), *file
