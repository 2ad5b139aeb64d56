"""Seconds and memory of AutoRound by phase; gpu_peers.py starts it, in AutoRound's own environment if there is one.

    python time_autoround.py --recipe light --bits 4 --model DIR --material DIR --out DIR --device cuda --record FILE

Batches are those of the recipe: 8 samples at once, padded to one length. AutoRound 0.16.1 then uses the rotary
positions of the first 8 samples in every batch. The time is the same, but for a good checkpoint use `--singly`, which
accumulates 8 single samples as quantize_autoround.py does.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from calibration import read_model, read_samples
from quantize_autoround import BATCH, FORMAT, RECIPES, add_arguments, make_rounding, make_scheme
from torch import Tensor
from torch.nn.functional import pad

PACKAGES = ("auto-round", "transformers", "torch", "accelerate", "compressed-tensors")


def make_batches(samples: Sequence[dict[str, Tensor]], token: int) -> list[dict[str, Tensor]]:
    """Groups of BATCH samples, all padded to one length: AutoRound draws its batches from all samples."""
    if len(samples) % BATCH:
        raise ValueError(f"{len(samples)} samples; expected a multiple of {BATCH}, or --singly")
    longest = max(sample["input_ids"].shape[1] for sample in samples)
    length = longest + 1  # a group without padding would have no mask, and masks are concatenated
    return [
        _batch([_padded(sample, length, token) for sample in samples[first : first + BATCH]])
        for first in range(0, len(samples), BATCH)
    ]


def _padded(sample: dict[str, Tensor], length: int, token: int) -> dict[str, Tensor]:
    missing = length - sample["input_ids"].shape[1]
    fill = {"input_ids": token, "attention_mask": 0, "mm_token_type_ids": 0}
    return sample | {name: pad(sample[name], (0, missing), value=value) for name, value in fill.items()}


def _batch(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: torch.cat([sample[name] for sample in samples if name in sample]) for name in names}


class Clock:
    """Seconds of each phase, with the device synchronized."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = time.perf_counter() - began
        print(f"{name}: {self.seconds[name]:.2f} s", flush=True)

    def memory(self) -> dict[str, int | None]:
        """Peaks: on a GPU of tensors and of the allocator, on a CPU of the process."""
        if self.device.type == "cuda":
            tensors, reserved = (
                torch.cuda.max_memory_allocated(self.device),
                torch.cuda.max_memory_reserved(self.device),
            )
            return {"peak_bytes": tensors, "reserved_bytes": reserved}
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "reserved_bytes": None}


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    from transformers import AutoTokenizer

    clock = Clock(device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with clock.phase("Load"):
        model = read_model(args.model).to(device)  # else its vision tower stays on the CPU
    with clock.phase("Encode"):
        samples = read_samples(args.material, args.model)
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        batches = samples if args.singly else make_batches(samples, padding)
    options: dict[str, Any] = {"scheme": make_scheme(args)}
    options |= {"nsamples": len(samples), "device_map": "cpu" if device.type == "cpu" else device.index or 0}
    if not args.singly:
        options |= {"batch_size": BATCH, "gradient_accumulate_steps": 1}
    if device.type == "cpu":
        options["enable_torch_compile"] = False  # compiling takes longer than a small model runs
    with clock.phase("Tune"):
        rounding = make_rounding(model, tokenizer, batches, args.recipe, **options)
        rounding.quantize()
    quantized = [name for name, module in model.named_modules() if getattr(module, "scale", None) is not None]
    if not args.no_save:
        with clock.phase("Export"):
            rounding.save_quantized(str(args.out), format=FORMAT)
    lengths = [sample["input_ids"].shape[1] for sample in samples]
    return {
        "phases": clock.seconds,
        **clock.memory(),
        "settings": RECIPES[args.recipe] | {"batch": 1 if args.singly else BATCH, "samples": len(samples)},
        "tokens": {"mean": sum(lengths) / len(lengths), "padded": None if args.singly else max(lengths) + 1},
        "quantized": len(quantized),
        "versions": {name: version(name) for name in PACKAGES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--singly", action="store_true", help="accumulate single samples instead of padding them")
    parser.add_argument("--no-save", action="store_true", help="end with the weights in memory")
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args()
    try:
        record = measure(args, torch.device(args.device))
    finally:
        shutil.rmtree(args.out, ignore_errors=True)
    args.record.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
