"""vLLM's log-probabilities of every token of random texts: `python vllm_logprobs.py JOB`. Needs vLLM, but not OnPTQ."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "onptq-vllm" / "src" / "onptq_vllm" / "bench"))

from timing import Job, draw_prompts, serve  # type: ignore[import-not-found]
from vllm_engine import ENVIRONMENT, describe_kernels, options  # type: ignore[import-not-found]


def run(job: Job) -> dict[str, Any]:
    """Log-probabilities of all tokens but the first, the likeliest tokens in their places, and the kernels."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch
    import vllm  # type: ignore[import-not-found]

    llm = vllm.LLM(**options(job, torch.cuda.is_available()))
    texts = draw_prompts(job.batches[0], job.prompt_tokens, job.vocabulary)
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    logprobs, likeliest = [], []
    for text, one in zip(texts, llm.generate([{"prompt_token_ids": ids} for ids in texts], sampling), strict=True):
        places = list(zip(text, one.prompt_logprobs, strict=True))[1:]
        logprobs.append([by_token[token].logprob for token, by_token in places])
        likeliest.append([min(by_token, key=lambda token: by_token[token].rank) for _, by_token in places])
    kernels = llm.apply_model(describe_kernels)[0]
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    return {"logprobs": logprobs, "likeliest": likeliest, "kernels": kernels, "versions": versions}


if __name__ == "__main__":
    serve(run)
    sys.stdout.flush()
    os._exit(0)  # the result is printed: do not wait for a shutdown that may hang
