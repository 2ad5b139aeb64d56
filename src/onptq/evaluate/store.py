"""The files of a comparison: one folder per candidate, each result a file of its own, written when it is whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from onptq.bank import BANK, States, read_trajectories
from onptq.cycle.rounds import DENSE_ANSWERS
from onptq.data.prompt_table import write_prompts
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.answers import Answer, read_answers
from onptq.evaluate.candidates import DENSE, folder_name
from onptq.evaluate.critical import Margins
from onptq.evaluate.details import OFF, keeps
from onptq.evaluate.model_card import HELD_OUT, HELD_OUT_ANSWERS
from onptq.evaluate.summary import Results
from onptq.evaluate.tasks import Item
from onptq.evaluate.token_texts import Tokenizer, TokenTexts, ids_in
from onptq.files import to_json
from onptq.overrides import difference
from onptq.run import HOME, Run

IDENTITY, THETA, COST = "identity.json", "theta.safetensors", "cost.json"
ANSWERS, ROLLOUTS, STATES = "answers.parquet", "trajectories.parquet", "states.parquet"
MISMATCHES = "mismatches.parquet"  # of the states, with their consequence
DENSE_PATH = "dense_path.parquet"  # states on the dense model's responses
DETAILS = "details.parquet"  # of single states: the likeliest tokens, and the futures of mismatches
ATTRIBUTION = "attribution.json"  # what each linear contributes to the erosion, where theta is known
MARGINS = "margins.parquet"  # on joint-critical states
SEEDS = "seeds.json"  # of a candidate with several seeds: the names of all
PROMPTS, ITEMS = "prompts.parquet", "items.parquet"  # prompts and items of the comparison
TOKENS = "tokens.json"  # the texts of all token ids in the other files
DECISIONS = ("token", "reference", "competitor", "quantized")
TOKEN_COLUMNS = {  # where these ids are, in comparisons and in runs
    ROLLOUTS: ("response",),
    HELD_OUT_ANSWERS: ("response",),
    Path(DENSE_ANSWERS).name: ("response",),
    STATES: DECISIONS,
    BANK: DECISIONS,
    HELD_OUT: DECISIONS,
    DETAILS: ("dense", "quantized", "reference_future", "competitor_future"),
}
WITH_TOKENS = (DENSE, "candidates/*", "rounds/*", "final", "rtn/final")  # folders of such files
T = TypeVar("T")


def path_of(name: str, *file: str) -> tuple[str, ...]:
    """The path of a candidate's file, below the home of the comparison."""
    return "candidates", folder_name(name), *file


