"""Quantize with AutoRound; run.py starts it in AutoRound's own environment.

    python quantize_autoround.py --recipe default --bits 4 --model DIR --material DIR --out DIR

`default` and `best` are the package's recipes of those names: 200 and 1,000 iterations in batches of 8. Samples have pictures and
so differ in length; the batch is therefore 8 accumulated single samples, which is what the package advises for that case.
Written in its `llm_compressor` format (compressed-tensors), which transformers loads without the package.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from calibration import read_model, read_samples, write_record, writing

ITERATIONS = {"default": 200, "best": 1000}
BATCH = 8
FORMAT = "llm_compressor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=tuple(ITERATIONS), required=True)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--activation-bits", type=int, default=16)
    parser.add_argument("--group-size", type=int)
    for name in ("model", "material", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()

    from auto_round import AutoRound
    from auto_round.schemes import QuantizationScheme
    from transformers import AutoTokenizer

    samples, tokenizer = read_samples(args.material, args.model), AutoTokenizer.from_pretrained(args.model)
    scheme = QuantizationScheme(
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
    began = time.monotonic()
    rounding = AutoRound(
        read_model(args.model),
        scheme=scheme,
        tokenizer=tokenizer,
        processor=tokenizer,  # asked for and saved, but the samples have been processed already
        format=FORMAT,
        dataset=samples,
        nsamples=len(samples),
        iters=ITERATIONS[args.recipe],
        batch_size=1,
        gradient_accumulate_steps=BATCH,
        device_map="cpu",
        enable_torch_compile=False,  # it changes how long it takes, not what is computed; samples differ in shape
    )
    packages = ("auto-round", "compressed-tensors", "transformers", "torch")
    settings = {"recipe": args.recipe, "iterations": ITERATIONS[args.recipe], "samples": len(samples)}
    record = args.out.with_name(args.out.name + ".json")
    with writing(args.out, args.model) as stage:
        rounding.quantize_and_save(str(stage), format=FORMAT)
        for path in [path for folder in stage.iterdir() if folder.is_dir() for path in folder.iterdir()]:
            path.rename(stage / path.name)  # out of a folder that is named after model and scheme
        write_record(record, began, packages, settings)


if __name__ == "__main__":
    main()
