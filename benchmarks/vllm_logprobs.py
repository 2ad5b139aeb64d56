"""What vLLM says of every token of random texts: `python vllm_logprobs.py JOB`. Needs vLLM, and nothing else of OnPTQ."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src" / "onptq" / "bench"))

from timing import Job, draw_prompts, tell  # type: ignore[import-not-found]
from vllm_engine import ENVIRONMENT, describe_kernels, options  # type: ignore[import-not-found]


def main(job: Job) -> None:
    """Log-probabilities of all tokens but the first, the likeliest ones in their place, and what multiplied."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch
    import vllm  # type: ignore[import-not-found]

    llm = vllm.LLM(**options(job, torch.cuda.is_available()))
    texts = draw_prompts(job.batches[0], job.prompt_tokens, job.vocabulary)
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    said, likeliest = [], []
    for text, one in zip(texts, llm.generate([{"prompt_token_ids": ids} for ids in texts], sampling), strict=True):
        known = list(zip(text, one.prompt_logprobs, strict=True))[1:]
        said.append([found[token].logprob for token, found in known])
        likeliest.append([min(found, key=lambda token: found[token].rank) for _, found in known])
    kernels = llm.apply_model(describe_kernels)[0]
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    tell({"logprobs": said, "likeliest": likeliest, "kernels": kernels, "versions": versions})


if __name__ == "__main__":
    main(Job.parse(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # a shutdown that hangs or fails has nothing more to say
