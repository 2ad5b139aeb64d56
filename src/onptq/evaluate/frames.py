"""The results of a comparison as a pandas table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onptq.bank import import_pandas
from onptq.errors import OnPTQError
from onptq.evaluate.baselines import FOLDER
from onptq.evaluate.comparison import REPORT_JSON
from onptq.files import read_json

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped, unused-ignore]


def load_results(path: str | Path) -> pandas.DataFrame:
    """One row per model, with `MEASURE`, `MEASURE_low` and `MEASURE_high` of every figure of the comparison.

    `path` is the folder of a comparison, its report.json, or the folder of a run that was evaluated (`DIR-run`).
    """
    given = Path(path)
    files = (given, given / REPORT_JSON, given / FOLDER / REPORT_JSON)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise OnPTQError(f"there is no {REPORT_JSON} in {given}; expected the folder of `onptq compare`")
    try:
        models = read_json(file)["models"]
        rows = {name: _row(model["figures"]) for name, model in models.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise OnPTQError(f"{file} is no report of `onptq compare`: {error!r}") from error
    return import_pandas().DataFrame.from_dict(rows, orient="index").rename_axis("model")


def _row(figures: dict[str, dict[str, float | None]]) -> dict[str, float | None]:
    suffixes = {"": "value", "_low": "low", "_high": "high"}
    return {name + end: one[part] for name, one in figures.items() for end, part in suffixes.items()}
