"""What SGLang makes of each scheme, as data: read off its choice of compressed-tensors schemes and of their kernels, not run."""

from __future__ import annotations

from collections.abc import Mapping

from onptq.checkpoint.served import ADA, AMPERE, BLACKWELL, CPU, HOPPER, Served, Verdict

SGLANG = "SGLang 0.5.23"
TRITON = "--fp8-gemm-backend triton"


def _sglang(hardware: str, verdict: Verdict, kernel: str | None, computes: str, note: str = "", **more: str) -> Served:
    return Served(SGLANG, hardware, verdict, kernel, computes, "read", note=note, **more)


_CPU = _sglang(
    CPU, "refuses", None, "nothing", "asks CUDA for the compute capability when it loads a compressed checkpoint"
)


def _refused(note: str) -> tuple[Served, ...]:
    return (*(_sglang(gpu, "refuses", None, "nothing", note) for gpu in (AMPERE, ADA, HOPPER, BLACKWELL)), _CPU)


def _marlin(computes: str) -> tuple[Served, ...]:
    return (*(_sglang(gpu, "serves", "Marlin", computes) for gpu in (AMPERE, ADA, HOPPER, BLACKWELL)), _CPU)


_EXPERTS_ALONE = "has 4-bit integer weights with 8-bit activations for experts alone"
_W8A8 = (
    *(_sglang(gpu, "serves", "int8_scaled_mm", "int8 x int8") for gpu in (AMPERE, ADA, HOPPER)),
    _sglang(BLACKWELL, "refuses", None, "nothing", "its int8 GEMM ends with compute capability 9.0"),
    _CPU,
)
_FP8 = (
    _sglang(
        AMPERE, "differs", "Marlin", "E4M3 x 16-bit", "its GEMMs of E4M3 begin with Ada: activations stay in 16 bits"
    ),
    *(_sglang(gpu, "serves", "CUTLASS FP8", "E4M3 x E4M3") for gpu in (ADA, HOPPER, BLACKWELL)),
    _CPU,
)
_FP8_BLOCK = (
    _sglang(AMPERE, "refuses", None, "nothing", "before Ada it takes one scale per row or tensor, no blocks"),
    _sglang(ADA, "serves", "Triton", "E4M3 x E4M3"),
    _sglang(HOPPER, "serves", "DeepGEMM or Triton", "E4M3 x E4M3"),
    _sglang(
        BLACKWELL,
        "differs",
        "DeepGEMM",
        "E4M3 x E4M3, scales in powers of two",
        "rounds the weights again, to scales in powers of two, where the package deep_gemm is installed",
    ),
    _sglang(BLACKWELL, "serves", "Triton", "E4M3 x E4M3", switch=TRITON),
    _CPU,
)
_NVFP4A16 = (
    *(_sglang(gpu, "serves", "Marlin", "E2M1 x 16-bit") for gpu in (AMPERE, ADA, HOPPER)),
    _sglang(BLACKWELL, "serves", "FlashInfer CuTe-DSL or Marlin", "E2M1 x 16-bit"),
    _CPU,
)
_NVFP4 = (
    *(
        _sglang(
            gpu, "differs", "Marlin", "E2M1 x 16-bit", "its GEMMs begin with Blackwell: activations stay in 16 bits"
        )
        for gpu in (AMPERE, ADA, HOPPER)
    ),
    _sglang(BLACKWELL, "serves", "FlashInfer", "E2M1 x E2M1"),
    _CPU,
)

SGLANG_TABLE: Mapping[str, tuple[Served, ...]] = {
    "W4A16": _marlin("int4 x 16-bit"),
    "W4A8": _refused(_EXPERTS_ALONE),
    "W8A8": _W8A8,
    "W8A16": _marlin("int8 x 16-bit"),
    "FP8": _FP8,
    "FP8-block": _FP8_BLOCK,
    "W4AFP8": _refused(_EXPERTS_ALONE),
    "NVFP4A16": _NVFP4A16,
    "NVFP4": _NVFP4,
    "MXFP4": _refused("has MXFP4 for experts alone"),
    "MXFP8": _refused("does not know the format"),
}

# The classes of Qwen2.5-VL and Qwen3-VL leave out tensors that they have no parameter for, and these are among them.
CACHE_WITHOUT_SCALES = (
    "keys and values go into a cache in E4M3, but Qwen2.5-VL's and Qwen3-VL's classes pass over the checkpoint's scales and "
    "take 1"
)
NO_INT8_EXPERTS = "its int8 experts are for NPUs alone"
