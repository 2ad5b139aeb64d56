"""The folder of an embedded model in the layout of published checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onptq.errors import OnPTQError
from onptq.registry import FAMILIES
from onptq.zoo.configs import PATCHES, Dims, Towers, model_config, preprocessor_config
from onptq.zoo.tokens import OMNI, QWEN, TokenSet, save_tokenizer
from tools.zoo.train.tokenizer import without_system

ZOO = ("qwen2.5-vl", "qwen3-vl", "qwen2.5-omni")
VOCAB = 1536
WORDS = VOCAB - len(OMNI.special)  # the same words have the same ids in all three models
DIMS = Dims(layers=6, hidden=256, ffn=512, heads=4, kv_heads=2, vocab=VOCAB, tie=True, dtype="bfloat16", rope_theta=1e4)
_TOWERS = Towers(
    width=128,
    heads=2,
    ffn=384,
    depth=5,
    window=112,
    full=(4,),
    deep_depth=5,
    deepstack=(1, 3),
    positions=64,
    audio_layers=4,
    audio_ffn=384,
    audio_window=200,
    talker_vocab=32,
)
# The MLPs of the other two vision towers are smaller by the size of DeepStack or the audio tower.
TOWERS = {"qwen2.5-vl": _TOWERS, "qwen3-vl": replace(_TOWERS, ffn=256), "qwen2.5-omni": replace(_TOWERS, ffn=256)}
TOKENS = {family: without_system(OMNI if family == "qwen2.5-omni" else QWEN) for family in ZOO}
MODE = 0o644  # of the weights, as of the files beside them; safetensors lets only the owner read


def side(family: str) -> int:
    """Pixels along the side of an image: eight patches."""
    return 8 * PATCHES[family]


def check_family(family: str) -> None:
    if family not in ZOO:
        raise OnPTQError(f"unknown family {family!r}: expected one of {', '.join(ZOO)}")


def write_settings(folder: Path, family: str, words: Any, dims: Dims = DIMS) -> dict[str, int]:
    """Everything but the weights; `words` is a tokenizer without special tokens. Returns the ids of those."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = TOKENS[family]
    ids = save_tokenizer(folder, tokens, words)
    audio = "audio" in FAMILIES[family].modalities
    area = side(family) ** 2
    config = model_config(family, dims, ids, TOWERS[family])
    if family == "qwen2.5-omni":
        config["enable_audio_output"] = False  # so that loaders expect the thinker's weights alone
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation(tokens, ids))
    _write_json(folder / "preprocessor_config.json", preprocessor_config(family, audio, (area, area)))
    return ids


def build_model(folder: Path, family: str, seed: int) -> Any:
    """The family's transformers model with fresh weights in float32, as its settings in `folder` describe it."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(folder))
    config = getattr(config, "thinker_config", config)
    torch.manual_seed(seed)
    model = getattr(transformers, FAMILIES[family].model_class)(config).float()
    _initialize(model)
    return model


@torch.no_grad()
def _initialize(model: nn.Module) -> None:
    """Scaled to each layer's width, and quiet where a block writes into the residual stream."""
    depth = sum(name.endswith("o_proj.weight") for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if "embed" in name and "patch" not in name:
            parameter.normal_(0, 0.03)
        elif parameter.ndim > 1:
            parameter.normal_(0, 0.6 / math.sqrt(parameter[0].numel()))
            if name.endswith(
                ("o_proj.weight", "down_proj.weight", "out_proj.weight", "attn.proj.weight", "fc2.weight")
            ):
                parameter.div_(math.sqrt(2 * depth))
        elif name.endswith("bias"):
            parameter.zero_()


def write_weights(folder: Path, family: str, model: Any) -> Path:
    """model.safetensors in bfloat16 under the names that published checkpoints use; of Omni the thinker alone."""
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    prefix = "thinker." if family == "qwen2.5-omni" else ""
    on_disk: Mapping[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    weights = {  # a model that was loaded, not built, brings the prefix with it
        prefix + name.removeprefix(prefix): on_disk[name].detach().to("cpu", torch.bfloat16).contiguous()
        for name in sorted(on_disk)
        if not (DIMS.tie and name.endswith("lm_head.weight"))
    }
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(MODE)
    return path


def _generation(tokens: TokenSet, ids: Mapping[str, int]) -> dict[str, Any]:
    stops = [ids[token] for token in tokens.stops]
    return {"eos_token_id": stops, "pad_token_id": ids[tokens.pad], "do_sample": False}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
