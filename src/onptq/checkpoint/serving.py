"""Who can serve a scheme: servers, GPU generations, the kernel each takes, and the switch that makes it the right one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from onptq.checkpoint.served import BLACKWELL, CPU, CPU_AMX, EVIDENCE, HARDWARE, HOPPER, WORST, Served
from onptq.checkpoint.served_by_sglang import CACHE_WITHOUT_SCALES, NO_INT8_EXPERTS, SGLANG, SGLANG_TABLE
from onptq.checkpoint.served_by_vllm import (
    CACHE_RAN,
    CACHES,
    GROUPS,
    MIXES_RAN,
    NO_CACHE,
    VLLM,
    VLLM_TABLE,
    ZERO_POINT_BITS,
)
from onptq.schemes import UNQUANTIZED, Scheme

TRANSFORMERS = "transformers 5.22"
_CPU_EXPERTS = "int4 x int8 experts are for CPUs alone"
_COMMANDS = {VLLM: "vllm serve", SGLANG: "python -m sglang.launch_server --model-path"}


def serving(scheme: Scheme, experts: bool = False) -> list[Served]:
    """Every way that is known to load a checkpoint of the scheme as OnPTQ writes it, transformers first.

    `experts`: of a model that has some."""
    parts = [one for one in scheme.parts if one != UNQUANTIZED]
    if any(one.simulated for one in parts):
        return [_simulation(experts), _unserved(scheme)]
    if len(parts) > 1:
        rows = list(_together([serving(one, experts)[1:] for one in parts], {str(one) for one in parts}))
    else:
        rows = [_fitted(row, scheme.of_linears) for row in (*VLLM_TABLE[scheme.kind], *SGLANG_TABLE[scheme.kind])]
        rows = [_of_experts(row, scheme) for row in rows] if experts else rows
    return [_simulation(experts), *(map(_cached, rows) if scheme.quantizes_cache else rows)]


def recommended(scheme: Scheme, experts: bool = False) -> Served | None:
    """The best known way to serve the scheme with vLLM on a recent GPU; None where only a simulation exists."""
    if scheme.simulated:
        return None
    every = serving(scheme, experts)
    rows = [row for gpu in (HOPPER, BLACKWELL) for row in every if (row.server, row.hardware) == (VLLM, gpu)]
    return next((row for row in rows if row.verdict == "serves"), rows[0])


def serve_command(folder: str, row: Served) -> str:
    """The command of a row's server."""
    return " ".join((_COMMANDS[row.server], folder, *((row.switch,) if row.switch else ())))


def _simulation(experts: bool) -> Served:
    note = "exact, with compressed-tensors installed; no faster and no smaller in memory than the source"
    if experts:
        note = (
            "exact by OnPTQ's loader, as the model card shows; by itself it wants the experts of a layer in one tensor"
        )
    return Served(TRANSFORMERS, "any", "simulates", None, "rounded values, unpacked", "run", note=note)


def _of_experts(row: Served, scheme: Scheme) -> Served:
    """A row of a dense model, for one with experts: servers have other kernels for these, and nothing of it was run."""
    refused = {(VLLM, "W4A8"): _CPU_EXPERTS, (SGLANG, "W8A8"): NO_INT8_EXPERTS}.get((row.server, scheme.kind))
    if refused and row.hardware not in (CPU, CPU_AMX):
        return replace(row, verdict="refuses", kernel=None, computes="nothing", evidence="read", note=refused)
    if row.verdict == "refuses":
        return row
    note = "; ".join(part for part in (row.note, "experts have kernels of their own, which were not run") if part)
    return replace(row, evidence="read", note=note)


def _unserved(scheme: Scheme) -> Served:
    if not scheme.others and scheme.kind == "W4A6":
        note = "no compressed-tensors scheme matches: simulation only"
        return Served(VLLM, "any", "refuses", None, "nothing", "run", note=note)
    note = "no kernel is known to run it: simulation only"
    return Served(VLLM, "any", "doubtful", None, "unknown", "untested", note=note)


def _together(parts: Sequence[Sequence[Served]], kinds: set[str]) -> Iterator[Served]:
    """Rows of a scheme that is a mix of these kinds, by what servers do with each of its parts alone."""
    ways = dict.fromkeys((row.server, row.hardware, row.switch) for rows in parts for row in rows)
    order = {VLLM: 0, SGLANG: 1}
    for way in sorted(ways, key=lambda one: (order[one[0]], HARDWARE.index(one[1]), one[2] or "")):
        server, hardware, switch = way
        rows = [
            next((row for row in part if (row.server, row.hardware, row.switch) == (server, hardware, wanted)), None)
            for part in parts
            for wanted in ((switch,) if any((r.server, r.hardware, r.switch) == way for r in part) else (None,))
        ]
        known = [row for row in rows if row is not None]
        verdict = max((row.verdict for row in known), key=WORST.index)
        notes = [row.note for row in known if row.note]
        if switch is not None and any(row.switch != switch for row in known):
            verdict = max(verdict, "doubtful", key=WORST.index)
            notes.append("whether all parts of the mix take that switch was not read")
        ran = server == VLLM and kinds in MIXES_RAN.get(hardware, ())
        worst = max((row.evidence for row in known), key=tuple(EVIDENCE).index)
        yield Served(
            server,
            hardware,
            verdict,
            " and ".join(dict.fromkeys(row.kernel for row in known if row.kernel)) or None,
            " and ".join(dict.fromkeys(row.computes for row in known)),
            worst if worst != "run" or ran else "read",
            switch,
            "; ".join(dict.fromkeys((*notes, *(() if ran else ("parts as each alone: the mix was not run",))))),
        )


def _cached(row: Served) -> Served:
    """A row of a scheme's linears with a quantized KV cache beside them."""
    if row.verdict == "refuses":
        return row
    if row.server == SGLANG:
        note = "; ".join(filter(None, (row.note, CACHE_WITHOUT_SCALES)))
        return replace(row, verdict=max(row.verdict, "differs", key=WORST.index), note=note)
    taken = CACHES[row.hardware]
    note = "; ".join(filter(None, (row.note, taken or NO_CACHE)))
    if taken is None:
        return replace(row, verdict="doubtful", computes="unknown", evidence="read", note=note)
    return replace(row, evidence=row.evidence if row.hardware == CACHE_RAN else "read", note=note)


def _fitted(row: Served, scheme: Scheme) -> Served:
    """A row of one symmetric scale per row, for groups and zero points: only what the kernel's own lists say."""
    if str(scheme) == scheme.kind:
        return row
    kernel = row.kernel or ""
    unlisted = []
    if scheme.group_size is not None and kernel in GROUPS and scheme.group_size not in GROUPS[kernel]:
        unlisted.append(f"groups of {scheme.group_size} (it lists {', '.join(map(str, GROUPS[kernel]))})")
    zeros = ZERO_POINT_BITS if row.server == VLLM else {}
    if not scheme.symmetric and scheme.weight_bits not in zeros.get(kernel, (scheme.weight_bits,)):
        unlisted.append(f"zero points of {scheme.weight_bits}-bit weights")
    if unlisted:
        note = f"{kernel} does not list {' or '.join(unlisted)}; another kernel may take it"
        return replace(row, verdict="doubtful", computes="unknown", evidence="read", note=note)
    tried = scheme.group_size in (None, 128) and not (scheme.quantizes_activations and row.hardware == CPU_AMX)
    ran = row.evidence == "run" and tried and row.hardware in (CPU, CPU_AMX)
    return row if ran else replace(row, evidence="read")
