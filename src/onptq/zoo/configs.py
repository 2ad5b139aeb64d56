"""config.json and preprocessor_config.json of each family, in the layout of the checkpoints on the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

PATCHES = {"qwen2.5-vl": 14, "qwen3-vl": 16, "qwen3-vl-moe": 16, "qwen2.5-omni": 14}
PROCESSORS = {
    "qwen2.5-vl": "Qwen2_5_VLProcessor",
    "qwen3-vl": "Qwen3VLProcessor",
    "qwen3-vl-moe": "Qwen3VLProcessor",
    "qwen2.5-omni": "Qwen2_5OmniProcessor",
}

JSON = dict[str, Any]


@dataclass(frozen=True)
class Dims:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    tie: bool
    dtype: str
    rope_theta: float = 1e6
    context: int = 4096
    width: int | None = None  # of a head; None: the heads share the hidden size
    experts: int = 0  # of a layer, all with `expert_ffn`, of which every token takes `active`
    active: int = 0
    expert_ffn: int = 0

    @property
    def head_dim(self) -> int:
        return self.width or self.hidden // self.heads

    def mrope_section(self, parts: tuple[int, int, int]) -> list[int]:
        """Numbers of rotary frequencies for time, height and width, in the proportions of the published models."""
        return [part * self.head_dim // (2 * sum(parts)) for part in parts]


@dataclass(frozen=True)
class Towers:
    """Sizes of the vision and audio towers."""

    width: int = 64
    heads: int = 2
    ffn: int = 128
    depth: int = 2
    window: int = 56  # pixels of the attention window in Qwen2.5's tower
    full: tuple[int, ...] = (1,)  # blocks of it with full attention
    deep_depth: int = 3  # Qwen3's tower
    deepstack: tuple[int, ...] = (0, 1)
    positions: int = 256
    audio_layers: int = 2
    audio_heads: int | None = None  # None: as many as in the vision tower
    audio_ffn: int = 128
    audio_window: int = 25  # half a chunk of mel frames
    talker_vocab: int | None = None  # None: that of the thinker


RANDOM_TOWERS = Towers()


def model_config(family: str, dims: Dims, ids: Mapping[str, int], towers: Towers = RANDOM_TOWERS) -> JSON:
    return CONFIGS[family](dims, ids, towers)


def preprocessor_config(family: str, audio: bool, pixels: tuple[int, int] | None = None) -> JSON:
    """Settings of the image processor and, for audio clips, of the feature extractor, in one file as on the hub.

    Images are resized to an area between the two numbers of `pixels`.
    """
    patch = PATCHES[family]
    least, most = pixels or ((4 * patch) ** 2, (64 * patch) ** 2)
    config: JSON = {
        "processor_class": PROCESSORS[family],
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": [0.5] * 3 if patch == 16 else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5] * 3 if patch == 16 else [0.26862954, 0.26130258, 0.27577711],
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": least, "longest_edge": most},
    }
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
    }
    return config | extractor if audio else config


def _text(dims: Dims) -> JSON:
    return {
        "hidden_size": dims.hidden,
        "intermediate_size": dims.ffn,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "vocab_size": dims.vocab,
        "hidden_act": "silu",
        "max_position_embeddings": dims.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": dims.rope_theta,
        "tie_word_embeddings": dims.tie,
        "torch_dtype": dims.dtype,
        "use_cache": True,
    }


def _stops(ids: Mapping[str, int]) -> JSON:
    return {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}


def _windowed_vision(dims: Dims, towers: Towers) -> JSON:
    """The vision tower of Qwen2.5: blocks with windowed attention, and some with full attention."""
    return {
        "depth": towers.depth,
        "hidden_size": towers.width,
        "intermediate_size": towers.ffn,
        "num_heads": towers.heads,
        "out_hidden_size": dims.hidden,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": towers.window,
        "fullatt_block_indexes": list(towers.full),
        "hidden_act": "silu",
    }


def _vision_ids(ids: Mapping[str, int]) -> JSON:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen2_5_vl(dims: Dims, ids: Mapping[str, int], towers: Towers) -> JSON:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **_text(dims),
        **_stops(ids),
        **_vision_ids(ids),
        "rope_scaling": {"type": "mrope", "mrope_section": dims.mrope_section((2, 3, 3))},
        "vision_config": {"model_type": "qwen2_5_vl", **_windowed_vision(dims, towers)},
    }


def _qwen3_vl(dims: Dims, ids: Mapping[str, int], towers: Towers) -> JSON:
    text = {
        "model_type": "qwen3_vl_text",
        **_text(dims),
        **_stops(ids),
        "head_dim": dims.head_dim,
        "attention_bias": False,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": dims.mrope_section((6, 5, 5)),
            "mrope_interleaved": True,
        },
    }
    vision = {
        "model_type": "qwen3_vl",
        "depth": towers.deep_depth,
        "hidden_size": towers.width,
        "intermediate_size": towers.ffn,
        "num_heads": towers.heads,
        "out_hidden_size": dims.hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": towers.positions,
        "deepstack_visual_indexes": list(towers.deepstack[: dims.layers]),  # at most one per decoder layer
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        **_vision_ids(ids),
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": dims.tie,
        "torch_dtype": dims.dtype,
    }


def _qwen3_vl_moe(dims: Dims, ids: Mapping[str, int], towers: Towers) -> JSON:
    config = _qwen3_vl(dims, ids, towers)
    config["text_config"] |= {
        "model_type": "qwen3_vl_moe_text",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": dims.expert_ffn,
        "norm_topk_prob": True,
        "num_experts": dims.experts,
        "num_experts_per_tok": dims.active,
    }
    config["vision_config"] |= {"model_type": "qwen3_vl_moe"}
    return config | {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}


def _qwen2_5_omni(dims: Dims, ids: Mapping[str, int], towers: Towers) -> JSON:
    rope = {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": dims.mrope_section((2, 3, 3))}}
    token_ids = {
        "audio_token_index": ids["<|AUDIO|>"],
        "image_token_index": ids["<|IMAGE|>"],
        "video_token_index": ids["<|VIDEO|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
    }
    audio = {
        "model_type": "qwen2_5_omni_audio_encoder",
        "num_mel_bins": 128,
        "d_model": towers.width,
        "encoder_layers": towers.audio_layers,
        "encoder_attention_heads": towers.audio_heads or towers.heads,
        "encoder_ffn_dim": towers.audio_ffn,
        "n_window": towers.audio_window,
        "output_dim": dims.hidden,
    }
    thinker = {
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_thinker",
        **token_ids,
        "user_token_id": 0,
        "text_config": {"model_type": "qwen2_5_omni_text", **_text(dims), **_stops(ids), **rope},
        "vision_config": {"model_type": "qwen2_5_omni_vision_encoder", **_windowed_vision(dims, towers)},
        "audio_config": audio,
        "tie_word_embeddings": dims.tie,
        "torch_dtype": dims.dtype,
    }
    small = replace(dims, layers=1, hidden=dims.head_dim, ffn=2 * dims.head_dim, heads=1, kv_heads=1, tie=False)
    small = replace(small, vocab=towers.talker_vocab or dims.vocab)
    speech = [f"tts_codec_{name}_token_id" for name in ("start", "end", "pad", "mask")]
    speech += [f"tts_text_{name}_token_id" for name in ("start", "end", "pad")]
    talker = {
        "model_type": "qwen2_5_omni_talker",
        **_text(small),
        **token_ids,
        **{name: index for index, name in enumerate(speech)},
        **rope,
        "embedding_size": dims.hidden,
        "head_dim": dims.head_dim,
    }
    return {
        "architectures": ["Qwen2_5OmniModel"],
        "model_type": "qwen2_5_omni",
        "enable_audio_output": True,
        "thinker_config": thinker,
        "talker_config": talker,
        "token2wav_config": _TOKEN2WAV,
        "torch_dtype": dims.dtype,
    }


_TOKEN2WAV: JSON = {
    "model_type": "qwen2_5_omni_token2wav",
    "dit_config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "emb_dim": 16,
        "num_embeds": 32,
        "mel_dim": 16,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
        "look_ahead_layers": [0],
        "look_backward_layers": [0],
    },
    "bigvgan_config": {
        "mel_dim": 16,
        "upsample_initial_channel": 64,
        "upsample_rates": [2],
        "upsample_kernel_sizes": [4],
    },
}


def _llama(dims: Dims, ids: Mapping[str, int], towers: Towers) -> JSON:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_text(dims),
        "head_dim": dims.head_dim,
        "bos_token_id": ids["<|begin_of_text|>"],
        "eos_token_id": [ids["<|eot_id|>"], ids["<|end_of_text|>"]],
    }


def _qwen2(dims: Dims, ids: Mapping[str, int], towers: Towers) -> JSON:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_text(dims), **_stops(ids)}


def _qwen3(dims: Dims, ids: Mapping[str, int], towers: Towers) -> JSON:
    heads = {"head_dim": dims.head_dim, "attention_bias": False}
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_text(dims), **_stops(ids), **heads}


CONFIGS: dict[str, Callable[[Dims, Mapping[str, int], Towers], JSON]] = {
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl": _qwen3_vl,
    "qwen3-vl-moe": _qwen3_vl_moe,
    "qwen2.5-omni": _qwen2_5_omni,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
