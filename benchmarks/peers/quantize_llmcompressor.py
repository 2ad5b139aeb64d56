"""Quantize with llm-compressor; run.py starts it in llm-compressor's own environment.

    python quantize_llmcompressor.py --method gptq --bits 4 --activation-bits 8 --model DIR --material DIR --out DIR
    python quantize_llmcompressor.py --method gptq --named NVFP4 --model DIR --material DIR --out DIR

The modifiers' own defaults: GPTQ (1% damping, blocks of 128, static activation order), AWQ (20 ratios, duo scaling, its
Qwen2.5-VL mappings) and then plain rounding, SmoothQuant with the strength 0.8 of the package's examples and then GPTQ,
AutoRound as a modifier, which writes schemes that AutoRound itself does not.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from calibration import read_model, read_samples, write_record, writing

IGNORE = ["re:.*lm_head", "re:.*visual.*"]
DECODER = r"re:.*language_model\.layers\.\d+\."
# The package's own mappings for Qwen2.5-VL do not resolve (0.14.0.1), since the vision tower's MLPs have the same names.
# These are the same pairs of the decoder alone.
SMOOTHED = [
    [[DECODER + rf"self_attn\.{name}_proj$" for name in "qkv"], DECODER + "input_layernorm$"],
    [[DECODER + rf"mlp\.{name}_proj$" for name in ("gate", "up")], DECODER + "post_attention_layernorm$"],
]
STRENGTH = 0.8
METHODS = ("rtn", "gptq", "awq", "smoothquant", "autoround", "autoround-best")
BEST_ITERATIONS = 1000  # of AutoRound's own recipe of that name; the modifier's default is that of AutoRound, 200


def scheme(args: argparse.Namespace) -> dict[str, Any]:
    """Symmetric integer weights per output channel or group and integer activations, symmetric, dynamic, per token; or
    the format of that name."""
    if args.named:
        from compressed_tensors.quantization import preset_name_to_scheme

        named: dict[str, Any] = preset_name_to_scheme(args.named, ["Linear"]).model_dump(mode="json", exclude_none=True)
        return named
    bits, activation_bits, group_size = args.bits, args.activation_bits, args.group_size
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if activation_bits < 16:
        activations = {"num_bits": activation_bits, "type": "int", "symmetric": True}
        group["input_activations"] = activations | {"strategy": "token", "dynamic": True}
    return group


def recipe(method: str, group: dict[str, Any]) -> list[Any]:
    from llmcompressor.modifiers.autoround import AutoRoundModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    options = {"config_groups": {"group_0": group}, "ignore": IGNORE}
    if method == "rtn":
        return [QuantizationModifier(**options)]
    if method == "gptq":
        return [GPTQModifier(**options)]
    if method == "awq":
        return [AWQModifier(), QuantizationModifier(**options)]
    if method.startswith("autoround"):
        longer = {"iters": BEST_ITERATIONS} if method.endswith("best") else {}
        return [AutoRoundModifier(enable_torch_compile=False, **longer, **options)]
    return [SmoothQuantModifier(smoothing_strength=STRENGTH, mappings=SMOOTHED), GPTQModifier(**options)]


def disable_pinning() -> None:
    """Turn off AWQ's pinning of cached memory, which without an accelerator is an error (0.14.0.1)."""
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda self, batch_index, input_names=None: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, required=True)
    numbers = parser.add_mutually_exclusive_group(required=True)
    numbers.add_argument("--bits", type=int)
    numbers.add_argument("--named", help="NVFP4 or NVFP4A16")
    parser.add_argument("--activation-bits", type=int, default=16)
    parser.add_argument("--group-size", type=int)
    for name in ("model", "material", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()

    from llmcompressor import oneshot
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer, set_seed

    set_seed(0)
    disable_pinning()
    samples, model = read_samples(args.material, args.model), read_model(args.model)
    group = scheme(args)
    # Plain rounding needs data where the input of a linear has a scale for the whole tensor.
    datafree = args.method == "rtn" and args.named != "NVFP4"
    began = time.monotonic()
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(args.model),
        recipe=recipe(args.method, group),
        dataset=None if datafree else DataLoader(samples, batch_size=None),
        num_calibration_samples=len(samples),
        sequential_targets=[type(model.model.language_model.layers[0]).__name__],
        pipeline="datafree" if datafree else "sequential",
    )
    packages = ("llmcompressor", "compressed-tensors", "transformers", "torch")
    record = args.out.with_name(args.out.name + ".json")
    with writing(args.out, args.model) as stage:
        model.save_pretrained(stage, save_compressed=True)
        write_record(record, began, packages, {"method": args.method, "scheme": group, "samples": len(samples)})


if __name__ == "__main__":
    main()
