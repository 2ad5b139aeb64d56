"""README.md of an exported checkpoint: what it is, how it was made, what was measured, who runs it how, and its limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from onptq import __version__
from onptq.checkpoint.card_tables import Results, measured, not_measured
from onptq.checkpoint.serving_text import serving_section
from onptq.data.calibration import Prompts
from onptq.data.manifest import manifest_digest
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.models import family_of
from onptq.schemes import Scheme

FOLDER = "path/to/this/folder"
TAKEN_OVER = ("license", "license_name", "license_link", "language", "pipeline_tag")  # from the source's own card
METHODS = {
    "onptq": "On-policy calibration: the quantized model answers the calibration prompts itself, the states where it decides "
    "otherwise than the source are found and weighted, and smoothing and step sizes are fitted to them.",
    "static": "Calibration on fixed prompts: smoothing and step sizes are fitted to the source's activations, all states alike.",
    "rtn": "Plain rounding to the nearest value; nothing was calibrated.",
}


@dataclass(frozen=True)
class Calibration:
    """What a checkpoint was calibrated with, in a few words."""

    prompts: int
    holdout: int
    mix: Mapping[str, int]  # calibration prompts by what they hold, e.g. "image and text": 100
    sha256: str  # of calibration and held-out prompts with their media, as in the run's recipe.yaml

    @classmethod
    def of(cls, prompts: Prompts) -> Calibration | None:
        if not prompts.calibration:
            return None
        mix = Counter(map(_contents, prompts.calibration))
        digest = manifest_digest(prompts.every)
        return cls(len(prompts.calibration), len(prompts.holdout), dict(mix.most_common()), digest)


def write_card(
    source: Path,
    config: Mapping[str, Any],
    scheme: Scheme,
    method: str | None,
    calibration: Calibration | None = None,
    results: Results | None = None,
    name: str | None = None,
) -> str:
    """`config` is the source's; `name` what its user calls it, where the folder's own name says less."""
    base = base_model(source, name)
    front = yaml.safe_dump(_front_matter(base, source, config, scheme), sort_keys=False, allow_unicode=True)
    sections = [
        f"# {base.rsplit('/')[-1]} in {scheme}\n\n{_describe(base, scheme)}",
        f"## Load in transformers\n\n{_loading(config, scheme)}",
        f"## Serve\n\n{serving_section(scheme, config, FOLDER)}",
        f"## How it was made\n\n{_making(method, calibration)}",
        f"## Measured\n\n{measured(results)}",
        f"## Limits\n\n{_limits(scheme, results)}",
    ]
    return f"---\n{front}---\n\n" + "\n\n".join(sections) + "\n"


def base_model(source: Path, name: str | None = None) -> str:
    """Hub id, catalog name, or the folder's own name; never a path of this machine."""
    if name is not None and (name.startswith(("zoo:", "real:")) or (name.count("/") == 1 and not Path(name).exists())):
        return name
    folder = source.absolute()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):  # a hub cache
        return folder.parents[1].name.removeprefix("models--").replace("--", "/")
    return folder.name


def _front_matter(base: str, source: Path, config: Mapping[str, Any], scheme: Scheme) -> dict[str, Any]:
    own = _source_front_matter(source)
    taken = {key: own[key] for key in TAKEN_OVER if own.get(key)}
    if isinstance(config.get("license"), str):
        taken.setdefault("license", config["license"])
    return {
        "base_model": base,
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": _pipeline(config),
        **taken,
        "tags": ["onptq", "compressed-tensors", "quantized", str(scheme)],
        "quantized_by": "onptq",
    }


def _source_front_matter(source: Path) -> dict[str, Any]:
    try:
        _, front, _ = (source / "README.md").read_text(encoding="utf-8").split("---\n", 2)
        content = yaml.safe_load(front)
    except (OSError, ValueError, yaml.YAMLError):  # no card, or one without a readable front matter: nothing is stated
        return {}
    return content if isinstance(content, dict) else {}


def _pipeline(config: Mapping[str, Any]) -> str:
    try:
        modalities = family_of(config).modalities
    except OnPTQError:
        return "text-generation"
    return (
        "any-to-any" if "audio" in modalities else "image-text-to-text" if "image" in modalities else "text-generation"
    )


def _describe(base: str, scheme: Scheme) -> str:
    weights = "as they were"
    if scheme.quantizes_weights:
        span = f"{scheme.group_size} input columns of an output row" if scheme.group_size else "output row"
        kind = "symmetric" if scheme.symmetric else "asymmetric"
        weights = f"{scheme.weight_bits}-bit integers, {kind}, one step per {span}"
    activations = "not quantized"
    if scheme.quantizes_activations:
        activations = f"{scheme.activation_bits}-bit integers, symmetric, one dynamic step per token"
    linked = f"[{base}](https://huggingface.co/{base})" if base.count("/") == 1 else f"`{base}`"
    return (
        f"{linked} with the linears of its language model quantized by OnPTQ, in the compressed-tensors format.\n\n"
        f"- Weights: {weights}.\n- Activations: {activations}.\n"
        "- Embeddings, lm_head, norms, the KV cache and any vision or audio tower keep the precision of the source."
    )


def _loading(config: Mapping[str, Any], scheme: Scheme) -> str:
    activations = "quantizes activations on the way" if scheme.quantizes_activations else "leaves activations alone"
    return f"""```python
import transformers

model = transformers.{_loader(config)}.from_pretrained(
    "{FOLDER}",
    dtype="auto",
    quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
)
```

transformers needs the `compressed-tensors` package. It dequantizes the weights when it loads them and {activations}: an exact
simulation of the scheme, no faster and no smaller in memory than the source."""


def _loader(config: Mapping[str, Any]) -> str:
    if "thinker_config" in config:  # full Omni checkpoints name an architecture that transformers does not have
        speaks = config.get("enable_audio_output", True)
        return "Qwen2_5OmniForConditionalGeneration" if speaks else "Qwen2_5OmniThinkerForConditionalGeneration"
    return str(next(iter(config.get("architectures") or ()), "AutoModelForCausalLM"))


def _making(method: str | None, calibration: Calibration | None) -> str:
    how = METHODS.get(method or "", "")
    said = f"OnPTQ {__version__}, method `{method}`. {how}".rstrip() if method else f"OnPTQ {__version__}."
    if calibration is None or method == "rtn":
        return f"{said} No calibration data."
    mix = ", ".join(f"{count} with {kind}" for kind, count in calibration.mix.items())
    held_out = f" {calibration.holdout} more were held out." if calibration.holdout else " None were held out."
    return (
        f"{said}\n\nCalibration data: {calibration.prompts} prompts ({mix}).{held_out} SHA-256 over all prompts and their media: "
        f"`{calibration.sha256}`."
    )


def _limits(scheme: Scheme, results: Results | None) -> str:
    limits = [not_measured(results)]
    if scheme.simulated:
        limits.append(
            f"Simulation only: no serving kernel is known to run {scheme}. Load it in transformers to measure its accuracy."
        )
    limits.append("Quantization can change single answers even where averages stay the same: compare on your own data.")
    return "\n".join(f"- {limit}" for limit in limits)


def _contents(prompt: Prompt) -> str:
    kinds = [name for name, media in (("image", prompt.images), ("audio", prompt.audios)) if media]
    return " and ".join([", ".join(kinds), "text"]) if kinds else "text only"
