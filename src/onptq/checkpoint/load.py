"""Load a checkpoint, dense or quantized by anybody: as a model, as D and Q in one, or as one that answers as it is."""

from __future__ import annotations

import io
import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onptq.checkpoint.folder import CONFIG, Checkpoint
from onptq.checkpoint.names import too_deep
from onptq.checkpoint.quantization import COMPRESSED
from onptq.checkpoint.source import Source, choose_device, choose_dtype, find_source
from onptq.errors import OnPTQError
from onptq.models.experts import linearize, linearized
from onptq.models.family import Family
from onptq.models.language_model import LanguageModel
from onptq.models.sharding import Layout
from onptq.quantizer.policy import Policy
from onptq.ranks import ALONE, Ranks
from onptq.schemes import Scheme

TENSOR_SCALE = "_global_scale"  # end of the name of what stays in float32
QUANTIZED = (".weight_scale", ".weight_packed")  # tensors that only a quantized linear has
_DECODER_LINEAR = re.compile(r"(?:.*\.)?(layers\.\d+\.(?:self_attn|linear_attn|mlp)\.[\w.]+)")


def load_model(
    source: Source, dtype: torch.dtype, device: torch.device | str = "cpu", *, repair: bool = False
) -> nn.Module:
    """The family's model as any user of transformers loads it, in eval mode; a dense one with finite weights.

    Experts have linears of their own, which transformers would unpack without their activations.

    `repair` reads a compressed-tensors checkpoint by an ignore list that names every linear which is dense on disk.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    checkpoint = source.whole
    if (beyond := too_deep(source.config, len(checkpoint.modules))) is not None:
        raise OnPTQError(f"{source.folder / CONFIG}: {beyond}")
    quantization = source.checkpoint.quantization or {}
    compressed = quantization.get("quant_method") == COMPRESSED
    options: dict[str, Any] = {"dtype": dtype}
    if compressed:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=False)
    # compressed-tensors draws bars of its own, which nothing but their stream can turn off.
    model_class = getattr(transformers, source.family.model_class)
    if quantization and source.family.has_experts:
        model_class = linearized(model_class)
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()), _folder(source, repair and compressed) as folder:
        warnings.filterwarnings("ignore", "You passed `quantization_config`")  # to say how, not what, to load
        try:
            model, report = model_class.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
            )
            if compressed:
                _unpack(model, dtype)
        except Exception as error:  # damaged configs and quantizers' packages raise anything
            method = f" ({quantization.get('quant_method')})" if quantization else ""
            raise OnPTQError(
                f"{source.folder}{method} does not load as {source.family.model_class}: {error}"
            ) from error
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if gaps := sorted(map(str, report.get(kind) or ())):  # transformers warns and fills in random numbers
            raise OnPTQError(
                f"{source.folder}: {source.family.model_class} reports {len(gaps)} {kind.replace('_', ' ')}: {gaps[:5]}"
            )
    loaded: nn.Module = linearize(model).to(device).eval().requires_grad_(False)
    if not quantization:
        _check_finite(source, loaded)
    return loaded


def load_policy(
    model: str | Path | Source,
    scheme: Scheme | str,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    layout: Layout = "whole",
    ranks: Ranks = ALONE,
) -> Policy:
    """A dense checkpoint as D and Q in one, not yet given a theta.

    Where its blocks are not to be whole, each goes from the pages of the files to the parts of the ranks: no device has all of
    them at any time."""
    source = model if isinstance(model, Source) else find_source(model)
    scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    device = choose_device(device) if isinstance(device, str) else device
    dtype = choose_dtype(dtype, device) if isinstance(dtype, str) else dtype
    loaded = load_model(source, dtype, device if layout == "whole" else "cpu")
    policy = Policy(loaded, scheme, storage=source.storage(), eos=source.eos())
    if layout != "whole":
        policy.shard(ranks, device, offloaded=layout == "offloaded")
    _check_groups(policy)
    return policy


def load_reader(source: Source, dtype: torch.dtype, device: torch.device, eos: Sequence[int]) -> LanguageModel:
    """A checkpoint, dense or quantized, that answers over our batches, positions and caches."""
    return LanguageModel(load_model(source, dtype, device, repair=True), eos)


@contextmanager
def _folder(source: Source, repair: bool) -> Iterator[Path]:
    """The source's folder; to `repair`, one that links to its files, with every dense linear in the ignore list.

    compressed-tensors writes names on disk into its ignore list, transformers looks for run-time names. Where they differ
    (Qwen2.5-VL, Omni) it takes the towers for quantized, and images become noise. And the thinker of a full Omni
    checkpoint sees no quantization that stands in the outer config.json only.
    """
    if not repair:
        yield source.folder
        return
    quantization = dict(source.checkpoint.quantization or {})
    quantization["ignore"] = [
        *(quantization.get("ignore") or ()),
        *dense_patterns(source.whole, source.family),
    ]
    config = dict(source.config) | {"quantization_config": quantization}
    if isinstance(config.get("thinker_config"), dict):
        config["thinker_config"] = config["thinker_config"] | {"quantization_config": quantization}
    with tempfile.TemporaryDirectory(prefix="onptq-") as folder:
        for path in source.folder.iterdir():
            if path.is_file() and path.name != CONFIG:
                (Path(folder) / path.name).symlink_to(path.resolve())
        (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


def dense_patterns(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Regexes, for run-time names, of the linears without quantized tensors on disk; none if no linear has any."""
    names = checkpoint.tensors
    quantized = {name.removesuffix(end) for name in names for end in QUANTIZED if name.endswith(end)}
    if not quantized:
        return []
    matrices = {
        name.removesuffix(".weight")
        for name, tensor in names.items()
        if name.endswith(".weight") and len(tensor.shape) == 2
    }
    towers = "|".join((*family.towers, *(f"{re.escape(prefix)}.*" for prefix in family.other_models)))
    patterns = [r"re:.*lm_head$"] if not any(name.endswith("lm_head") for name in quantized) else []
    for module in sorted(matrices - quantized):
        linear = _DECODER_LINEAR.fullmatch(module)
        if linear and not (towers and re.match(towers, module)):
            outside = f"(?!(?:{towers})$)" if towers else ""
            patterns.append(rf"re:{outside}(?:.*\.)?{re.escape(linear[1])}$")
        else:
            patterns.append(rf"re:(?:.*\.)?{re.escape(module.removeprefix('thinker.'))}$")
    return patterns


