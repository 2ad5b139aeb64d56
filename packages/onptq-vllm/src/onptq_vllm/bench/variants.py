"""The checkpoints of a benchmark: given ones, or a dense model and its exports by plain rounding."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from onptq.checkpoint.quantization import parse_quantization
from onptq.checkpoint.source import Source, open_checkpoint
from onptq.errors import OnPTQError
from onptq.models.family import text_config
from onptq.progress import Reporter
from onptq.schemes import Scheme
from onptq_vllm.bench.published import PUBLISHED, find_published, write_published

DENSE = "dense"
STORED = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Variant:
    name: str  # dense, its scheme, or the name of another quantization method
    source: Source
    scheme: Scheme | None  # None if it is dense, or quantized in another way than OnPTQ's
    named_backend: str | None = None  # that of FOLDER@BACKEND

    @property
    def linear_backend(self) -> str | None:
        """The backend that vLLM needs on a GPU: its own choice for 4-bit weights does not quantize activations."""
        scheme = self.scheme
        narrow = scheme is not None and scheme.quantizes_activations and scheme.weight_bits < 8 and scheme.of_integers
        return "humming" if narrow else None

    @property
    def vocabulary(self) -> int:
        return int(text_config(self.source.config)["vocab_size"])

    @property
    def dtype(self) -> str:
        """The dtype in config.json."""
        config = self.source.config
        stated = next(
            (one[key] for one in (config, text_config(config)) for key in ("dtype", "torch_dtype") if key in one), ""
        )
        return str(stated) if stated in STORED else "bfloat16"


def choose_variants(
    models: Sequence[str], schemes: Sequence[str], work: Path, reporter: Reporter, *, layers: int | None = None
) -> list[Variant]:
    """The checkpoints to measure, the dense one first.

    FOLDER@BACKEND names the backend of its linears. If one dense model is given alone, `schemes` of it are exported
    into `work`. A name of `onptq_vllm.bench.published` is such a model with random weights.
    """
    if not models:
        raise OnPTQError("no model was given; expected a checkpoint folder, or one of " + ", ".join(PUBLISHED))
    parsed = [Scheme.parse(scheme) for scheme in schemes]
    variants = [_open(model, work, reporter, layers) for model in models]
    dense = [variant for variant in variants if variant.name == DENSE]
    if len(dense) > 1:
        folders = ", ".join(str(variant.source.folder) for variant in dense)
        raise OnPTQError(f"several dense models were given ({folders}); expected one, and quantized ones beside it")
    if len(variants) == 1 and dense:
        variants += [_export(dense[0].source, scheme, work, reporter) for scheme in parsed]
    names = [variant.name for variant in variants]
    numbered = [
        f"{name} ({variant.source.folder.name})" if names.count(name) > 1 else name
        for name, variant in zip(names, variants, strict=True)
    ]
    ordered = [replace(one, name=name) for name, one in zip(numbered, variants, strict=True)]
    return sorted(ordered, key=lambda variant: variant.name != DENSE)


def _open(model: str, work: Path, reporter: Reporter, layers: int | None) -> Variant:
    folder_name, at, backend = model.rpartition("@")
    if at and not Path(model).is_dir():
        variant = _open(folder_name, work, reporter, layers)
        if variant.name == DENSE:
            raise OnPTQError(f"{model!r}: {folder_name} is dense; a backend is for quantized linears")
        return replace(variant, name=f"{variant.name} {backend}", named_backend=backend)
    if model in PUBLISHED and not Path(model).is_dir():
        folder = work / (model if layers is None else f"{model}-{layers}")
        if not folder.is_dir():
            _write_random(model, folder, reporter, layers)
        model = str(folder)
    elif not model.startswith(("zoo:", "real:")) and not Path(model).is_dir():
        raise OnPTQError(
            f"{model!r} is not a folder: expected a checkpoint folder, or one of {', '.join(PUBLISHED)} for random weights"
        )
    source = open_checkpoint(model)
    quantization = parse_quantization(source.config.get("quantization_config"))
    if quantization is None:
        return Variant(DENSE, source, None)
    return Variant(str(quantization.scheme or quantization.method), source, quantization.scheme)


def _write_random(model: str, folder: Path, reporter: Reporter, layers: int | None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with reporter.phase(f"Write {model} with random weights", unit="tensors") as bar:
        write_published(find_published(model), folder, layers=layers, device=device, advance=bar.advance)


def _export(source: Source, scheme: Scheme, work: Path, reporter: Reporter) -> Variant:
    import onptq
    from onptq.recipe import Recipe

    name = source.name.partition(":")[2] or source.folder.resolve().name
    out = work / f"{name}-{scheme}-rtn"
    recipe = Recipe.preset("default", {"method": "rtn", "scheme": str(scheme)})
    onptq.quantize(source.name, out, recipe=recipe, reporter=reporter, verify=False)
    gc.collect()
    torch.cuda.empty_cache()  # the engines run in other processes on the same GPU
    return Variant(str(scheme), open_checkpoint(str(out)), scheme)
