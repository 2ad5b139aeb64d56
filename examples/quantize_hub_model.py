"""Quantize a model from the hub, or any folder, and say what calibration changed on held-out prompts.

python examples/quantize_hub_model.py prompts.jsonl
python examples/quantize_hub_model.py prompts.jsonl --model zoo:qwen2.5-vl --preset light --out small
"""

from __future__ import annotations

import argparse

import onptq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="manifest, JSONL or parquet: one prompt per line or row")
    parser.add_argument("--model", default="Qwen/Qwen2.5-VL-7B-Instruct", help="hub id, folder or embedded model")
    parser.add_argument("--scheme", default="W4A8")
    parser.add_argument("--preset", default="default", help="light, default, best or paper")
    parser.add_argument("--out", default="quantized", help="folder of the checkpoint")
    options = parser.parse_args()

    recipe = onptq.Recipe.preset(options.preset, {"scheme": options.scheme})
    result = onptq.quantize(options.model, options.out, calibration=options.prompts, recipe=recipe)
    for when, figures in result.summary["holdout"].items():
        print(f"{when}: {figures['mismatch_percent']:.1f}% of the decisions changed, KL {figures['kl']:.4f}")
    print(f"checkpoint: {result.path}")


if __name__ == "__main__":
    main()
