"""What a run leaves on disk, and whether it is what an undisturbed one leaves."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Times, and how often it was begun; the model card and its picture are no part of what works.
VARYING = {"run/log.jsonl", "run/summary.json", "run/SHA256SUMS", "run/.lock", "README.md", "results.svg"}
SLOW = ("seconds", "verification")  # of the summary: what times tell, and what is absent where it was not asked for


def home(out: Path) -> Path:
    return out.with_name(f"{out.name}-run")


def files(out: Path) -> dict[str, Path]:
    """Every file: `run/NAME` of the run, `NAME` of the checkpoint."""
    parts = (("run/", home(out)), ("", out))
    return {
        f"{prefix}{path.relative_to(folder)}": path
        for prefix, folder in parts
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def copy(source: Path, out: Path) -> None:
    for old, new in ((home(source), home(out)), (source, out)):
        if old.exists():
            shutil.copytree(old, new)


def delete(out: Path) -> None:
    for folder in (home(out), out):
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Reference:
    """An undisturbed run."""

    out: Path
    phases: tuple[tuple[str, float], ...]  # and their seconds
    contents: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, out: Path, phases: list[tuple[str, float]], seconds: float) -> Reference:
        begun = [start for _, start in phases] + [seconds]
        lasting = tuple((name, begun[i + 1] - start) for i, (name, start) in enumerate(phases))
        return cls(out, lasting, {name: path.read_bytes() for name, path in files(out).items()})

    def difference(self, out: Path) -> str | None:
        """How a finished run differs from this one; None if it does not."""
        found = files(out)
        if extra := sorted(found.keys() - self.contents.keys()):
            return f"it left {', '.join(extra)}"
        if missing := sorted(self.contents.keys() - found.keys()):
            return f"it lacks {', '.join(missing)}"
        changed = [name for name in found if name not in VARYING and found[name].read_bytes() != self.contents[name]]
        if changed:
            return f"other bytes in {', '.join(changed)}"
        return None if _summary(out) == _summary(self.out) else "another summary"

    def false_checkpoint(self, out: Path) -> str | None:
        """How a folder that looks like a checkpoint is none; None where it is whole, or does not look like one."""
        if not (out / "config.json").exists():
            return None
        for name, content in self.contents.items():
            if not name.startswith("run/") and (not (out / name).is_file() or (out / name).read_bytes() != content):
                return f"config.json is there, but {name} is not as it must be"
        return None


def _summary(out: Path) -> dict[str, Any]:
    values = json.loads((home(out) / "summary.json").read_text())
    return {name: value for name, value in values.items() if name not in SLOW}
