"""Reload an exported checkpoint in transformers and hold it against the logits of the graph it was folded from."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from onptq.errors import OnPTQError
from onptq.export.checkpoint import find_decoder

# Largest difference of a logit, relative to the largest logit, that rounding of the compute type explains.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Loadable(Protocol):
    """The part of a family that says how its checkpoints load."""

    @property
    def model_class(self) -> str: ...
    @property
    def ignore(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Verification:
    max_abs_difference: float  # of any logit at any state
    argmax_agreement: float  # share of states that choose the same token
    states: int


def verify(
    folder: Path,
    family: Loadable,
    inputs: Sequence[Mapping[str, Tensor]],
    expected: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tolerance: float | None = None,
) -> Verification:
    """Raises unless the reloaded checkpoint gives the expected logits, [B, T, V] per input, and the same choices."""
    model = load(folder, family, dtype, device)
    return hold_against(model, folder, inputs, expected, dtype=dtype, tolerance=tolerance)


def hold_against(
    model: Any,
    folder: Path,
    inputs: Sequence[Mapping[str, Tensor]],
    expected: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    tolerance: float | None = None,
) -> Verification:
    """As `verify`, for a model that is loaded already."""
    if not inputs or len(inputs) != len(expected):
        counts = f"{len(inputs)} and {len(expected)}"
        raise OnPTQError(f"verification needs at least one input and as many expected logits, got {counts}")
    relative = TOLERANCE[dtype] if tolerance is None else tolerance
    difference, agreed, states = 0.0, 0, 0
    for number, (one, want) in enumerate(zip(inputs, expected, strict=True)):
        got = logits_of(model, one)
        if got.shape != want.shape:
            raise OnPTQError(f"{folder}: input {number} gives logits {list(got.shape)}, expected {list(want.shape)}")
        real = _real_positions(one)
        try:
            worst, same = _compare(got[real], want.float().cpu()[real], relative, dtype)
        except OnPTQError as error:
            raise OnPTQError(f"{folder}: the reloaded checkpoint {error} (input {number})") from None
        difference, agreed, states = max(difference, worst), agreed + same, states + int(real.sum())
    return Verification(difference, agreed / states, states)


def reload_logits(
    folder: Path,
    family: Loadable,
    inputs: Sequence[Mapping[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[Tensor]:
    """Logits [B, T, V] of every input, fp32, on the host, from the checkpoint as any user of transformers loads it."""
    model = load(folder, family, dtype, device)
    return [logits_of(model, one) for one in inputs]


@torch.inference_mode()
def logits_of(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """[B, T, V] in fp32 on the host."""
    logits: Tensor = model(**place(inputs, model), use_cache=False).logits
    return logits.float().cpu()


def place(inputs: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Inputs where the model is, in the type it computes in."""
    weight = model.get_input_embeddings().weight
    return {name: _place(value, weight.dtype, weight.device) for name, value in inputs.items()}


def load(
    folder: Path, family: Loadable, dtype: torch.dtype, device: torch.device | str = "cpu", *, strict: bool = True
) -> Any:
    """As any user of transformers loads it; `strict` asks that just the decoder's seven linears a layer are quantized."""
    import transformers

    options: dict[str, Any] = {}
    scheme = _read_quantization(folder)
    compressed = scheme is not None and scheme.get("quant_method") == "compressed-tensors"
    if compressed:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=False)
    # compressed-tensors draws bars of its own, which nothing but their stream can turn off.
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.filterwarnings("ignore", "You passed `quantization_config`")  # to say how, not what, to load
        model, report = getattr(transformers, family.model_class).from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
        if compressed:
            unpack(model, dtype)
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):  # transformers itself only warns, and fills the gap with random numbers
            raise OnPTQError(
                f"{folder}: transformers reports {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))[:5]}"
            )
    if compressed and strict:
        check_modules(model, family.ignore)
    return model.eval().to(device)


def unpack(model: Any, dtype: torch.dtype) -> None:
    """Unpack the weights in `dtype`. transformers 5.17 leaves renamed tensors in the dtype they are stored in, and a hook on the
    top module's forward, which would unpack them later, is never called by a full Omni model."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    model.hf_quantizer.compressor.decompress_model(model=model)
    try:
        from compressed_tensors.offload import remove_dispatch
    except ImportError:  # older releases pin nothing
        return
    remove_dispatch(model)  # where there is a GPU, unpacking pins every module to the host


def check_modules(model: nn.Module, ignore: Sequence[str]) -> None:
    """All seven linears of every decoder layer carry a quantization scheme, and no other module does."""
    decoder = find_decoder({name for name, _ in model.named_parameters()}, ignore)
    linears = {decoder.prefix + name for name in decoder.linears}
    quantized = quantized_modules(model)
    if quantized != linears:
        raise OnPTQError(
            f"{type(model).__name__} quantizes other modules than its decoder's {len(linears)} linears: "
            f"wrongly quantized {sorted(quantized - linears)[:5]}, left out {sorted(linears - quantized)[:5]}"
        )


def quantized_modules(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if getattr(module, "quantization_scheme", None) is not None}


def _compare(got: Tensor, want: Tensor, relative: float, dtype: torch.dtype) -> tuple[float, int]:
    """Largest difference and number of agreeing choices over states [S, V]; raises what is wrong with `got`."""
    if not bool(torch.isfinite(got).all()):
        raise OnPTQError("gives logits that are not finite")
    worst = (got - want).abs().max().item()
    allowed = relative * want.abs().max().item()
    if worst > allowed:
        raise OnPTQError(
            f"differs from the folded model by {worst:.4g} in a logit, expected at most {allowed:.4g} in {dtype}"
        )
    same = got.argmax(-1) == want.argmax(-1)
    flips = int((~(same | _tied(got, want, dtype))).sum())
    if flips:
        raise OnPTQError(f"chooses another token than the folded model at {flips} of {len(same)} states")
    return worst, int(same.sum())


def _read_quantization(folder: Path) -> dict[str, Any] | None:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OnPTQError(f"{folder} holds no complete checkpoint: {error}") from error
    return config.get("quantization_config")


def _place(value: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _real_positions(one: Mapping[str, Tensor]) -> Tensor:
    """[B, T]; padding has no state, and its logits mean nothing."""
    return one.get("attention_mask", torch.ones_like(one["input_ids"])).bool().cpu()


def _tied(got: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    """States where both choices have the same logit up to one rounding of the compute type: no decision to lose."""
    best = want.max(-1).values
    chosen = want.gather(-1, got.argmax(-1, keepdim=True)).squeeze(-1)
    return best - chosen <= torch.finfo(dtype).eps * best.abs()
