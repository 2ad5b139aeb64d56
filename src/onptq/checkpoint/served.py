"""A row of the serving table: what one server makes of a scheme on one kind of hardware, and how that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# serves: computes the scheme on its own numbers. simulates: computes its values, in 16 or 32 bits. differs: answers, but computes
# another scheme. doubtful: nobody has seen it work. refuses: does not load or does not run.
Verdict = Literal["serves", "simulates", "differs", "doubtful", "refuses"]

Evidence = Literal["run", "selected", "read", "documented", "untested"]
EVIDENCE: Mapping[Evidence, str] = {
    "run": "seen on such hardware",
    "selected": "the server's choice of kernel, not run",
    "read": "from the kernel's list of types, not run",
    "documented": "the server's documentation says so",
    "untested": "nobody has tried it",
}


WORST: tuple[Verdict, ...] = ("serves", "simulates", "differs", "doubtful", "refuses")


@dataclass(frozen=True)
class Served:
    """One way to serve a scheme; several for one server and device where a switch changes what is computed."""

    server: str
    hardware: str
    verdict: Verdict
    kernel: str | None  # None where there is none
    computes: str  # what is really multiplied
    evidence: Evidence
    switch: str | None = None  # what the server must be given for it; None is its default
    note: str = ""


AMPERE, ADA, HOPPER, BLACKWELL = "Ampere sm80", "Ada sm89", "Hopper sm90", "Blackwell sm100/120"
CPU, CPU_AMX = "CPU", "CPU with AMX"
HARDWARE = (AMPERE, ADA, HOPPER, BLACKWELL, CPU, CPU_AMX)
