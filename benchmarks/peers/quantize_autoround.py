"""Quantize with AutoRound; run.py starts it in AutoRound's own environment.

    python quantize_autoround.py --recipe default --bits 4 --model DIR --material DIR --out DIR
    python quantize_autoround.py --recipe default --named NVFP4 --model DIR --material DIR --out DIR

`default`, `light` and `best` are the package's recipes of those names, in batches of 8. Samples with images differ in
length, so a batch is 8 accumulated single samples, as the package advises. The checkpoint has its `llm_compressor`
format (compressed-tensors), which transformers loads without the package.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibration import read_model, read_samples, write_record, writing
from torch import Tensor

RECIPES: dict[str, dict[str, Any]] = {
    "default": {"iters": 200},
    "light": {"iters": 50, "lr": 5e-3},
    "best": {"iters": 1000},
}
BATCH = 8
FORMAT = "llm_compressor"


def make_scheme(args: argparse.Namespace) -> Any:
    """Integers of so many bits, or the package's own scheme of that name."""
    from auto_round.schemes import QuantizationScheme

    if args.named:
        return args.named
    return QuantizationScheme(
        bits=args.bits,
        group_size=args.group_size or -1,
        sym=True,
        data_type="int",
        act_bits=args.activation_bits,
        act_group_size=-1,
        act_sym=True,
        act_data_type="int",
        act_dynamic=True,
    )


def make_rounding(model: Any, tokenizer: Any, samples: Sequence[dict[str, Tensor]], recipe: str, **options: Any) -> Any:
    """AutoRound on processed samples, one at a time unless `options` change that."""
    from auto_round import AutoRound

    singly = {"batch_size": 1, "gradient_accumulate_steps": BATCH}
    return AutoRound(
        model,
        tokenizer=tokenizer,
        processor=tokenizer,  # required and saved; samples are processed already
        dataset=samples,
        **(RECIPES[recipe] | {"nsamples": len(samples)} | singly | options),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", choices=tuple(RECIPES), required=True)
    numbers = parser.add_mutually_exclusive_group(required=True)
    numbers.add_argument("--bits", type=int)
    numbers.add_argument("--named", help="NVFP4")
    parser.add_argument("--activation-bits", type=int, default=16)
    parser.add_argument("--group-size", type=int)
    for name in ("model", "material", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()

    from transformers import AutoTokenizer

    samples, tokenizer = read_samples(args.material, args.model), AutoTokenizer.from_pretrained(args.model)
    began = time.monotonic()
    rounding = make_rounding(
        read_model(args.model),
        tokenizer,
        samples,
        args.recipe,
        scheme=make_scheme(args),
        format=FORMAT,
        device_map="cpu",
        enable_torch_compile=False,  # samples differ in shape; results are the same
    )
    packages = ("auto-round", "compressed-tensors", "transformers", "torch")
    settings = {"recipe": args.recipe, "iterations": RECIPES[args.recipe]["iters"], "samples": len(samples)}
    record = args.out.with_name(args.out.name + ".json")
    with writing(args.out, args.model) as stage:
        rounding.quantize_and_save(str(stage), format=FORMAT)
        for path in [path for folder in stage.iterdir() if folder.is_dir() for path in folder.iterdir()]:
            path.rename(stage / path.name)  # out of a folder that is named after model and scheme
        write_record(record, began, packages, settings)


if __name__ == "__main__":
    main()
