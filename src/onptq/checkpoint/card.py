"""README.md of an exported checkpoint: how to use it, what was quantized, how it was made, what was measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onptq.checkpoint.provenance import (
    BaseModel,
    Calibration,
    Estimate,
    Provenance,
    Results,
    Update,
    find_base,
    read_front_matter,
)
from onptq.checkpoint.served_by_vllm import VLLM
from onptq.checkpoint.serving import recommended, serve_command, serving
from onptq.errors import OnPTQError
from onptq.models import family_of
from onptq.models.family import Family
from onptq.plain_yaml import to_yaml
from onptq.schemes import UNQUANTIZED, Floats, Grid, Scheme
from onptq.version import __version__

PICTURE = "results.svg"  # beside the card
FOLDER = "path/to/this/folder"
TAKEN_OVER = ("license", "license_name", "license_link", "language", "pipeline_tag")  # from the source's own card
SCALES = {"dtype": "", "E4M3": " in E4M3, under one for the tensor,", "E8M0": ", a power of two,"}
TEXT_LIMIT = 200  # characters of a field that is taken over

_IMAGE_EXAMPLE = """\
import transformers

folder = "{folder}"
processor = transformers.AutoProcessor.from_pretrained(folder)  # needs torchvision
model = transformers.{model_class}.from_pretrained(
    folder, dtype="{dtype}", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
)
question = [{{"type": "image", "path": "image.png"}}, {{"type": "text", "text": "What is in this image?"}}]
inputs = processor.apply_chat_template(
    [{{"role": "user", "content": question}}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
).to(model.device, model.dtype)
output = model.generate(**inputs, max_new_tokens=128)
print(processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])"""

_TEXT_EXAMPLE = """\
import transformers

