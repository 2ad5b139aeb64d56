"""Whether vLLM computes what OnPTQ simulates: log-probabilities of every token of random texts, by both.

    python benchmarks/vllm_agreement.py --scheme W4A8 --out result.json
    python benchmarks/vllm_agreement.py --tiny --scheme W8A8 --python DIR/bin/python --out result.json      # on a CPU

A model of published shapes with few layers and random weights is exported by plain rounding. Some channels are large,
as in trained models (onptq.zoo.outliers), so that rounding activations changes log-probabilities far more than 16-bit
arithmetic does. Simulations that round less are reported beside vLLM. So is a correlation: of the changes that rounding
the activations makes in the simulation and in vLLM. It is near 0 for a server that does not round them, and below 1 for
one that does, since values near the middle of two codes round either way. humming's scales are the largest magnitude
over 127, ours and compressed-tensors' over 127.5; a simulation with its scales is reported too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_calibration import environment, save, tiny_shape
from torch import Tensor

import onptq
from onptq import kernels
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import choose_device
from onptq.engine.prefixes import whole_prompts
from onptq.errors import OnPTQError
from onptq.models.encoding import PromptBatch, encode
from onptq.models.family import TEXT
from onptq.models.processing import ModelInputs
from onptq.quantizer import numerics
from onptq.quantizer.theta import Theta
from onptq.recipe import Recipe
from onptq.schemes import Scheme
from onptq.zoo.catalog import CHOSEN
from onptq.zoo.configs import RANDOM_TOWERS
from onptq.zoo.outliers import Outliers, derive
from onptq_vllm.bench.published import PUBLISHED, Published, find_published, write_published
from onptq_vllm.bench.timing import Job, draw_prompts, parse_result

SERVER = Path(__file__).with_name("vllm_logprobs.py")
TEXTS, TOKENS = 8, 256
TINY_TEXTS, TINY_TOKENS = 3, 24

VOCABULARY = 8192
LARGE, CHANNELS = 64, 8  # factor, and how many channels of each norm have it

Scored = tuple[
    Tensor, Tensor
]  # of every token but the first: its log-probability, and the likeliest token in its place


@torch.no_grad()
def simulate(folder: Path, scheme: str, texts: Sequence[Sequence[int]]) -> Scored:
    """Log-probabilities of the texts by a simulation of the scheme."""
    policy = load_policy(folder, scheme, dtype="float16" if torch.cuda.is_available() else "auto")
    policy.freeze(Theta.rtn(policy.structure.blocks, policy.scheme, policy.device))
    logprobs, likeliest = [], []
    for text in texts:
        ids = torch.tensor([text])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        batch = PromptBatch.of(encode(policy, [ModelInputs(inputs, torch.full((len(text),), TEXT))]))
        with policy.speaking("Q"):
            hidden = policy.run(whole_prompts(batch))[0, :-1]
        logits = policy.logits(hidden).log_softmax(-1).cpu()
        logprobs.append(logits.gather(-1, ids[0, 1:, None])[:, 0])
        likeliest.append(logits.argmax(-1))
    return torch.stack(logprobs), torch.stack(likeliest)


@contextmanager
def humming_scales() -> Iterator[None]:
    """A context in which activations are simulated with humming's scales, by plain PyTorch."""

    def scales(x: Tensor, bits: int) -> Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).float() / (2 ** (bits - 1) - 1)
        return torch.where(scale == 0, 1.0, scale)

    with patch.object(numerics, "token_scales", scales), patch.dict(os.environ, {kernels.SWITCH: "off"}):
        yield


def compare(by_name: Mapping[str, Scored], expected: Scored) -> dict[str, dict[str, float]]:
    """How each differs from `expected`, over the states where its log-probability is finite."""
    rows = {}
    for name, (logprobs, likeliest) in by_name.items():
        finite = logprobs.isfinite()
        if not finite.any():
            raise OnPTQError(f"{name} gave no number for any of {logprobs.numel()} states; expected log-probabilities")
        differences, same = (logprobs - expected[0]).abs()[finite], (likeliest == expected[1])[finite]
        rows[name] = {
            "not_finite": int((~finite).sum()),
            "mean_difference": float(differences.mean()),
            "largest_difference": float(differences.max()),
            "same_likeliest": float(same.double().mean()),
        }
    return rows


def effect(theirs: Scored, ours: Scored, without: Scored) -> float:
    """The correlation of the changes by rounding activations, theirs with ours, over the states where theirs are
    finite."""
    finite = theirs[0].isfinite()
    changes = torch.stack([(one[0] - without[0])[finite] for one in (theirs, ours)])
    return float(torch.corrcoef(changes.double())[0, 1])