def _unpack(model: Any, dtype: torch.dtype) -> None:
    """Unpack the weights in `dtype`; floats of few bits by way of bfloat16, in which their products are exact.

    transformers 5.17 leaves renamed tensors in the dtype they are stored in, and a full Omni model never calls the hook on
    the top module's forward that would unpack them later."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not name.endswith(TENSOR_SCALE):
            parameter.data = parameter.data.to(dtype)
    model.hf_quantizer.compressor.decompress_model(model=model)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None and hasattr(module, "weight"):
            module.weight.data = module.weight.data.to(dtype)
    try:
        from compressed_tensors.offload import remove_dispatch
    except ImportError:  # older releases pin nothing
        return
    remove_dispatch(model)  # where there is a GPU, unpacking pins every module to the host


def _check_finite(source: Source, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(torch.stack(parameter.aminmax())).all():  # of a NaN both ends are NaN; nothing is copied
            raise OnPTQError(f"{source.folder}: the weight {name} holds NaN or infinity; expected finite weights")


def _check_groups(policy: Policy) -> None:
    for block in policy.structure.blocks:
        for name in block.linears:
            size = policy.scheme.of(block.path(name)).group_size
            columns = block.child(name).in_features
            if size and columns % size:  # type: ignore[operator]
                raise OnPTQError(
                    f"{block.path(name)} has {columns} input columns, which groups of {size} do not divide"
                )