def write_identities(run: Run, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Commit the records of candidates by name, all or, where one is another candidate's, none."""
    for name, record in records.items():
        check_same(run, name, record)
    for name, record in records.items():
        write_identity(run, name, record)


def check_same(run: Run, name: str, record: Mapping[str, Any]) -> None:
    """Refuse results of another candidate under the same name."""
    home = run.file(*path_of(name))
    if not any(path.name not in (IDENTITY, SEEDS) for path in home.glob("*")):
        return
    differences = difference(run.read_json(*path_of(name, IDENTITY)), json.loads(to_json(record)))
    if differences:
        raise OnPTQError(
            f"{run.folder} has results of another {name} (there -> here):\n  "
            + "\n  ".join(differences)
            + "\nGive this one another name (NAME=FOLDER, NAME=METHOD:SCHEME), or use another --out. Nothing was changed"
        )


def write_identity(run: Run, name: str, record: Mapping[str, Any]) -> None:
    home = path_of(name, IDENTITY)
    if not run.has(*home) or run.read_json(*home) != json.loads(to_json(record)):
        run.write_json(record, *home)


def read_results(
    run: Run, with_answers: bool, with_states: bool, names: Collection[str] | None = None
) -> dict[str, Results]:
    """The dense model's results, then those of every complete candidate, or of those in `names`, in the order they were begun."""
    folders = sorted(run.file("candidates").glob(f"*/{IDENTITY}"), key=lambda path: (path.stat().st_mtime_ns, path))
    every = (run.read_json(str(path.relative_to(run.file()))) for path in folders)
    records = {record["name"]: record for record in every if names is None or record["name"] in names}
    complete = [name for name in records if is_complete(run, name, with_answers, with_states)]
    homes = {DENSE: (DENSE,)} | {name: path_of(name) for name in complete}
    return {
        name: Results(
            read_file(run, read_answers, *home, ANSWERS)[name] if with_answers else (),
            read_file(run, States.read, *home, STATES) if with_states and name != DENSE else None,
            run.read_json(*home, COST),
            records.get(name, {}).get("scheme"),
            read_file(run, Margins.read, *home, MARGINS) if run.has(*home, MARGINS) else None,
            read_file(run, States.read, *home, MISMATCHES) if run.has(*home, MISMATCHES) else None,
            read_file(run, States.read, *home, DENSE_PATH) if run.has(*home, DENSE_PATH) else None,
            read_file(run, read_trajectories, *home, ROLLOUTS) if run.has(*home, ROLLOUTS) else None,
        )
        for name, home in homes.items()
    }


def read_file(run: Run, reader: Callable[[Path], T], *parts: str) -> T:
    """A file of the comparison, checked against its sum."""
    return run.read("/".join(parts), reader)


def write_seeds(run: Run, candidates: Sequence[str]) -> None:
    """Record that the candidates differ in their seed alone."""
    if len(candidates) > 1:
        run.write_json(list(candidates), *path_of(candidates[0], SEEDS))


def read_seeds(run: Run, complete: Collection[str]) -> dict[str, list[str]]:
    """Groups of candidates of which several seeds are complete, by the name of the first."""
    written = {name: run.read_json(*path_of(name, SEEDS)) for name in complete if run.has(*path_of(name, SEEDS))}
    groups = {name: [one for one in names if one in complete] for name, names in written.items()}
    return {name: names for name, names in groups.items() if len(names) > 1}


def read_answers_of(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Answer]]:
    """The answers in the folder of a comparison, by model and item; models without answers are left out."""
    answers: dict[str, dict[str, Answer]] = {}
    for name in names:
        parts = (DENSE,) if name == DENSE else path_of(name)
        file = folder.joinpath(HOME, *parts, ANSWERS)
        if file.is_file():
            answers[name] = {one.item: one for one in read_answers(file)[name]}
    return answers


def is_complete(run: Run, name: str, with_answers: bool, with_states: bool) -> bool:
    """Whether there is enough of a candidate to report on."""
    needed = [COST, *([ANSWERS] if with_answers else []), *([STATES] if with_states else [])]
    return all(run.has(*path_of(name, file)) for file in needed)


def is_measured(run: Run, name: str, with_answers: bool, with_states: bool, detail: str, damage: bool = True) -> bool:
    """Whether nothing of a candidate is left to be measured; earlier versions measured less."""
    if not is_complete(run, name, with_answers, with_states):
        return False
    further = not damage or all(run.has(*path_of(name, file)) for file in (MISMATCHES, DENSE_PATH))
    further = further and not lacks_attribution(run, name, detail)
    return not with_states or (further and keeps(run.file(*path_of(name, DETAILS)), detail))


def lacks_attribution(run: Run, name: str, detail: str) -> bool:
    """Whether erosion is still to be attributed to linears: wanted by the level of detail, and possible, as theta is here."""
    return detail != OFF and run.has(*path_of(name, THETA)) and not run.has(*path_of(name, ATTRIBUTION))


def write_inputs(run: Run, prompts: Sequence[Prompt], items: Sequence[Item]) -> None:
    """Commit prompts and items, unless they are there: a comparison has the same ones for ever."""
    for name, each in ((PROMPTS, prompts), (ITEMS, [item.described for item in items])):
        if each and not run.has(name):
            with run.writing(name) as path:
                write_prompts(each, path)


def write_tokens(run: Run, tokenizer: Tokenizer) -> None:
    """Commit the texts of the token ids in all results so far, of a comparison or of a run, unless they are there."""
    homes = [home for folder in WITH_TOKENS for home in run.file().glob(folder)]
    files = {home / name: columns for home in homes for name, columns in TOKEN_COLUMNS.items()}
    ids = ids_in({path: columns for path, columns in files.items() if path.is_file()})
    if not run.has(TOKENS) or not ids <= read_file(run, TokenTexts.read, TOKENS).ids:
        run.write_json(TokenTexts.of(tokenizer, ids).to_dict(), TOKENS)
