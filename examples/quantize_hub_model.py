"""Quantize a model from the hub, or any folder, and print what that changed on held-out prompts.

    python examples/quantize_hub_model.py prompts.jsonl
    python examples/quantize_hub_model.py prompts.jsonl --model zoo:qwen2.5-vl --preset light --out small

Killed at any moment, the same command continues the run.
"""

from __future__ import annotations

import argparse

import onptq

MODELS = {"rtn": "plain rounding", "initial": "the init", "calibrated": "calibrated"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="manifest, JSONL or parquet: one prompt per line or row")
    parser.add_argument("--model", default="Qwen/Qwen2.5-VL-7B-Instruct", help="hub id, folder or embedded model")
    parser.add_argument("--scheme", default="W4A8", help="number format of the checkpoint")
    parser.add_argument("--preset", default="default", help="light, default, best, paper or zoo")
    parser.add_argument("--out", default="quantized", help="folder of the checkpoint")
    options = parser.parse_args()

    recipe = onptq.Recipe.preset(options.preset, {"scheme": options.scheme})
    result = onptq.quantize(options.model, options.out, calibration=options.prompts, recipe=recipe)

    for name, title in MODELS.items():
        figures = result.summary["holdout"][name]
        if figures is not None:  # nothing is held out of very few prompts
            changed, kl = figures["mismatch_percent"], figures["kl"]
            print(f"{title}: {changed:.1f}% of the decisions changed, KL to the dense model {kl:.4f}")
    if result.summary["helped"] is False:
        print("The checkpoint has the weights of the init: calibration did not help.")
    print(f"checkpoint: {result.path}")


if __name__ == "__main__":
    main()
