"""The tables of supported models in README.md and docs/models.md, made of what the tests cover.

`python tests/model_tables.py` writes them anew; tests/test_docs.py fails where they differ."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from random_classes import CLASSES, SPARSE

from onptq.registry import FAMILIES

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests/models/configs"
EXPERTS = {frozenset({True}): "yes", frozenset({False}): "no", frozenset({True, False}): "both"}
MEDIA = ("image", "audio", "text")
REGISTERED = {  # by name: as people call it, its checkpoints, and those of them that the README names (the first of a name)
    "qwen2.5-vl": ("Qwen2.5-VL, Qwen3-VL", "Qwen2.5-VL-3B, -7B, -72B", "`Qwen/Qwen2.5-VL-*`, `Qwen/Qwen3-VL-*`"),
    "qwen3-vl": ("Qwen2.5-VL, Qwen3-VL", "Qwen3-VL-2B, -4B, -8B, -32B", ""),
    "qwen3-vl-moe": ("Qwen2.5-VL, Qwen3-VL", SPARSE["qwen3_vl_moe"].examples, ""),
    "qwen2.5-omni": (
        "Qwen2.5-Omni, Qwen3-Omni",
        "Qwen2.5-Omni-3B, -7B: the thinker",
        "`Qwen/Qwen2.5-Omni-*`, `Qwen/Qwen3-Omni-*`",
    ),
    "qwen3-omni": ("Qwen2.5-Omni, Qwen3-Omni", f"{SPARSE['qwen3_omni_moe'].examples}: the thinker", ""),
    "llama": ("Llama", "Llama 2 and 3, SmolLM2", "any"),
    "qwen2": ("Qwen2", "Qwen2, Qwen2.5", "any"),
    "qwen3": ("Qwen3", "Qwen3: the dense sizes", "any"),
    "qwen3-moe": ("Qwen3", SPARSE["qwen3_moe"].examples, "any"),
}
README_HEAD = ("| family | takes | dense or MoE | checkpoints |", "|---|---|---|---|")
DOCS_HEAD = (
    "| `model_type` | registered | takes | experts | checked on | needs | examples |",
    "|---|---|---|---|---|---|---|",
)


def docs_table() -> list[str]:
    """One row of every registered family and of every class that a test makes."""
    return [*DOCS_HEAD, *sorted(_docs_rows(), key=str.lower)]


def readme_table() -> list[str]:
    """One row for every name of registered families that take media, one of the others, and one of all that are found."""
    named: dict[str, list[str]] = {}
    for name, (label, _, _) in REGISTERED.items():
        named.setdefault(label if FAMILIES[name].modalities != {"text"} else "", []).append(name)
    rows = []
    for label, names in named.items():
        people = label or ", ".join(dict.fromkeys(REGISTERED[name][0] for name in names))
        experts = {FAMILIES[name].sparse for name in names}
        hub = REGISTERED[names[0]][2]
        rows.append(f"| {people} | {_takes(FAMILIES[names[0]].modalities)} | {EXPERTS[frozenset(experts)]} | {hub} |")
    others = [made for key, made in (CLASSES | SPARSE).items() if not _registered(key)]
    examples = sorted({made.examples.partition(":")[0].partition(",")[0] for made in others}, key=str.lower)
    rows.append(f"| any of this structure | as its processor | both | {', '.join(examples)} |")
    return [*README_HEAD, *rows]


def _docs_rows() -> Iterator[str]:
    served = set(runpy.run_path(str(ROOT / "clients/cases.py"))["FAMILIES"])
    shaped = published_types()
    for name, (_, examples, _) in REGISTERED.items():
        family = FAMILIES[name]
        types = ", ".join(f"`{one}`" for one in family.model_types)
        checked = _checked(bool(shaped & set(family.model_types)), name in served)
        yield _row(types, f"`{name}`", family.modalities, family.sparse, checked, "", examples)
    for key, made in (CLASSES | SPARSE).items():
        if not _registered(key):
            needs, checked = "`vision`" if made.torchvision else "", _checked(made.model_type in shaped, False)
            yield _row(f"`{made.model_type}`", "", made.modalities, key in SPARSE, checked, needs, made.examples)


def _checked(shapes: bool, served: bool) -> str:
    return ", ".join(["a cycle", *(["shapes"] if shapes else []), *(["vLLM"] if served else [])])


def _row(types: str, name: str, takes: frozenset[str], sparse: bool, *cells: str) -> str:
    row = f"| {' | '.join((types, name, _takes(takes), EXPERTS[frozenset({sparse})], *cells))} |"
    return row.replace("|  |", "| |")


def published_types() -> set[str]:
    """The model types of published configs."""
    return {json.loads(file.read_text(encoding="utf-8"))["model_type"] for file in CONFIGS.glob("*.json")}


def _registered(key: str) -> bool:
    return any((CLASSES | SPARSE)[key].model_type in FAMILIES[name].model_types for name in FAMILIES)


def _takes(modalities: frozenset[str]) -> str:
    return ", ".join(one if one != "image" else "images" for one in MEDIA if one in modalities)


def rows_of(text: str, head: str) -> list[str]:
    """The lines of the table of a page that begins so."""
    lines = text.splitlines()
    return list(takewhile(lambda line: line.startswith("|"), lines[lines.index(head) :]))


TABLES = {"README.md": readme_table, "docs/models.md": docs_table}


def write() -> None:
    for name, table in TABLES.items():
        page, rows = ROOT / name, table()
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("\n".join(rows_of(text, rows[0])), "\n".join(rows)), encoding="utf-8")


if __name__ == "__main__":
    write()