folder = "{folder}"
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.{model_class}.from_pretrained(
    folder, dtype="{dtype}", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
)
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Which color is the sky?"}}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
).to(model.device)
output = model.generate(**inputs, max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


_EXPERTS_EXAMPLE = """\
import torch
import transformers
from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import open_checkpoint

folder = "{folder}"
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = load_model(open_checkpoint(folder), torch.{dtype})  # a {model_class}
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Which color is the sky?"}}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
).to(model.device)
output = model.generate(**inputs, max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


def write_card(
    source: Path,
    config: Mapping[str, Any],
    scheme: Scheme,
    provenance: Provenance | None = None,
    results: Results | None = None,
    name: str | None = None,
    *,
    pictured: bool = False,
) -> str:
    """The card's text. `config` is the source's; `name` is what its user calls it; it shows its picture if `pictured`."""
    base, family = find_base(source, name), _family(config)
    front = to_yaml(_front_matter(base, source, config, family, scheme), allow_unicode=True)
    sections = [
        f"# {escaped(base.name.rpartition('/')[2])} in {scheme}\n\n{_describe(base, scheme)}",
        f"## Use it\n\n{_transformers(family, scheme)}\n\n{_vllm(scheme, config, family)}",
        f"## How it was made\n\n{_making(provenance)}",
        f"## Results\n\n{_results(results, pictured)}",
    ]
    return f"---\n{front}---\n\n" + "\n\n".join(sections) + "\n"


def escaped(text: str) -> str:
    """A text as Markdown that shows just this text, on one line."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return re.sub(r"([\\`*_{}()\[\]<>&|#!~$:@])", r"\\\1", " ".join(line.split()))


def _family(config: Mapping[str, Any]) -> Family | None:
    try:
        return family_of(config)
    except OnPTQError:
        return None


def _front_matter(
    base: BaseModel, source: Path, config: Mapping[str, Any], family: Family | None, scheme: Scheme
) -> dict[str, Any]:
    taken = {key: value for key, value in read_front_matter(source).items() if key in TAKEN_OVER and _is_plain(value)}
    if _is_plain(config.get("license")):
        taken.setdefault("license", config["license"])
    named: dict[str, Any] = {}
    if base.hub_id is not None:
        named = {"base_model": base.hub_id, "base_model_relation": "quantized"}
    elif base.stated is not None:
        named = {"base_model": base.stated}
    return {
        **named,
        "library_name": "transformers",
        "pipeline_tag": _pipeline(family),
        **taken,
        "tags": ["onptq", "compressed-tensors", "quantized", str(scheme)],
        "quantized_by": "onptq",
    }


def _is_plain(value: Any) -> bool:
    """Whether a field is a short text, or a list of them."""
    texts = value if isinstance(value, list) else [value]
    short = all(isinstance(text, str) and text.isprintable() and len(text) <= TEXT_LIMIT for text in texts)
    return short and 0 < len(texts) <= TEXT_LIMIT and bool(texts[0])


def _pipeline(family: Family | None) -> str:
    modalities = family.modalities if family else ()
    return (
        "any-to-any" if "audio" in modalities else "image-text-to-text" if "image" in modalities else "text-generation"
    )


def _describe(base: BaseModel, scheme: Scheme) -> str:
    weights = "not quantized"
    if scheme.quantizes_weights:
        span = f"{scheme.group_size} input columns of an output row" if scheme.group_size else "output row"
        if scheme.block_rows > 1:
            span = f"block of {scheme.block_rows} output rows and {scheme.group_size} input columns"
        kind = "symmetric" if scheme.symmetric else "asymmetric"
        weights = f"{_numbers(scheme.weight_grid)}, {kind}, one scale{SCALES[scheme.scales]} per {span}"
    activations = "not quantized"
    if scheme.quantizes_activations:
        span = f"{scheme.activation_group} channels of a token" if scheme.activation_group else "token"
        activations = (
            f"{_numbers(scheme.activation_grid)}, symmetric, one dynamic scale{SCALES[scheme.scales]} per {span}"
        )
    cache = "The KV cache is not quantized."
    if scheme.cache_floats is not None:
        numbers = _numbers(scheme.cache_floats)
        cache = f"The KV cache: {numbers}, symmetric, one static scale for a layer's keys and one for its values."
    others = "".join(
        f"- `{pattern}`: {'not quantized' if one == UNQUANTIZED else f'in {one}'} instead.\n"
        for pattern, one in scheme.others
    )
    named = f"[{base.hub_id}](https://huggingface.co/{base.hub_id})" if base.hub_id else escaped(base.name)
    if base.stated:
        named += f" (whose card names [{base.stated}](https://huggingface.co/{base.stated}) as its base model)"
    return (
        f"{named} with the linears of its language model quantized by OnPTQ, in the compressed-tensors format.\n\n"
        f"- Weights: {weights}.\n- Activations: {activations}.\n{others}"
        "- The norms inside the decoder layers take up smoothing factors. They are stored in the dtype of the scales.\n"
        f"- Embeddings, lm_head and any vision or audio tower are copied from the source. {cache}"
    )


def _numbers(grid: Grid) -> str:
    return f"{grid.bits}-bit floats ({grid.name})" if isinstance(grid, Floats) else f"{grid}-bit integers"


def _transformers(family: Family | None, scheme: Scheme) -> str:
    example = _IMAGE_EXAMPLE if family is not None and "image" in family.modalities else _TEXT_EXAMPLE
    model_class = family.model_class if family is not None else "AutoModelForCausalLM"
    dtype = "auto" if scheme.scales == "dtype" else "bfloat16"  # what transformers unpacks floats of few bits to
    activations = "quantizes activations on the way" if scheme.quantizes_activations else "leaves activations alone"
    if family is not None and family.has_experts:
        example = _EXPERTS_EXAMPLE.format(folder=FOLDER, model_class=model_class, dtype="bfloat16")
        return (
            f"```python\n{example}\n```\n\n"
            "transformers alone wants the experts of a layer in one tensor; here each is stored by itself, as servers read "
            "them. OnPTQ's loader builds the same class with linears for every expert, dequantizes the weights when it loads "
            f"them and {activations}: an exact simulation of the scheme, no faster and no smaller in memory than the source."
        )
    torchvision = " and `torchvision`" if example is _IMAGE_EXAMPLE else ""
    return (
        f"```python\n{example.format(folder=FOLDER, model_class=model_class, dtype=dtype)}\n```\n\n"
        f"transformers needs the packages `compressed-tensors`{torchvision}. It dequantizes the weights when it loads them "
        f"and {activations}: an exact simulation of the scheme, no faster and no smaller in memory than the source."
    )


def _vllm(scheme: Scheme, config: Mapping[str, Any], family: Family | None) -> str:
    """The one command that serves the scheme on a recent GPU."""
    experts = family is not None and family.has_experts
    best = recommended(scheme, experts)
    if best is None:
        return f"Simulation only: no server is known to run {scheme}."
    if str(config.get("model_type")).endswith("_thinker"):
        return "vLLM takes full Omni checkpoints only; this one holds an Omni model's thinker alone."
    if best.verdict == "refuses":
        return f"{VLLM} does not run {scheme} with experts on a GPU: {best.note}."
    default = next(row for row in serving(scheme, experts) if row.server == VLLM and row.hardware == best.hardware)
    command = serve_command(FOLDER, best)
    facts = [f"With {VLLM} or later on a GPU such as {best.hardware}, this multiplies {best.computes}."]
    if best.verdict != "serves":
        facts = [f"Whether {VLLM} runs {scheme} was not seen: {best.note}."]
    elif best.evidence == "read":
        facts.append("So its source says; it was not run.")
    if best.verdict == "serves" and best.switch and default.verdict == "differs":
        facts.append(f"Without `{best.switch}` the server answers too, but multiplies {default.computes}.")
    facts.append("`onptq plan` lists other hardware; the page *Serving* of OnPTQ's documentation has tuned settings.")
    return f"```bash\n{command}\n```\n\n" + " ".join(facts)


def _making(provenance: Provenance | None) -> str:
    if provenance is None:
        return f"OnPTQ {__version__}."
    method = f"OnPTQ {__version__}, method {escaped(provenance.method)}."
    if not provenance.updates:
        if provenance.init == "rtn":
            return f"{method} Rounding to nearest (RTN) with full-range scales. No calibration data."
        facts = f"The base method {escaped(provenance.init)} made the weights. No on-policy calibration followed."
    else:
        facts = f"Init by the base method {escaped(provenance.init)}, then {_updates(provenance)}"
    return f"{method} {facts}\n\n{_calibration(provenance.calibration)}"


def _updates(provenance: Provenance) -> str:
    fitted = "smoothing, scales and codes" if provenance.learns_codes else "smoothing and scales"
    if provenance.rule is None:
        how = f"static calibration: {fitted} are fitted on the prompts alone, not on the model's own answers."
    else:
        states = "all states alike" if provenance.rule == "all" else f"states selected by {escaped(provenance.rule)}"
        kind, model = ("off-policy", "source") if provenance.off_policy else ("on-policy", "quantized model")
        how = (
            f"{kind} calibration: the {model} answers the calibration prompts itself, and "
            f"{fitted} are fitted to the source's decisions along these answers ({states})."
        )
    steps = sum(update.steps for update in provenance.updates)
    if provenance.init_exported:
        unmoved = all(update.best_step == 0 for update in provenance.updates)
        against = escaped(provenance.why_init) or "calibration did not help"
        why = f"none of {steps} steps was better" if unmoved else f"on held-out prompts {against}"
        return f"{how}\n\n**The init was kept: {why}.** The weights are those of {escaped(provenance.init)}."
    rounds = "; ".join(f"round {number}: {_update(one)}" for number, one in enumerate(provenance.updates, 1))
    return f"{how}\n\nIterate kept, {rounds}."


def _update(update: Update) -> str:
    return (
        f"step {update.best_step} of {update.steps}" if update.best_step else f"its init, none of {update.steps} steps"
    )


def _calibration(calibration: Calibration | None) -> str:
    if calibration is None:
        return "No calibration data."
    mix = ", ".join(f"{count} with {kind}" for kind, count in calibration.mix.items())
    held_out = f" {calibration.holdout} more were held out." if calibration.holdout else " None were held out."
    return (
        f"Calibration set: {calibration.prompts} prompts ({mix}).{held_out} SHA-256 over all prompts and their media: "
        f"`{calibration.sha256}`."
    )


def _results(results: Results | None, pictured: bool) -> str:
    unmeasured = "Not measured: accuracy on any task, speed, memory in use, safety."
    limit = "Single answers can change even where averages do not: compare on your own data."
    if results is None:
        return f"Nothing was measured in the run that made it. {limit}"
    columns = list(dict.fromkeys(name for figures in results.rows.values() for name in figures))
    lines = [f"| | {' | '.join(map(escaped, columns))} |", f"|---|{'---:|' * len(columns)}"]
    for model, figures in results.rows.items():
        lines.append(f"| {escaped(model)} | {' | '.join(_figure(figures.get(name)) for name in columns)} |")
    explained = (
        "mismatch, KL (nats): next-token decisions and distributions against the source, on each model's own answers to "
        f"{results.held_out} ({results.states:,} states). In brackets: {results.confidence:.0%} bootstrap intervals over "
        "prompts."
    )
    shown = f"\n\n![KL to the source, with intervals]({PICTURE})" if pictured else ""
    return "\n".join(lines) + f"{shown}\n\n{explained}\n\n{unmeasured} {limit}"


def _figure(estimate: Estimate | None) -> str:
    if estimate is None or estimate.value is None:
        return "-"
    digits = 1 if estimate.value >= 1 or estimate.value == 0 else 4
    if estimate.low is None:
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
