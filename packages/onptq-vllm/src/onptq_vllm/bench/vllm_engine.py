"""One checkpoint in vLLM, in a process of its own: `python vllm_engine.py JOB`. Needs vLLM and timing.py, not OnPTQ."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if __package__:
    from onptq_vllm.bench.timing import Job, Memory, ProcessMemory, draw_prompts, measure, serve
else:  # vLLM's interpreter may have no OnPTQ; this folder must not hide other modules either
    from timing import Job, Memory, ProcessMemory, draw_prompts, measure, serve  # type: ignore[import-not-found, no-redef]

    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model in this process, where it can be inspected
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PACKAGE = "humming-kernels"
SWITCHES = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_BATCH_INVARIANT")  # environment variables that change the speed
CHECKED = 8  # tokens that are decoded and then prefilled
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # of a decoder layer, as vLLM joins them


class TensorMemory:
    """Memory of tensors on the GPU, without the key-value cache that vLLM reserves at its start and without graphs."""

    def __init__(self, cache_bytes: int) -> None:
        self.cache_bytes = cache_bytes

    def reset(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        import torch

        return int(torch.cuda.max_memory_allocated()) - self.cache_bytes


def run(job: Job) -> dict[str, Any]:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch
    import vllm  # type: ignore[import-not-found]

    on_gpu = bool(torch.cuda.is_available())
    began = time.perf_counter()
    llm = vllm.LLM(**options(job, on_gpu))
    started = time.perf_counter() - began
    kernels = llm.apply_model(describe_kernels)[0]
    weights = llm.apply_model(weight_bytes)[0]
    cache = cache_bytes(llm)
    memory: Memory = TensorMemory(cache) if on_gpu else ProcessMemory()
    plain = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    decode = vllm.SamplingParams(max_tokens=CHECKED, logprobs=0, **plain)
    prefill = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, **plain)

    def generate(prompts: Sequence[list[int]], tokens: int) -> None:
        parameters = vllm.SamplingParams(max_tokens=tokens, **plain)
        assert all(len(one.outputs[0].token_ids) == tokens for one in _generate(llm, prompts, parameters))

    return {
        "kernels": kernels,
        "weight_bytes": weights,
        "cache_bytes": cache,
        "linear_backend": job.linear_backend if on_gpu else None,
        "started_in": started,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "hardware": "sm{}{}".format(*torch.cuda.get_device_capability()) if on_gpu else "cpu",
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__} | humming_version(),
        "environment": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "batches": list(measure(generate, job, memory)),
        "reserved_bytes": int(torch.cuda.memory_reserved()) - cache if on_gpu else None,
    } | check_logprobs(llm, decode, prefill, job)


def check_logprobs(llm: Any, decode: Any, prefill: Any, job: Job) -> dict[str, float]:
    """The number of log-probabilities that are not finite, and the largest difference between decoding and prefill.

    Fast kernels can be wrong, for one row as well as for thousands.
    """
    not_finite, largest = 0, 0.0
    for batch in job.batches:
        prompts = draw_prompts(batch, job.prompt_tokens, job.vocabulary)
        answers = [one.outputs[0] for one in _generate(llm, prompts, decode)]
        sequences = [[*ids, *answer.token_ids] for ids, answer in zip(prompts, answers, strict=True)]
        for ids, answer, again in zip(sequences, answers, _generate(llm, sequences, prefill), strict=True):
            decoded = _values(answer.token_ids, answer.logprobs)
            prefilled = _values(ids[1:], again.prompt_logprobs[1:])
            not_finite += sum(not math.isfinite(one) for one in (*decoded, *prefilled))
            pairs = zip(decoded, prefilled[-len(decoded) :], strict=True)
            differences = (abs(one - other) for one, other in pairs)
            largest = max((largest, *(one for one in differences if math.isfinite(one))))
    return {"not_finite": not_finite, "decoded_apart": largest}


def _generate(llm: Any, prompts: Sequence[Sequence[int]], parameters: Any) -> Any:
    return llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], parameters, use_tqdm=False)


def _values(ids: Sequence[int], places: Sequence[Any]) -> list[float]:
    return [place[token].logprob for token, place in zip(ids, places, strict=True)]


def options(job: Job, on_gpu: bool) -> dict[str, Any]:
    """Options of vLLM: the same for every checkpoint but for its backend. `job.options` override them."""
    most = max(job.batches)
    chosen: dict[str, Any] = {
        "model": job.folder,
        "skip_tokenizer_init": True,
        "dtype": job.dtype,
        "max_model_len": job.prompt_tokens + job.new_tokens + 16,
        "max_num_seqs": most,
        "max_num_batched_tokens": most * job.prompt_tokens,  # a batch is prefilled in one forward
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
        "disable_log_stats": True,
        "seed": 0,
    }
    if on_gpu:
        chosen |= {"kv_cache_memory_bytes": int(job.cache_gib * 2**30), "gpu_memory_utilization": 0.1}
        chosen |= {"linear_backend": job.linear_backend} if job.linear_backend else {}
    if job.mode == "compiled":
        chosen |= {"compilation_config": {"cudagraph_capture_sizes": list(job.graph_sizes)}}
    else:
        chosen |= {"enforce_eager": True}
    for name, value in job.options.items():
        own = chosen.get(name)
        chosen[name] = own | value if isinstance(own, dict) and isinstance(value, dict) else value
    return chosen


def humming_version() -> dict[str, str]:
    try:
        return {PACKAGE: version(PACKAGE)}
    except PackageNotFoundError:
        return {}


def describe_kernels(model: Any) -> dict[str, int]:
    """Descriptions of the decoder's linears in the loaded model (scheme, kernel, operands), with their numbers."""
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEARS and ".layers." in name and "visual" not in name and "tower" not in name:
            counts[_describe(module)] += 1
    return dict(counts)


