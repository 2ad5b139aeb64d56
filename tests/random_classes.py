"""Random checkpoints of transformers classes that no file of OnPTQ describes, saved by transformers with their processors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from onptq.models.derived import model_class
from onptq.zoo.media import write_prompts
from onptq.zoo.tokens import CHATML, QWEN, TokenSet, write_tokenizer

VOCABULARY, PROMPTS = 600, 8
JSON = dict[str, Any]
TEXT: JSON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TOWER: JSON = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MEAN: JSON = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

EXPERTS: JSON = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}


IDEFICS_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)


@dataclass(frozen=True)
class RandomClass:
    """A transformers class with small sizes: its config.json, the settings of its processor, and its special tokens."""

    model_type: str
    config: Callable[[Mapping[str, int]], JSON]  # of the ids of the special tokens
    processor: JSON
    images: JSON
    special: tuple[str, ...]  # besides ChatML's
    part: str  # what the chat template writes for an image, and for a clip unless `audio` says so
    roles: Mapping[str, str] | None = None
    towers: tuple[str, ...] = ()
    unfolded: tuple[str, ...] = ()  # pairs that do not fold, as the proof names them
    published: Mapping[str, Any] = field(default_factory=dict)  # of the text config, where defaults are no checkpoint's
    torchvision: bool = False  # whether its processor needs it
    modalities: frozenset[str] = frozenset({"text", "image"})
    audio: str = ""
    examples: str = ""  # checkpoints of the class, for people
    others: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # tensors that its class does not load


def _qwen_text(**changes: Any) -> JSON:
    return TEXT | {"model_type": "qwen2"} | changes


def _side(size: int) -> JSON:
    return {"size": {"height": size, "width": size}}


CLASSES = {
    "llava": RandomClass(
        "llava",
        lambda ids: {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER
            | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 32},
            "image_token_index": ids["<image>"],
            "image_seq_length": 4,
            "vision_feature_layer": -1,
        },
        {"processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default"}
        | {"num_additional_image_tokens": 1},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}}
        | {"crop_size": {"height": 28, "width": 28}},
        ("<image>",),
        "<image>",
        towers=("vision_tower", "multi_modal_projector"),
        examples="LLaVA 1.5",
    ),
    "idefics3": RandomClass(
        "idefics3",
        lambda ids: {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER | {"model_type": "idefics3_vision", "image_size": 28, "patch_size": 14},
            "image_token_id": ids["<image>"],
            "scale_factor": 2,
        },
        {"processor_class": "Idefics3Processor", "image_seq_len": 1},
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 56}}
        | {"max_image_size": {"longest_edge": 28}, "do_image_splitting": True},
        IDEFICS_TOKENS,
        "<image>",
        towers=("vision_model", "connector"),
        published={"pad_token_id": 0},
        examples="Idefics3, Granite-Docling",
    ),
    "paddleocr_vl": RandomClass(
        "paddleocr_vl",
        lambda ids: {
            "text_config": TEXT
            | {
                "model_type": "paddleocr_vl_text",
                "use_bias": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
            },
            "vision_config": TOWER
            | {"model_type": "paddleocr_vl_vision", "image_size": 56, "patch_size": 14, "spatial_merge_size": 2},
            "image_token_id": ids["<|IMAGE_PLACEHOLDER|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        },
        {"processor_class": "PaddleOCRVLProcessor"},
        {"image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 14, "merge_size": 2}
        | {"temporal_patch_size": 1, "size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}},
        ("<|IMAGE_PLACEHOLDER|>",),
        "<|vision_start|><|IMAGE_PLACEHOLDER|><|vision_end|>",
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        towers=("visual", "projector"),
        published={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        examples="PaddleOCR-VL",
    ),
    "gemma3": RandomClass(
        "gemma3",
        lambda ids: {
            "text_config": TEXT
            | {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 24, "query_pre_attn_scalar": 32}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "vision_config": TOWER
            | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
            | {"vision_use_head": False},
            "mm_tokens_per_image": 4,
            "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"],
            "image_token_index": ids["<image_soft_token>"],
        },
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": False} | _side(56),
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "<start_of_image>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        towers=("vision_tower", "multi_modal_projector"),
        examples="Gemma 3: 4B, 12B, 27B",
    ),
    "internvl": RandomClass(
        "internvl",
        lambda ids: {
            "text_config": _qwen_text(),
            "vision_config": TOWER
            | {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14], "num_channels": 3},
            "image_token_id": ids["<IMG_CONTEXT>"],
            "image_seq_length": 4,
            "downsample_ratio": 0.5,
        },
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
        | _side(56),
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "<IMG_CONTEXT>",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        towers=("vision_tower", "multi_modal_projector"),
        torchvision=True,
        examples="InternVL3, InternVL3.5 (`-HF`)",
    ),
    "mistral3": RandomClass(
        "mistral3",
        lambda ids: {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": TOWER | {"model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 16},
            "image_token_index": ids["[IMG]"],
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2, "image_token": "[IMG]"},
        {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 14, "width": 14}}
        | {"size": {"longest_edge": 112}},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        towers=("vision_tower", "multi_modal_projector"),
        torchvision=True,
        examples="Mistral Small 3.1, 3.2",
    ),
    "ministral3": RandomClass(
        "mistral3",
        lambda ids: {
            "text_config": TEXT
            | {
                "model_type": "ministral3",
                "sliding_window": None,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "original_max_position_embeddings": 32,
                    "max_position_embeddings": 512,
                    "llama_4_scaling_beta": 0.5,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
            "vision_config": TOWER | {"model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 16},
            "image_token_index": ids["[IMG]"],
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2, "image_token": "[IMG]"},
        {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 14, "width": 14}}
        | {"size": {"longest_edge": 112}},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        towers=("vision_tower", "multi_modal_projector"),
        torchvision=True,
        examples="Ministral 3",
    ),
    "qwen2_audio": RandomClass(
        "qwen2_audio",
        lambda ids: {
            "text_config": _qwen_text(),
            "audio_config": {"model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "d_model": 32}
            | {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64},
            "audio_token_index": ids["<|AUDIO|>"],
        },
        {"processor_class": "Qwen2AudioProcessor"},
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "sampling_rate": 16_000}
        | {"hop_length": 160, "chunk_length": 30, "n_fft": 400, "return_attention_mask": True},
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        towers=("audio_tower", "multi_modal_projector"),
        modalities=frozenset({"text", "audio"}),
        examples="Qwen2-Audio",
    ),
    "mistral": RandomClass(
        "mistral",
        lambda ids: TEXT | {"sliding_window": 24},
        {},
        {},
        (),
        "",
        modalities=frozenset({"text"}),
        examples="Mistral 7B",
    ),
    "phi3": RandomClass(
        "phi3",
        lambda ids: (
            TEXT
            | {
                "sliding_window": 24,
                "resid_pdrop": 0.0,
                "rope_parameters": {"rope_type": "default"} | {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            }
        ),
        {},
        {},
        (),
        "",
        modalities=frozenset({"text"}),
        examples="Phi-3, Phi-4",
    ),
    "glm4v": RandomClass(
        "glm4v",
        lambda ids: {
            "text_config": TEXT
            | {
                "model_type": "glm4v_text",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
                | {"mrope_section": [2, 3, 3]},
            },
            "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
            | {"out_hidden_size": 64, "image_size": 112, "patch_size": 14, "spatial_merge_size": 2}
            | {"temporal_patch_size": 2},
            "image_token_id": ids["<|image|>"],
            "video_token_id": ids["<|video|>"],
            "image_start_token_id": ids["<|begin_of_image|>"],
            "image_end_token_id": ids["<|end_of_image|>"],
            "video_start_token_id": ids["<|begin_of_video|>"],
            "video_end_token_id": ids["<|end_of_video|>"],
        },
        {"processor_class": "Glm4vProcessor"},
        {"image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        | {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}},
        ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        "<|begin_of_image|><|image|><|end_of_image|>",
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        towers=("visual",),
        published={
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            | {"mrope_section": [8, 12, 12]}
        },
        torchvision=True,
        examples="GLM-4.1V-9B",
    ),
    "gemma4": RandomClass(
        "gemma4",
        lambda ids: {
            "text_config": TEXT
            | {"model_type": "gemma4_text", "num_hidden_layers": 3, "sliding_window": 24, "global_head_dim": 64}
            | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
            | {
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "hidden_size_per_layer_input": 0,
                "use_bidirectional_attention": "vision",
            }
            | {"num_kv_shared_layers": 0, "enable_moe_block": False, "num_key_value_heads": 2},
            "vision_config": TOWER
            | {"model_type": "gemma4_vision", "patch_size": 14, "head_dim": 16, "num_key_value_heads": 2}
            | {"pooling_kernel_size": 2, "position_embedding_size": 64},
            "audio_config": None,
            "image_token_id": ids["<|image|>"],
            "boi_token_id": ids["<|image>"],
            "eoi_token_id": ids["<image|>"],
            "audio_token_id": ids["<|audio|>"],
            "video_token_id": ids["<|video|>"],
        },
        {"processor_class": "Gemma4Processor", "image_seq_length": 4},
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 14, "pooling_kernel_size": 2}
        | {"max_soft_tokens": 70},
        ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"),
        "<|image|>",
        {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>"}
        | {"boa_token": "<|audio>", "eoa_token": "<audio|>", "video_token": "<|video|>"},
        towers=("vision_tower", "embed_vision"),
        unfolded=("v_proj -> o_proj does not fold in 2 of 3 layers",),
        published={"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True},
        torchvision=True,
        examples="Gemma 4: 31B",
    ),
    "qwen3_5": RandomClass(
        "qwen3_5",
        lambda ids: {
            "text_config": TEXT
            | {"model_type": "qwen3_5_text", "num_hidden_layers": 4}
            | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
            | {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
            | {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
                | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
            },
            "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
            | {"out_hidden_size": 64, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
            | {"num_position_embeddings": 64},
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        },
        {"processor_class": "Qwen3VLProcessor"},
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        | {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}},
        (),
        "<|vision_start|><|image_pad|><|vision_end|>",
        towers=("visual", "mtp"),
        others={"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,)}
        | {"mtp.layers.0.self_attn.q_proj.weight": (128, 64), "mtp.layers.0.mlp.gate_proj.weight": (128, 64)},
        examples="Qwen3.5, Qwen3.6: the dense sizes",
    ),
    "llava_onevision": RandomClass(
        "llava_onevision",
        lambda ids: {
            "text_config": _qwen_text(),
            "vision_config": TOWER
            | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
            | {"vision_use_head": False},
            "image_token_index": ids["<image>"],
            "video_token_index": ids["<video>"],
            "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56]],
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "vision_aspect_ratio": "anyres_max_2",
        },
        {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
        },
        {"image_processor_type": "LlavaOnevisionImageProcessor"}
        | {"image_grid_pinpoints": [[56, 56], [56, 112], [112, 56]]}
        | _side(56),
        ("<image>", "<video>"),
        "<image>",
        towers=("vision_tower", "multi_modal_projector"),
        torchvision=True,
        examples="LLaVA-OneVision",
    ),
    "smolvlm": RandomClass(
        "smolvlm",
        lambda ids: {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER | {"model_type": "smolvlm_vision", "image_size": 28, "patch_size": 14},
            "image_token_id": ids["<image>"],
            "scale_factor": 2,
        },
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 1},
        {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 56}}
        | {"max_image_size": {"longest_edge": 28}, "do_image_splitting": True},
        IDEFICS_TOKENS,
        "<image>",
        {
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>",
        },
        towers=("vision_model", "connector"),
        published={"pad_token_id": 0},
        torchvision=True,
        examples="SmolVLM, SmolVLM2",
    ),
    "qwen2_vl": RandomClass(
        "qwen2_vl",
        lambda ids: {
            "text_config": TEXT
            | {
                "model_type": "qwen2_vl_text",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
            },
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
            | {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        },
        {"processor_class": "Qwen2VLProcessor"},
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        | {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}},
        (),
        "<|vision_start|><|image_pad|><|vision_end|>",
        towers=("visual",),
        published={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        torchvision=True,
        examples="Qwen2-VL",
    ),
}


CLASSES["gemma4_e2b"] = replace(
    CLASSES["gemma4"],
    config=lambda ids: (
        CLASSES["gemma4"].config(ids)
        | {
            "text_config": TEXT
            | {"model_type": "gemma4_text", "num_hidden_layers": 6, "sliding_window": 24, "global_head_dim": 64}
            | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
            | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0}
            | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY},
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "output_proj_dims": 32,
            }
            | {"subsampling_conv_channels": [16, 4], "conv_kernel_size": 3, "attention_chunk_size": 4}
            | {"attention_context_left": 5},
        }
    ),
    images=CLASSES["gemma4"].images
    | {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 16, "sampling_rate": 16_000},
    towers=("vision_tower", "embed_vision", "audio_tower", "embed_audio", "per_layer_model_projection"),
    unfolded=("v_proj -> o_proj does not fold in 3 of 6 layers",),
    published={},
    modalities=frozenset({"text", "image", "audio"}),
    audio="<|audio|>",
    others={"model.language_model.layers.4.self_attn.k_proj.weight": (32, 64)},
    examples="Gemma 4: E2B, E4B",
)


# With experts, whose checkpoints transformers reloads otherwise than OnPTQ.
SPARSE = {
    "qwen3_5_moe": replace(
        CLASSES["qwen3_5"],
        model_type="qwen3_5_moe",
        config=lambda ids: {
            **CLASSES["qwen3_5"].config(ids),
            "text_config": CLASSES["qwen3_5"].config(ids)["text_config"]
            | EXPERTS
            | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 96},
        },
        examples="Qwen3.6-35B-A3B, Qwen3.5-122B-A10B",
    ),
    "qwen3_moe": RandomClass(
        "qwen3_moe",
        lambda ids: TEXT | EXPERTS | {"mlp_only_layers": [], "decoder_sparse_step": 1},
        {},
        {},
        (),
        "",
        modalities=frozenset({"text"}),
        examples="Qwen3-30B-A3B, Qwen3-235B-A22B",
    ),
    "qwen3_vl_moe": RandomClass(
        "qwen3_vl_moe",
        lambda ids: {
            "text_config": TEXT
            | EXPERTS
            | {
                "model_type": "qwen3_vl_moe_text",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
                | {"mrope_interleaved": True},
            },
            "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
            | {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64}
            | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        },
        {"processor_class": "Qwen3VLProcessor"},
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        | {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}},
        (),
        "<|vision_start|><|image_pad|><|vision_end|>",
        towers=("visual",),
        examples="Qwen3-VL-30B-A3B, -235B-A22B",
    ),
    "qwen3_omni_moe": RandomClass(
        "qwen3_omni_moe",
        lambda ids: {
            "thinker_config": {
                "model_type": "qwen3_omni_moe_thinker",
                "audio_config": {"num_mel_bins": 16, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2}
                | {"encoder_ffn_dim": 64, "output_dim": 64, "downsample_hidden_size": 4, "n_window_infer": 100},
                "text_config": TEXT
                | EXPERTS
                | {
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
                    | {"mrope_interleaved": True},
                },
                "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
                | {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64}
                | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
                "position_id_per_seconds": 13,
                **{
                    f"{name}_token_id": ids[f"<|{token}|>"]
                    for name, token in (
                        ("audio", "audio_pad"),
                        ("image", "image_pad"),
                        ("video", "video_pad"),
                        ("vision_start", "vision_start"),
                        ("audio_start", "audio_start"),
                    )
                },
            },
            "talker_config": {
                "thinker_hidden_size": 64,
                "spatial_merge_size": 2,
                "text_config": TEXT
                | EXPERTS
                | {
                    "shared_expert_intermediate_size": 96,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
                },
                "code_predictor_config": TEXT | {"num_code_groups": 2},
                "num_code_groups": 2,
            },
            "code2wav_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "num_key_value_heads": 2, "decoder_dim": 32, "codebook_size": 16}
            | {"upsample_rates": [2], "upsampling_ratios": [2], "num_quantizers": 2},
        },
        {"processor_class": "Qwen3OmniMoeProcessor"},
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        | {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}
        | {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "sampling_rate": 16_000}
        | {"hop_length": 160, "chunk_length": 30, "n_fft": 400, "return_attention_mask": True},
        ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_token": "<|image_pad|>",
            "audio_token": "<|audio_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        towers=("visual", "audio_tower"),
        modalities=frozenset({"text", "image", "audio"}),
        audio="<|audio_start|><|audio_pad|><|audio_end|>",
        examples="Qwen3-Omni-30B-A3B",
    ),
    "glm4v_moe": RandomClass(
        "glm4v_moe",
        lambda ids: {
            "text_config": TEXT
            | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1}
            | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
            | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False}
            | {
                "model_type": "glm4v_moe_text",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
                | {"mrope_section": [2, 3, 3]},
            },
            **{name: value for name, value in CLASSES["glm4v"].config(ids).items() if name != "text_config"},
        },
        CLASSES["glm4v"].processor,
        CLASSES["glm4v"].images,
        CLASSES["glm4v"].special,
        CLASSES["glm4v"].part,
        CLASSES["glm4v"].roles,
        towers=("visual",),
        torchvision=True,
        examples="GLM-4.5V, GLM-4.6V",
    ),
}


REFUSED = {
    "granite": RandomClass(
        "granite",
        lambda ids: TEXT | {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
        {},
        {},
        (),
        "",
        modalities=frozenset({"text"}),
    ),
    "voxtral": replace(
        CLASSES["qwen2_audio"],
        model_type="voxtral",
        config=lambda ids: {
            "text_config": TEXT | {"model_type": "llama"},
            "audio_config": {"num_mel_bins": 16, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1}
            | {"num_attention_heads": 2},
            "audio_token_id": ids["<|AUDIO|>"],
        },
        processor={"processor_class": "VoxtralProcessor"},
    ),
    "molmo2": RandomClass(
        "molmo2",
        lambda ids: {
            "text_config": TEXT | {"additional_vocab_size": 8},
            "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
            | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "image_size": [28, 28]},
            "adapter_config": {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
            | {"intermediate_size": 64, "text_hidden_size": 64, "vision_feature_layer": [-1]},
        },
        {},
        {},
        (),
        "",
        modalities=frozenset({"text"}),
    ),
}


def write_class(name: str, folder: Path, prompts: int = PROMPTS) -> Path:
    """A checkpoint of a class with random weights, its processor, and prompts.jsonl."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = (CLASSES | SPARSE | REFUSED)[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokens = TokenSet(
        special=(*QWEN.special, *made.special),
        stops=QWEN.stops,
        pad=QWEN.pad,
        template=CHATML.replace("IMAGE_PART", made.part).replace("AUDIO_PART", made.audio or made.part),
        roles=made.roles,
    )
    ids = write_tokenizer(folder, tokens, VOCABULARY)
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "tie_word_embeddings": False}
    settings = CONFIG_MAPPING[made.model_type].from_dict({"model_type": made.model_type} | made.config(ids) | ends)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, str(model_class(made.model_type)))(settings)
        for name, parameter in model.named_parameters():
            _draw(name, parameter.data)
        for limit in model.buffers():  # of linears that clip, infinite until a checkpoint says more
            limit.nan_to_num_(posinf=8.0, neginf=-8.0)
        silent = [ids[token] for token in tokens.special if token not in tokens.stops]
        getattr(model, "thinker", model).get_output_embeddings().weight.data[silent] = (
            0  # no response has a placeholder
        )
    model.to(torch.bfloat16).save_pretrained(folder)
    if made.others:
        weights = folder / "model.safetensors"
        others = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in made.others.items()}
        save_file(load_file(weights) | others, weights, metadata={"format": "pt"})
    if made.images:
        (folder / "preprocessor_config.json").write_text(json.dumps(made.processor | made.images | MEAN))
        (folder / "processor_config.json").write_text(json.dumps(made.processor))
    write_prompts(folder, made.modalities, prompts, 60, 0)
    return folder


def _draw(name: str, values: torch.Tensor) -> None:
    """Random values under which every part of the model matters, in place."""
    if values.ndim < 2:
        values += 0.1 * torch.randn_like(values)
    elif "embed_tokens" in name:
        values.normal_()
    else:
        gain = 2.5 if "lm_head" in name else 1.0
        values.normal_(std=gain / values[0].numel() ** 0.5)
