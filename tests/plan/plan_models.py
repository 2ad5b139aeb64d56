"""Checkpoints of full size without weights, and machines with a GPU that is not here.

A checkpoint has a config, a small model's tokenizer and processor, and sparse shards: headers are real, data were never
written.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from onptq.plan.machine import GPUS, Machine

GIB = 2**30
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}
Shapes = dict[str, tuple[int, ...]]


def machine(gpu_gib: float, host_gib: float = 120) -> Machine:
    """A machine with an H200's rates and so much free memory."""
    sheet = GPUS["h200-141g"]
    return Machine("cuda:0", "a GPU", torch.bfloat16, int(gpu_gib * GIB), int(host_gib * GIB), sheet)


BIG_GPU = machine(139)
QWEN2_5_VL = {  # width, that of the MLP, blocks, heads, key heads
    "qwen2.5-vl-7b": (3584, 18944, 28, 28, 4),
    "qwen2.5-vl-32b": (5120, 27648, 64, 40, 8),
    "qwen2.5-vl-72b": (8192, 29568, 80, 64, 8),
}


def write_sparse(folder: Path, name: str, small: Path, dtype: str = "BF16", **changes: Any) -> Path:
    """A checkpoint with the shapes of a published one, e.g. qwen2.5-vl-7b: gigabytes to every reader, none on disk.

    `small` is a checkpoint of the same family, whose tokenizer and processor it gets."""
    config, vision = _llama_8b() if name == "llama-8b" else _qwen2_5_vl(*QWEN2_5_VL[name])
    config |= changes
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "chat_template.jinja"):
        if (small / file).is_file():
            shutil.copy(small / file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = _decoder(config) | vision
    names = sorted(shapes)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in halves.items():
        write_sparse_file(folder / file, {key: shapes[key] for key in keys}, dtype)
    index = {"weight_map": {key: file for file, keys in halves.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


PUBLISHED = Path(__file__).parents[1] / "models/configs/qwen3-vl-30b-a3b.json"
QWEN3_VL_30B_A3B: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))


def write_mixture(folder: Path) -> Path:
    """Qwen3-VL-30B-A3B's language model as its checkpoint stores it, experts joined and transposed; of its tower one tensor."""
    text = QWEN3_VL_30B_A3B["text_config"]
    hidden, inner, experts, queries, keys = 2048, 768, 128, 4096, 512
    shapes: Shapes = {
        "model.language_model.embed_tokens.weight": (text["vocab_size"], hidden),
        "model.language_model.norm.weight": (hidden,),
        "lm_head.weight": (text["vocab_size"], hidden),
        "model.visual.patch_embed.proj.weight": (1152, 3, 2, 16, 16),
    }
    for layer in range(text["num_hidden_layers"]):
        of = f"model.language_model.layers.{layer}."
        shapes |= {
            f"{of}self_attn.{name}_proj.weight": (rows, hidden)
            for name, rows in zip("qkv", (queries, keys, keys), strict=True)
        }
        shapes |= {f"{of}self_attn.{name}_norm.weight": (128,) for name in "qk"}
        shapes |= {f"{of}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {
            f"{of}self_attn.o_proj.weight": (hidden, queries),
            f"{of}mlp.gate.weight": (experts, hidden),
            f"{of}mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
            f"{of}mlp.experts.down_proj": (experts, inner, hidden),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_VL_30B_A3B))
    write_sparse_file(folder / "model.safetensors", shapes)
    return folder


def write_sparse_file(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A safetensors file of that size whose data were never written."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _decoder(config: Mapping[str, Any]) -> Shapes:
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        rows = {"q": hidden, "k": kv, "v": kv}
        of = f"model.layers.{layer}."
        shapes |= {f"{of}self_attn.{name}_proj.weight": (size, hidden) for name, size in rows.items()}
        shapes |= {f"{of}self_attn.o_proj.weight": (hidden, hidden), f"{of}mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {f"{of}mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {f"{of}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        if config["model_type"] != "llama":
            shapes |= {f"{of}self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    return shapes


def _qwen2_5_vl(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> tuple[dict[str, Any], Shapes]:
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 152064,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "spatial_merge_size": 2},
    }
    width, ffn = 1280, 3420
    vision: Shapes = {"visual.patch_embed.proj.weight": (width, 3, 2, 14, 14)}
    for block in range(32):
        of = f"visual.blocks.{block}."
        vision |= {f"{of}attn.qkv.weight": (3 * width, width), f"{of}attn.proj.weight": (width, width)}
        vision |= {f"{of}mlp.{name}_proj.weight": (ffn, width) for name in ("gate", "up")}
        vision |= {
            f"{of}mlp.down_proj.weight": (width, ffn),
            f"{of}norm1.weight": (width,),
            f"{of}norm2.weight": (width,),
        }
    vision |= {"visual.merger.mlp.0.weight": (5120, 5120), "visual.merger.mlp.2.weight": (hidden, 5120)}
    return config, vision


def _llama_8b() -> tuple[dict[str, Any], Shapes]:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    return config, {}
