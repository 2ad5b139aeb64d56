"""One checkpoint in transformers, in a process of its own: `python -m onptq_vllm.bench.transformers_engine JOB`.

GEMMs are in integers if weights and activations are quantized, else in floats."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast, get_args

import torch

from onptq.checkpoint.load import load_reader
from onptq.checkpoint.source import DTYPES, choose_device, open_checkpoint
from onptq.errors import OnPTQError
from onptq.models.language_model import LanguageModel
from onptq.quantizer.integers import LowBitLinear
from onptq_vllm.bench.timing import Job, Memory, ProcessMemory, measure, serve
from onptq_vllm.linears.humming import HummingLinear
from onptq_vllm.linears.swap import Backend, swap_linears

SIMULATED = "simulated"  # GEMMs of rounded values in floats
BACKENDS = (*get_args(Backend), SIMULATED)


class TensorMemory:
    """Memory of tensors on the GPU."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


def run(job: Job) -> dict[str, Any]:
    if job.mode != "eager":
        raise OnPTQError(f"mode {job.mode!r}: transformers runs in eager mode only; expected eager")
    device = choose_device("auto")
    began = time.perf_counter()
    reader = load_reader(open_checkpoint(job.folder), DTYPES[job.dtype], device, ())
    if job.linear_backend != SIMULATED:
        swap_linears(reader.model, cast(Backend, job.linear_backend or "torch"))
    started = time.perf_counter() - began
    model: Any = reader.model
    model.generation_config.eos_token_id = None
    memory: Memory = TensorMemory() if device.type == "cuda" else ProcessMemory()

    @torch.inference_mode()
    def generate(prompts: Sequence[list[int]], tokens: int) -> None:
        ids = torch.tensor(list(prompts), device=device)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    import transformers

    return {
        "kernels": describe_kernels(reader),
        "weight_bytes": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "cache_bytes": 0,
        "started_in": started,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "batches": list(measure(generate, job, memory)),
    }


def describe_kernels(reader: LanguageModel) -> dict[str, int]:
    """Descriptions of the decoder's linears (class, operands, rounding of activations), with their numbers."""
    linears = (block.child(name) for block in reader.structure.blocks for name in block.linears)
    return dict(Counter(map(_describe, linears)))


def _describe(linear: Any) -> str:
    bits: int | None
    if isinstance(linear, LowBitLinear | HummingLinear):
        operands, bits = linear.operands, linear.activation_bits
    else:
        weight, scheme = getattr(linear, "weight", None), getattr(linear, "quantization_scheme", None)
        operands = "packed" if weight is None else str(weight.dtype).removeprefix("torch.")
        bits = getattr(getattr(scheme, "input_activations", None), "num_bits", None)
    rounded = "" if bits is None else f", activations rounded to {bits} bits"
    return f"{type(linear).__name__} / {operands}{rounded}"


if __name__ == "__main__":
    serve(run)
