"""Small checkpoints of the real architectures with random weights, and prompts for them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onptq.errors import OnPTQError
from onptq.registry import FAMILIES
from onptq.zoo.configs import CONFIGS, Dims, model_config, preprocessor_config
from onptq.zoo.media import write_prompts
from onptq.zoo.tokens import LLAMA, OMNI, QWEN, TokenSet, write_tokenizer

LOGIT_STD = 2.5  # below it every state is nearly a tie; above it rounding changes no decision
# Attention is peaked, not an average of noise. Residual updates are small, so that 4 bits change a fifth of the greedy
# tokens rather than most.
GAINS = {"q_proj": 1.4, "k_proj": 1.4, "o_proj": 0.7, "down_proj": 0.4}
TIED_EMBEDDING_STD = 0.5
OUTLIER_EVERY = 32  # one norm channel in so many is an outlier

NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
READERS = tuple(f"{linear}_proj.weight" for linear in ("q", "k", "v", "gate", "up"))  # linears that read a norm
RESIDUAL = ("o_proj.weight", "down_proj.weight")

PLACEHOLDERS = {"<|image_pad|>", "<|video_pad|>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"}
TOKENS = {"qwen2.5-omni": OMNI, "llama": LLAMA}
WHOLE = {"qwen2.5-omni": "Qwen2_5OmniForConditionalGeneration"}  # classes of checkpoints that hold more than is loaded


def write_random(
    family: str,
    folder: Path,
    *,
    prompts: int = 16,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 256,
    ffn: int = 512,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 1024,
    image_size: int = 112,
    tie: bool = False,
    dtype: str = "bfloat16",
    outliers: float = 0.0,
) -> Path:
    """Write a checkpoint of `family` and its prompts.jsonl into `folder`, the same bytes for the same arguments.

    Greedy responses vary and seldom end early, and rounding the weights to 4 bits changes some of their tokens.
    `outliers` multiplies a few channels of the linears' inputs by 1 + outliers, and divides the weights that read them.
    A `vocab` larger than the tokenizer's leaves ids that the model may generate but that have no text.
    """
    tokens = TOKENS.get(family, QWEN)
    dims = Dims(layers, hidden, ffn, heads, kv_heads, vocab, tie, dtype)
    _validate(family, dims, len(tokens.special))
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder, tokens, vocab)
    write_json(folder / "config.json", model_config(family, dims, ids))
    write_json(folder / "generation_config.json", generation_config(tokens, ids))
    modalities = FAMILIES[family].modalities
    if "image" in modalities:
        write_json(folder / "preprocessor_config.json", preprocessor_config(family, "audio" in modalities))
    from safetensors.torch import save_file

    weights = dict(draw_weights(folder, family, dims, silent_ids(tokens, ids, tie), seed, outliers=outliers))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_prompts(folder, modalities, prompts, image_size, seed)
    return folder


def _validate(family: str, dims: Dims, special: int) -> None:
    if family not in CONFIGS:
        raise OnPTQError(f"no random model of {family!r} can be written: expected one of {', '.join(CONFIGS)}")
    if dims.hidden != dims.heads * dims.head_dim or dims.head_dim % 32 != 0 or dims.heads % dims.kv_heads != 0:
        raise OnPTQError(
            f"hidden {dims.hidden} with {dims.heads} heads and {dims.kv_heads} KV heads: expected heads that are a "
            "multiple of 32 wide, and the same number of them for each KV head"
        )
    if dims.vocab < 256 + special:
        raise OnPTQError(f"vocab {dims.vocab}: expected at least {256 + special}, for the bytes and the special tokens")


def generation_config(tokens: TokenSet, ids: Mapping[str, int]) -> dict[str, Any]:
    stops = [ids[token] for token in tokens.stops]
    bos = {"bos_token_id": ids[tokens.bos]} if tokens.bos else {}
    return bos | {"eos_token_id": stops, "pad_token_id": ids[tokens.pad], "do_sample": False}


def silent_ids(tokens: TokenSet, ids: Mapping[str, int], tie: bool) -> list[int]:
    """Ids of the tokens that no response may contain: their rows of the head are zero.

    With a tied head these are the placeholders alone, whose embeddings are never read. The embedding of any other token
    must not be zero.
    """
    silent = PLACEHOLDERS if tie else set(tokens.special) - set(tokens.stops)
    return sorted(ids[token] for token in silent & set(tokens.special))


def draw_weights(
    folder: Path,
    family: str,
    dims: Dims,
    silent: Sequence[int],
    seed: int,
    *,
    outliers: float = 0.0,
    logit_std: float = LOGIT_STD,
    device: str = "cpu",
) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the tensors that `folder`'s config.json describes, one at a time, drawn on `device`."""
    for name, shape in tensor_shapes(folder, family).items():
        if dims.tie and name.endswith("lm_head.weight"):
            continue
        weight = _draw(name, shape, dims, seed, logit_std, device)
        if name.endswith("embed_tokens.weight" if dims.tie else "lm_head.weight") and shape[1] == dims.hidden:
            weight[list(silent)] = 0
        _make_outliers(name, weight, 1 + outliers)
        yield name, weight.to(getattr(torch, dims.dtype))


def tensor_shapes(folder: Path, family: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the transformers class saves them, from a model on the meta device."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    config = transformers.AutoConfig.from_pretrained(str(folder))
    with torch.device("meta"):
        model = getattr(transformers, WHOLE.get(family, FAMILIES[family].model_class))(config)
    on_disk = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(on_disk[name].shape) for name in sorted(on_disk)}


def _draw(name: str, shape: tuple[int, ...], dims: Dims, seed: int, logit_std: float, device: str) -> Tensor:
    """Values that depend on seed and name alone, scaled so that every part of the model affects the logits."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:6], "big"))
    normal = torch.randn(shape, generator=generator, device=device)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.4 + 0.1 * normal
    if dims.tie and name.endswith("model.norm.weight"):
        # A tied head would predict the input token again; random signs of the last norm prevent that.
        return normal.sign() * logit_std / (TIED_EMBEDDING_STD * math.sqrt(dims.hidden))
    if len(shape) == 1:
        return 0.1 * normal if name.endswith("bias") else 1 + 0.1 * normal
    if name.endswith("lm_head.weight"):
        return normal * logit_std / math.sqrt(shape[1])
    if "embed" in name and "proj" not in name:
        return normal * TIED_EMBEDDING_STD if dims.tie else normal
    gain = next((gain for linear, gain in GAINS.items() if name.endswith(f"{linear}.weight")), 1.0)
    if name.endswith(RESIDUAL):
        gain *= math.sqrt(2 / dims.layers)  # so that the sum over all layers does not grow with their number
    inputs = (
        shape[1] if ".experts." in name else math.prod(shape[1:])
    )  # experts are stored as [experts, inputs, outputs]
    return normal * gain / math.sqrt(inputs)


def _make_outliers(name: str, weight: Tensor, factor: float) -> None:
    """Multiply some channels of a norm and divide the linears that read them, in place: the same function with outliers."""
    if name.endswith(NORMS):
        weight[::OUTLIER_EVERY] *= factor
    if name.endswith(READERS) and "tower" not in name and "visual" not in name:
        weight[:, ::OUTLIER_EVERY] /= factor


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
