"""README.md of an exported checkpoint: what it is, how to load it, what is only simulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from onptq.schemes import Scheme

_BODY = """# {base_model} in {scheme}

{what}

Embeddings, lm_head, norms, the KV cache and any vision or audio tower keep the precision of the source.

## Load

```python
import transformers

model = transformers.{loader}.from_pretrained(
    "path/to/this/folder",
    dtype="auto",
    quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
)
```

transformers needs the `compressed-tensors` package. It dequantizes the weights when it loads them and {activations}:
an exact simulation of the scheme, no faster than the source.
{simulated}"""


_SIMULATED = """
## Simulation only

No serving kernel is known to run {scheme}: load it in transformers to measure its accuracy.
"""


def write_card(base_model: str, scheme: Scheme, config: Mapping[str, Any], method: str | None) -> str:
    front: dict[str, Any] = {
        "base_model": base_model,
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "tags": ["onptq", "compressed-tensors", "quantized", str(scheme)],
        "scheme": str(scheme),
    }
    if method is not None:
        front["method"] = method
    body = _BODY.format(
        base_model=base_model,
        scheme=scheme,
        what=_describe(scheme, method),
        loader=_loader(config),
        activations="quantizes activations on the way" if scheme.quantizes_activations else "leaves activations alone",
        simulated=_SIMULATED.format(scheme=scheme) if scheme.simulated else "",
    )
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n{body}"


def _loader(config: Mapping[str, Any]) -> str:
    if "thinker_config" in config:  # full Omni checkpoints name an architecture that transformers does not have
        return "Qwen2_5OmniForConditionalGeneration"
    return str(next(iter(config.get("architectures") or ()), "AutoModelForCausalLM"))


def _describe(scheme: Scheme, method: str | None) -> str:
    weights = "unchanged"
    if scheme.quantizes_weights:
        span = f"{scheme.group_size} input columns of an output row" if scheme.group_size else "output row"
        kind = "symmetric" if scheme.symmetric else "asymmetric"
        weights = f"{scheme.weight_bits}-bit integers, {kind}, one step per {span}"
    activations = "unchanged"
    if scheme.quantizes_activations:
        activations = f"{scheme.activation_bits}-bit integers, symmetric, one dynamic step per token"
    by = f" with OnPTQ's method `{method}`" if method else ""
    return f"The linears of the language model were quantized{by}. Weights: {weights}. Activations: {activations}."
