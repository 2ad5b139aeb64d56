"""Several results on one page: only what answers the same prompts and items of the same dense model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError
from onptq.page.contract import Candidate, Page
from onptq.page.places import Place
from onptq.plain_yaml import read_yaml
from onptq.run import RECORD

DECISIVE = {  # by section of recipe.yaml, the fields that must be the same, and what differs otherwise
    "model": (("sha256",), "the dense model"),
    "prompts": (("sha256",), "the prompts"),
    "items": (("sha256",), "the items"),
    "comparison": (("max_tokens",), "the length of the answers (follow.max_tokens)"),
}


def merge(pages: Sequence[Page], places: Sequence[Place]) -> Page:
    """One page with the candidates of all; what two folders have in common is there once."""
    check_alike(places)
    first = pages[0]
    candidates: list[Candidate] = []
    for page, place in zip(pages, places, strict=True):
        for one in page.candidates:
            if not any(_measured_alike(one, other) for other in candidates):
                candidates.append(_named(one, place, pages))
    return replace(
        first,
        title=f"{first.dense} and {len(candidates)} quantized models",
        origin="; ".join(dict.fromkeys(page.origin for page in pages)),
        candidates=candidates,
        tokens={token: text for page in pages for token, text in page.tokens.items()},
        measures={name: one for page in reversed(pages) for name, one in page.measures.items()},
        notes=list(dict.fromkeys(note for page in pages for note in page.notes)),
        plots=(),
    )


def check_alike(places: Sequence[Place]) -> None:
    """Refuse folders whose answers are not to the same questions of the same model."""
    records = [_record(place) for place in places]
    for place, record in zip(places[1:], records[1:], strict=True):
        differences = [
            what
            for section, (names, what) in DECISIVE.items()
            if any(_field(records[0], section, name) != _field(record, section, name) for name in names)
        ]
        if ("comparison" in record) != ("comparison" in records[0]):
            differences = ["what they hold: a comparison and a run alone"]
        if differences:
            raise OnPTQError(
                f"{places[0].folder} and {place.folder} cannot be shown side by side: they differ in "
                f"{' and '.join(differences)}; expected results on the same prompts and items of the same dense model"
            )


def _named(one: Candidate, place: Place, pages: Sequence[Page]) -> Candidate:
    """The candidate, with its folder before a name that several folders have."""
    times = sum(one.name == other.name for page in pages for other in page.candidates)
    if times < 2:
        return one
    folder = _label(place)
    return replace(one, name=f"{folder}: {one.name}", title=f"{folder}: {one.title}")


def _label(place: Place) -> str:
    run = getattr(place, "run", None) or place.folder
    return Path(run).resolve().name.removesuffix("-run")


def _measured_alike(one: Candidate, other: Candidate) -> bool:
    """Whether both have the same answers, states and size, so that nothing tells them apart."""
    return (one.scheme, one.size_bytes, one.answers, one.responses) == (
        other.scheme,
        other.size_bytes,
        other.answers,
        other.responses,
    ) and other.name.endswith(one.name)


def _record(place: Place) -> Mapping[str, Any]:
    record: Mapping[str, Any] = read_yaml(place.home / RECORD)
    return record


def _field(record: Mapping[str, Any], section: str, name: str) -> Any:
    return (record.get(section) or {}).get(name)
