"""What vLLM makes of each scheme, as data.

A checkpoint that loads is not yet one that computes what its scheme says: 4-bit weights with int8 activations load everywhere
and are multiplied with 16-bit activations by most default kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

from onptq.checkpoint.served import ADA, AMPERE, BLACKWELL, CPU, CPU_AMX, HOPPER, Evidence, Served, Verdict

VLLM = "vLLM 0.32"
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
    _vllm(CPU, "serves", "CPUWNA16", "int4 x 16-bit", "run", note=_AVX512),
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
    _vllm(CPU, "differs", "CPUWNA16", "int4 x 16-bit", "run", note=f"{_SILENT}; {_AVX512}"),
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
    _vllm(CPU, "serves", "ChannelWiseTorchFP8", "E4M3 x E4M3", "run"),
    _vllm(CPU_AMX, "serves", "CPUFP8W8A8", "E4M3 x E4M3", "read", note=_WIDTH_32),
)

_FP8_BLOCK = (
    _vllm(AMPERE, "differs", "Humming", "E4M3 x 16-bit", "read", note=_NO_FP8),
    _vllm(ADA, "differs", "Marlin", "E4M3 x 16-bit", "read", note="GEMMs of blocks begin with Hopper"),
    _vllm(HOPPER, "serves", "DeepGEMM or CutlassFp8Block", "E4M3 x E4M3", "read"),
    _vllm(BLACKWELL, "serves", "DeepGEMM or CutlassFp8Block", "E4M3 x E4M3", "read"),
    _vllm(CPU, "refuses", None, "nothing", "run", note="its kernels for blocks need AMX"),
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
    _vllm(CPU, "refuses", None, "nothing", "run", note=_HOPPER_ONLY),
)

_NO_CPU = _vllm(CPU, "refuses", None, "nothing", "run", note="no kernel on CPUs, nor its emulation")
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

VLLM_TABLE: Mapping[str, tuple[Served, ...]] = {
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
CACHE_RAN = CPU  # seen there beside W8A8; attention does not see what linears are
MIXES_RAN = {CPU: ({"W4A16", "W8A8"},)}
NO_CACHE = "FlashAttention and Triton take no KV cache in E4M3 there; FlashInfer was not read"

# Group sizes each kernel lists, beside one scale per row. The CPU's kernel takes any even size.
GROUPS = {"Marlin": (32, 64, 128), "Machete": (64, 128)}
ZERO_POINT_BITS = {"Marlin": (4,), "Machete": (4, 8), "CPUWNA16": (4,)}
