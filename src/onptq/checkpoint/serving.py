"""Who can serve a scheme: servers, GPU generations, the kernel each takes, and the switch that makes it the right one.

Facts as data, with how each is known. A checkpoint that loads is not yet one that computes what its scheme says: 4-bit weights
with int8 activations load everywhere and are multiplied with 16-bit activations by most default kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onptq.schemes import UNQUANTIZED, Scheme

VLLM, TRANSFORMERS = "vLLM 0.32", "transformers 5.22"

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
SWITCH = "--linear-backend"
HUMMING, MARLIN = f"{SWITCH} humming", f"{SWITCH} marlin"
NO_INT8 = "VLLM_CPU_INT4_W4A8=0"

_SM100_ONLY = "the choice was asked for sm100, not for sm120"
_RIGHT = "vLLM 0.32 or later: humming-kernels 0.1.10 and 0.1.12, which 0.26 to 0.30 have, gave non-numbers on an H200"
_RAN = "H200, vLLM 0.26 with humming-kernels 0.1.17"
_FASTER = "faster after `onptq tune`"
_AVX512 = "with AVX-512; without it, dies at the first request"
_SILENT = "loads without a word and does not quantize the activations"


def _vllm(
    hardware: str, verdict: Verdict, kernel: str | None, computes: str, evidence: Evidence, **more: str
) -> Served:
    return Served(VLLM, hardware, verdict, kernel, computes, evidence, **more)


_W4A16 = (
    _vllm(AMPERE, "serves", "Marlin", "int4 x 16-bit", "selected"),
    _vllm(ADA, "serves", "Marlin", "int4 x 16-bit", "selected"),
    _vllm(HOPPER, "serves", "Machete", "int4 x 16-bit", "run", note="H200, vLLM 0.26"),
    _vllm(
        HOPPER,
        "serves",
        "Marlin",
        "int4 x 16-bit",
        "run",
        switch=MARLIN,
        note="H200, vLLM 0.26; decodes faster than Machete, prefills slower",
    ),
    _vllm(
        HOPPER,
        "serves",
        "Humming",
        "int4 x 16-bit",
        "run",
        switch=HUMMING,
        note=f"{_RAN}; decodes faster than Machete, and faster still after `onptq tune`",
    ),
    _vllm(BLACKWELL, "serves", "Marlin", "int4 x 16-bit", "selected", note=_SM100_ONLY),
    _vllm(CPU, "serves", "CPUWNA16", "int4 x 16-bit", "read", note=_AVX512),
    _vllm(CPU_AMX, "differs", "CPUWNA16", "int4 x int8", "run", note="quantizes activations that should not be"),
    _vllm(CPU_AMX, "serves", "CPUWNA16", "int4 x 16-bit", "run", switch=NO_INT8),
)

_W4A8 = (
    _vllm(AMPERE, "differs", "Marlin", "int4 x 16-bit", "selected", note=_SILENT),
    _vllm(AMPERE, "serves", "Humming", "int4 x int8", "selected", switch=HUMMING),
    _vllm(ADA, "differs", "Marlin", "int4 x 16-bit", "selected", note=_SILENT),
    _vllm(ADA, "serves", "Humming", "int4 x int8", "selected", switch=HUMMING),
    _vllm(HOPPER, "differs", "Machete", "int4 x 16-bit", "run", note=f"{_SILENT} (H200, vLLM 0.26)"),
    _vllm(
        HOPPER,
        "serves",
        "Humming",
        "int4 x int8",
        "run",
        switch=HUMMING,
        note=f"{_RAN}; {_RIGHT}; VLLM_DISABLED_KERNELS=MacheteLinearKernel has the same effect; {_FASTER}",
    ),
    _vllm(BLACKWELL, "differs", "Marlin", "int4 x 16-bit", "selected", note=f"{_SILENT}; {_SM100_ONLY}"),
    _vllm(
        BLACKWELL,
        "serves",
        "Humming",
        "int4 x int8",
        "selected",
        switch=HUMMING,
        note=f"{_SM100_ONLY}; vLLM 0.32 or later",
    ),
    _vllm(CPU, "differs", "CPUWNA16", "int4 x 16-bit", "read", note=f"{_SILENT}; {_AVX512}"),
    _vllm(CPU_AMX, "serves", "CPUWNA16", "int4 x int8", "run", note=f"not with {NO_INT8}"),
)

_W8A8 = (
    _vllm(AMPERE, "serves", "CutlassInt8", "int8 x int8", "selected"),
    _vllm(ADA, "serves", "CutlassInt8", "int8 x int8", "selected"),
    _vllm(HOPPER, "serves", "CutlassInt8", "int8 x int8", "run", note="H200, vLLM 0.26"),
    _vllm(
        BLACKWELL,
        "refuses",
        "CutlassInt8",
        "nothing",
        "documented",
        note="chosen at load, but int8 GEMMs are not supported from compute capability 10.0 on",
    ),
    _vllm(CPU, "serves", "CPUInt8ScaledMM", "int8 x int8", "run"),
)

_W8A16 = (
    _vllm(AMPERE, "serves", "Marlin", "int8 x 16-bit", "read"),
    _vllm(ADA, "serves", "Marlin", "int8 x 16-bit", "read"),
    _vllm(HOPPER, "serves", "Machete", "int8 x 16-bit", "read"),
    _vllm(BLACKWELL, "serves", "Marlin", "int8 x 16-bit", "read"),
    _vllm(CPU, "refuses", None, "nothing", "run", note="no kernel for 8-bit weights with 16-bit activations"),
)

_NO_FP8 = "no GEMMs of E4M3 before Ada: the activations stay in 16 bits"
_WIDTH_32 = "outputs must be a multiple of 32"

_FP8 = (
    _vllm(AMPERE, "differs", "Humming", "E4M3 x 16-bit", "read", note=_NO_FP8),
    _vllm(ADA, "serves", "CutlassFP8", "E4M3 x E4M3", "read"),
    _vllm(HOPPER, "serves", "CutlassFP8", "E4M3 x E4M3", "read"),
    _vllm(BLACKWELL, "serves", "CutlassFP8", "E4M3 x E4M3", "read"),
    _vllm(CPU, "doubtful", None, "unknown", "untested", note="its kernel for FP8 needs AMX"),
    _vllm(CPU_AMX, "serves", "CPUFP8W8A8", "E4M3 x E4M3", "read", note=_WIDTH_32),
)

_FP8_BLOCK = (
    _vllm(AMPERE, "differs", "Humming", "E4M3 x 16-bit", "read", note=_NO_FP8),
    _vllm(ADA, "differs", "Marlin", "E4M3 x 16-bit", "read", note="GEMMs of blocks begin with Hopper"),
    _vllm(HOPPER, "serves", "DeepGEMM or CutlassFp8Block", "E4M3 x E4M3", "read"),
    _vllm(BLACKWELL, "serves", "DeepGEMM or CutlassFp8Block", "E4M3 x E4M3", "read"),
    _vllm(CPU, "doubtful", None, "unknown", "untested", note="its kernels for FP8 need AMX"),
    _vllm(CPU_AMX, "serves", "CPUFp8W8A8Block", "E4M3 x E4M3", "read", note=_WIDTH_32),
)

_HOPPER_ONLY = "no compressed-tensors scheme matches but on Hopper"

_W4AFP8 = (
    _vllm(AMPERE, "refuses", None, "nothing", "read", note=_HOPPER_ONLY),
    _vllm(ADA, "refuses", None, "nothing", "read", note=_HOPPER_ONLY),
    _vllm(
        HOPPER,
        "serves",
        "CutlassW4A8",
        "int4 x E4M3",
        "read",
        note="widths must be multiples of 128; rounds the scales of groups to E4M3, which the simulation does not",
    ),
    _vllm(BLACKWELL, "refuses", None, "nothing", "read", note=_HOPPER_ONLY),
    _vllm(CPU, "refuses", None, "nothing", "read", note=_HOPPER_ONLY),
)

_NO_CPU = _vllm(CPU, "refuses", None, "nothing", "read", note="no kernel on CPUs")
EMULATION = f"{SWITCH} emulation"


def _weight_only(hardware: str, kernel: str, computes: str) -> Served:
    """A row of a scheme whose activations need Blackwell."""
    return _vllm(
        hardware,
        "differs",
        kernel,
        computes,
        "read",
        note="its GEMMs begin with Blackwell: activations stay in 16 bits",
    )


_NVFP4A16 = (
    *(_vllm(gpu, "serves", "Marlin", "E2M1 x 16-bit", "read") for gpu in (AMPERE, ADA, HOPPER)),
    _vllm(BLACKWELL, "serves", "FlashInfer CuTe-DSL or Marlin", "E2M1 x 16-bit", "read"),
    _NO_CPU,
)

_NVFP4 = (
    *(_weight_only(gpu, "Marlin", "E2M1 x 16-bit") for gpu in (AMPERE, ADA, HOPPER)),
    _vllm(HOPPER, "simulates", "Emulation", "rounded values, unpacked", "read", switch=EMULATION),
    _vllm(BLACKWELL, "serves", "FlashInfer or CutlassNvFp4", "E2M1 x E2M1", "read"),
    _NO_CPU,
)

_MXFP4 = (
    *(_weight_only(gpu, "Marlin", "E2M1 x 16-bit") for gpu in (AMPERE, ADA, HOPPER)),
    _vllm(BLACKWELL, "serves", "FlashInfer", "E2M1 x E2M1", "read"),
    _NO_CPU,
)

_MXFP8 = (
    *(_weight_only(gpu, "Marlin", "E4M3 x 16-bit") for gpu in (AMPERE, ADA, HOPPER)),
    _vllm(BLACKWELL, "serves", "FlashInfer", "E4M3 x E4M3", "read"),
    _NO_CPU,
)

TABLE: Mapping[str, tuple[Served, ...]] = {
    "W4A16": _W4A16,
    "W4A8": _W4A8,
    "W8A8": _W8A8,
    "W8A16": _W8A16,
    "FP8": _FP8,
    "FP8-block": _FP8_BLOCK,
    "W4AFP8": _W4AFP8,
    "NVFP4A16": _NVFP4A16,
    "NVFP4": _NVFP4,
    "MXFP4": _MXFP4,
    "MXFP8": _MXFP8,
}

# A KV cache in E4M3, read from what vLLM's attentions take: FlashAttention from Hopper on, Triton from Ada on.
_TAKEN = "KV cache in E4M3 with the checkpoint's scales"
_QUERIES = f"{_TAKEN}; FlashAttention rounds queries to it, too, with a scale of 1, which the simulation does not"
CACHES: Mapping[str, str | None] = {  # None: nothing there is known to take it
    AMPERE: None,
    ADA: _TAKEN,
    HOPPER: _QUERIES,
    BLACKWELL: _QUERIES,
    CPU: _TAKEN,
    CPU_AMX: _TAKEN,
}
NO_CACHE = "FlashAttention and Triton take no KV cache in E4M3 there; FlashInfer was not read"
_CPU_EXPERTS = "int4 x int8 experts are for CPUs alone"

# Group sizes each kernel lists, beside one scale per row. The CPU's kernel takes any even size.
GROUPS = {"Marlin": (32, 64, 128), "Machete": (64, 128)}
ZERO_POINT_BITS = {"Marlin": (4,), "Machete": (4, 8), "CPUWNA16": (4,)}


def serving(scheme: Scheme, experts: bool = False) -> list[Served]:
    """Every way that is known to load a checkpoint of the scheme as OnPTQ writes it, transformers first.

    `experts`: of a model that has some."""
    parts = [one for one in scheme.parts if one != UNQUANTIZED]
    if any(one.simulated for one in parts):
        return [_simulation(experts), _unserved(scheme)]
    if len(parts) > 1:
        rows = list(_together([serving(one, experts)[1:] for one in parts]))
    else:
        rows = [_fitted(row, scheme.of_linears) for row in TABLE[scheme.kind]]
        rows = [_of_experts(row, scheme) for row in rows] if experts else rows
    return [_simulation(experts), *(map(_cached, rows) if scheme.quantizes_cache else rows)]


def recommended(scheme: Scheme, experts: bool = False) -> Served | None:
    """The best known way to serve the scheme with vLLM on a recent GPU; None where only a simulation exists."""
    if scheme.simulated:
        return None
    every = serving(scheme, experts)
    rows = [row for gpu in (HOPPER, BLACKWELL) for row in every if (row.server, row.hardware) == (VLLM, gpu)]
    return next((row for row in rows if row.verdict == "serves"), rows[0])


def serve_command(folder: str, switch: str | None) -> str:
    return " ".join(("vllm serve", folder, *((switch,) if switch else ())))


def _simulation(experts: bool) -> Served:
    note = "exact, with compressed-tensors installed; no faster and no smaller in memory than the source"
    if experts:
        note = (
            "exact by OnPTQ's loader, as the model card shows; by itself it wants the experts of a layer in one tensor"
        )
    return Served(TRANSFORMERS, "any", "simulates", None, "rounded values, unpacked", "run", note=note)


def _of_experts(row: Served, scheme: Scheme) -> Served:
    """A row of a dense model, for one with experts: vLLM has other kernels for these, and nothing of it was run."""
    if scheme.kind == "W4A8" and row.hardware not in (CPU, CPU_AMX):
        return replace(row, verdict="refuses", kernel=None, computes="nothing", evidence="read", note=_CPU_EXPERTS)
    if row.verdict == "refuses":
        return row
    note = "; ".join(part for part in (row.note, "experts have kernels of their own, which were not run") if part)
    return replace(row, evidence="read", note=note)


def _unserved(scheme: Scheme) -> Served:
    if not scheme.others and scheme.kind == "W4A6":
        return _vllm(
            "any", "refuses", None, "nothing", "run", note="no compressed-tensors scheme matches: simulation only"
        )
    return _vllm("any", "doubtful", None, "unknown", "untested", note="no kernel is known to run it: simulation only")


def _together(parts: Sequence[Sequence[Served]]) -> Iterator[Served]:
    """Rows of a mixed scheme, by what servers do with each of its parts alone."""
    switches = dict.fromkeys((row.hardware, row.switch) for rows in parts for row in rows)
    for hardware, switch in sorted(switches, key=lambda one: (list(CACHES).index(one[0]), one[1] or "")):
        rows = [
            next((row for row in part if (row.hardware, row.switch) == (hardware, wanted)), None)
            for part in parts
            for wanted in ((switch,) if any((r.hardware, r.switch) == (hardware, switch) for r in part) else (None,))
        ]
        known = [row for row in rows if row is not None]
        verdict = max((row.verdict for row in known), key=WORST.index)
        notes = [row.note for row in known if row.note]
        if switch is not None and any(row.switch != switch for row in known):
            verdict = max(verdict, "doubtful", key=WORST.index)
            notes.append("whether all parts of the mix take that switch was not read")
        yield Served(
            VLLM,
            hardware,
            verdict,
            " and ".join(dict.fromkeys(row.kernel for row in known if row.kernel)) or None,
            " and ".join(dict.fromkeys(row.computes for row in known)),
            max((row.evidence for row in known), key=tuple(EVIDENCE).index)
            if any(row.evidence != "run" for row in known)
            else "read",
            switch,
            "; ".join(dict.fromkeys((*notes, "parts as each alone: the mix was not run"))),
        )


def _cached(row: Served) -> Served:
    """A row of a scheme's linears with a quantized KV cache beside them."""
    if row.verdict == "refuses":
        return row
    taken = CACHES[row.hardware]
    note = "; ".join(filter(None, (row.note, taken or NO_CACHE)))
    if taken is None:
        return replace(row, verdict="doubtful", computes="unknown", evidence="read", note=note)
    return replace(row, evidence="read", note=note)


def _fitted(row: Served, scheme: Scheme) -> Served:
    """A row of one symmetric scale per row, for groups and zero points: only what the kernel's own lists say."""
    if str(scheme) == scheme.kind:
        return row
    kernel = row.kernel or ""
    unlisted = []
    if scheme.group_size is not None and kernel in GROUPS and scheme.group_size not in GROUPS[kernel]:
        unlisted.append(f"groups of {scheme.group_size} (it lists {', '.join(map(str, GROUPS[kernel]))})")
    if not scheme.symmetric and scheme.weight_bits not in ZERO_POINT_BITS.get(kernel, (scheme.weight_bits,)):
        unlisted.append(f"zero points of {scheme.weight_bits}-bit weights")
    if unlisted:
        note = f"{kernel} does not list {' or '.join(unlisted)}; another kernel may take it"
        return replace(row, verdict="doubtful", computes="unknown", evidence="read", note=note)
    tried = scheme.group_size in (None, 128) and not scheme.quantizes_activations
    ran = row.evidence == "run" and tried and row.hardware in (CPU, CPU_AMX)
    return row if ran else replace(row, evidence="read")