def _describe(module: Any) -> str:
    scheme = getattr(module, "scheme", None)
    if scheme is None:
        return type(getattr(module, "quant_method", module)).__name__
    kernel = getattr(scheme, "kernel", None)
    name = f"{type(scheme).__name__} / {type(kernel).__name__ if kernel is not None else 'no kernel of its own'}"
    # Only humming names its operands; the configuration of other kernels has the model's dtype, whatever they round to.
    metas = (getattr(module, "humming_metas", None) or {"": getattr(kernel, "layer_config", None)}).values()
    return ", ".join(
        (name, *(f"{one.a_dtype} x {one.b_dtype}{_few_rows(one)}{_rounds(one)}" for one in metas if one is not None))
    )


def _few_rows(layer: Any) -> str:
    """The rows that OnPTQ's plugin computes instead of humming (`onptq_vllm.schedules.decoding`)."""
    rows_of = getattr(getattr(sys.modules.get("humming.ops"), "humming_gemm", None), "_onptq_few_rows", None)
    rows = rows_of(layer.to_str()) if rows_of else ()
    spans = (f"{above + 1} to {upto}" if above + 1 < upto else str(upto) for above, upto in rows)
    return f" (rows {' and '.join(spans)} by few_rows)" if rows else ""


def _rounds(layer: Any) -> str:
    """A note if OnPTQ's kernels round the activations (`onptq_vllm.schedules.rounding`)."""
    return ", rounded by onptq" if getattr(layer, "_onptq_rounds", False) else ""


def weight_bytes(model: Any) -> int:
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def cache_bytes(llm: Any) -> int:
    """Bytes of the reserved key-value cache, from the runner that holds it."""
    worker = llm.llm_engine.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    storages = {}
    for tensor in runner.kv_caches:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    serve(run)
    sys.stdout.flush()
    os._exit(0)  # the result is printed: do not wait for a shutdown that may hang