def enlarge(model: Path, layers: int, hidden: int, folder: Path) -> Path:
    """The same function with large channels."""
    channels = dict.fromkeys(range(0, hidden, hidden // CHANNELS), LARGE)
    Outliers(({"input_layernorm": channels, "post_attention_layernorm": channels},) * layers).write(model / CHOSEN)
    folder.mkdir()
    derive(model, folder)
    return folder


def ask_server(job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [arguments.python, str(SERVER), job.text()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout)
    result = parse_result(done.stdout)
    if result is None:
        raise OnPTQError(f"vLLM did not answer; its log ends:\n{(done.stdout + done.stderr)[-2000:]}")
    return result


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape, scheme, device = find_published(arguments.model), Scheme.parse(arguments.scheme), choose_device("auto")
    count, length = (TINY_TEXTS, TINY_TOKENS) if arguments.tiny else (TEXTS, TOKENS)
    if arguments.tiny:
        shape = tiny_shape(shape)
    else:  # only the shapes of the linears matter
        shape = Published(shape.family, replace(shape.dims, vocab=VOCABULARY), RANDOM_TOWERS, shape.pixels)
    on_gpu, vocabulary = device.type == "cuda", shape.dims.vocab
    drawn = write_published(shape, folder / "drawn", layers=arguments.layers, device=device.type)
    model = enlarge(drawn, arguments.layers, shape.dims.hidden, folder / "model")
    recipe = Recipe.preset("default", {"method": "rtn", "scheme": str(scheme)})
    exported = onptq.quantize(model, folder / "exported", recipe=recipe, verify=False).path
    texts = draw_prompts(count, length, vocabulary)
    ours = simulate(model, str(scheme), texts)
    weights_alone = str(replace(scheme, activation_bits=16))
    less = {name: simulate(model, name, texts) for name in sorted({weights_alone, "W16A16"} - {str(scheme)})}
    scored = {f"{name}, simulated": one for name, one in less.items()}
    if on_gpu:
        torch.cuda.empty_cache()
    backend = arguments.linear_backend or ("humming" if on_gpu and str(scheme) == "W4A8" else None)
    dtype = "float16" if on_gpu else "float32"
    job = Job(str(exported), "eager", dtype, (count,), length, 1, 1, vocabulary, backend, (), 1.0)
    server = ask_server(job, arguments)
    scored["vLLM"] = torch.tensor(server["logprobs"]), torch.tensor(server["likeliest"])
    about = {"model": arguments.model, "tiny": arguments.tiny, "layers": arguments.layers, "scheme": str(scheme)}
    about |= {"linear_backend": backend, "kernels": server["kernels"], "server_versions": server["versions"]}
    about |= {"states": count * (length - 1), "from_ours": compare(scored, ours)}
    if scheme.quantizes_activations:
        about["activations"] = effect(scored["vLLM"], ours, less[weights_alone])
    if backend == "humming" and scheme.quantizes_activations:
        with humming_scales():
            theirs = simulate(model, str(scheme), texts)
        about["with_humming_scales"] = {
            "from_theirs": compare({"vLLM": scored["vLLM"], "ours": ours}, theirs),
            "activations": effect(scored["vLLM"], theirs, less[weights_alone]),
            "activations_of_ours": effect(ours, theirs, less[weights_alone]),
        }
    return environment(device) | about


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-vl-7b", choices=PUBLISHED)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--scheme", default="W4A8")
    parser.add_argument("--linear-backend", help="vLLM's, on a GPU; default: humming for W4A8")
    parser.add_argument("--python", default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for vLLM")
    parser.add_argument("--tiny", action="store_true", help="a model of the family that a CPU runs in seconds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every number to FILE")
    arguments = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="onptq-agreement-") as scratch:
            report = measure(arguments, Path(scratch))
    except OnPTQError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    save(arguments.out, report)
    print(
        f"{report['scheme']} by vLLM: {report['kernels']}\nlog-probabilities of {report['states']} tokens, from ours:"
    )
    for name, row in report["from_ours"].items():
        print(
            f"  {name}: mean {row['mean_difference']:.4f}, largest {row['largest_difference']:.4f}, "
            f"same likeliest token {100 * row['same_likeliest']:.1f}%"
            + (f"; {row['not_finite']} more are not numbers" if row["not_finite"] else "")
        )
    if "activations" in report:
        print(f"changes by rounding activations: correlation {report['activations']:.3f} with the simulation")
    if "with_humming_scales" in report:
        row = report["with_humming_scales"]
        print(
            f"  with a simulation in humming's scales: {row['activations']:.3f}; ours: {row['activations_of_ours']:.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
