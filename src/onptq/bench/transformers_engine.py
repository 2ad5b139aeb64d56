"""One checkpoint in transformers, in a process of its own: `python -m onptq.bench.transformers_engine JOB`. A quantized one is
simulated there: its weights are multiplied as floats."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from onptq.bench.timing import Job, Memory, ProcessMemory, measure, tell
from onptq.errors import OnPTQError
from onptq.evaluate.reader import Reader, load_reader, open_checkpoint
from onptq.models.loading import DTYPES, choose_device
from onptq.models.structure import LINEARS


class TensorMemory:
    """What tensors held on the GPU."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


def run(job: Job) -> dict[str, Any]:
    if job.mode != "eager":
        raise OnPTQError(f"mode {job.mode!r}: transformers is measured as it generates by default; expected eager")
    device = choose_device("auto")
    began = time.perf_counter()
    reader = load_reader(open_checkpoint(job.folder), DTYPES[job.dtype], device, ())
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


def describe_kernels(reader: Reader) -> dict[str, int]:
    """What multiplies in the decoder's linears: the module's class, the weight it holds, and what is done to its input."""
    found: Counter[str] = Counter()
    for block in reader.structure.blocks:
        for name in LINEARS:
            module = block.child(name)
            scheme = getattr(module, "quantization_scheme", None)
            activations = getattr(scheme, "input_activations", None)
            rounded = "" if activations is None else f", activations rounded to {activations.num_bits} bits"
            weight = getattr(module, "weight", None)
            dtype = "packed" if weight is None else str(weight.dtype).removeprefix("torch.")
            found[f"{type(module).__name__} / {dtype}{rounded}"] += 1
    return dict(found)


if __name__ == "__main__":
    tell(run(Job.parse(sys.argv[1])))
