"""One tiny random model for every kind of attention and cache that transformers has. Nothing is downloaded."""

import dataclasses

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

VOCABULARY = 99
PROMPT = 21  # tokens; the windows and chunks below are shorter
WINDOW = 16

# What config classes call their dimensions: a class takes those that it has a field for.
_DIMENSIONS = {
    "use_cache": True,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # a tied model with large random weights repeats its last token
    "max_position_embeddings": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": 2.0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    # older names
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 256,
    "num_heads": 4,
    "num_layers": 2,
    "num_kv_heads": 2,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latents and indexers
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "index_topk": 64,
    "index_head_dim": 16,
    "index_n_heads": 2,
    # linear layers
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "state_size": 8,
}
_MLA = {"head_dim": 8, "num_key_value_heads": 4}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
_SHARED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_HYBRID = {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1}

#: Decoder-only text models: name → what differs from `_DIMENSIONS`. A name is a model type, or `type:variant`.
TEXT: dict[str, dict] = {
    "llama": {},
    "llama:mha": {"num_key_value_heads": 4},
    "llama:mqa": {"num_key_value_heads": 1},
    "gpt2": {},
    "gpt_neox": {},
    "gptj": {},
    "codegen": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gpt_bigcode": {},
    "opt": {},
    "biogpt": {},
    "xglm": {"attention_heads": 4, "num_layers": 2},
    "mistral": {},
    "mistral:full": {"sliding_window": None},
    "ministral": _MIXED,
    "mixtral": {},
    "qwen2": {},
    "qwen2:sliding": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "gemma": {},
    "gemma2": _MIXED,
    "gemma3_text": _MIXED,
    "gemma3n_text": {
        **_SHARED,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {**_SHARED, "num_kv_shared_layers": 2},
    "vaultgemma": _MIXED,
    "gpt_oss": _MIXED,
    "falcon": {"multi_query": False, "num_kv_heads": 4},
    "falcon:mqa": {},
    "falcon:new": {"new_decoder_architecture": True},
    "falcon:alibi": {"alibi": True, "multi_query": False, "num_kv_heads": 4},
    "bloom": {},
    "mpt": {},
    "stablelm": {},
    "cohere": {},
    "cohere2": _MIXED,
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED,
    "olmoe": {},
    "ergo": {},
    "minicpm5_moe": {"mlp_layer_types": ["dense", "sparse"]},
    "kolibri1_1": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "indexed_attention", "indexed_attention"],
        "index_layers": [1],
        "kv_source_layers": [0, 1, 1],
        "index_num_heads": 1,
        "index_topk": 16,
        "index_pool_size": 64,
        "index_compression": 4,
        "index_num_local_tokens": 4,
        "index_num_sink_tokens": 2,
        "mlp_only_intermediate_size": 48,
    },
    "param2moe": {},
    "granite": {},
    "granitemoe": {},
    "starcoder2": {},
    "nemotron": {},
    "persimmon": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "smollm3": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
    "exaone4": _MIXED,
    "helium": {"head_dim": 8, "num_key_value_heads": 4},
    "arcee": {},
    "apertus": {},
    "seed_oss": {},
    "afmoe": _MIXED,
    "doge": {},
    "diffllama": {},
    "moshi": {},
    "jetmoe": {"kv_channels": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "bert": {"is_decoder": True},
    "minimax_m2": {},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 24,
        "rotary_dim": 8,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "glm4_moe_lite": _MLA,
    "longcat_flash": {**_MLA, "expert_ffn_hidden_size": 24, "zero_expert_num": 2, "moe_topk": 2},
    "minicpm3": _MLA,
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "intermediate_size_mlp": 48,
        "moe_layers": [1],
        "num_experts_per_tok": 1,
    },
    "qwen3_next": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "olmo_hybrid": _LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": _HYBRID,
    "bamba": {"attn_layer_indices": [1], "mamba_n_groups": 1, "mamba_chunk_size": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 24},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "mlp"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "num_hidden_layers": 3},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "attention_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"], "router_hidden_size": 16},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "recurrent_gemma": {"attention_window_size": WINDOW, "num_hidden_layers": 3, "lru_width": 32},
    "deepseek_v32": _MLA,
    "glm_moe_dsa": _MLA,
    "axk2": _MLA,
    "hy_v4": {},
    "deepseek_v4": {},
    "inkling_text": {},
    "minimax": {},
    "rwkv": {"context_length": 64, "attention_hidden_size": 32},
    "xlnet": {"d_inner": 48},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
        "axial_pos_embds": False,
        "feed_forward_size": 48,
    },
    "xlstm": {"num_heads": 2},
}

#: Encoder-decoders with text in front: name → what differs from `_DIMENSIONS`.
SEQ2SEQ: dict[str, dict] = {
    "t5": {},
    "mt5": {"feed_forward_proj": "gated-gelu"},
    "umt5": {},
    "longt5": {"local_radius": 8},
    "switch_transformers": {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "bart": {},
    "mbart": {},
    "pegasus": {},
    "marian": {},
    "blenderbot": {},
    "m2m_100": {},
    "mvp": {},
    "prophetnet": {
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
    },
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "t5gemma": {},
    "t5gemma2": {},
}

_IMAGE_TOKEN = VOCABULARY - 1
_TEXT_PART = {name: _DIMENSIONS[name] for name in list(_DIMENSIONS)[:12]}
_VISION_PART = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 32,
}

#: Models that take an image or speech: name → the whole config.
MULTIMODAL: dict[str, dict] = {
    "whisper": {
        "num_mel_bins": 8,
        "max_source_positions": 12,
        "max_target_positions": 64,
        "begin_suppress_tokens": None,
        "decoder_start_token_id": 1,
    },
    "moonshine": {
        "decoder_num_hidden_layers": 2,
        "encoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
    },
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT_PART},
        "vision_config": {"model_type": "clip_vision_model", **_VISION_PART},
        "image_token_index": _IMAGE_TOKEN,
        "image_seq_length": 4,
    },
    "mllama": {
        "text_config": {
            "model_type": "mllama_text_model",
            **_TEXT_PART,
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "vision_config": {
            "model_type": "mllama_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "vision_output_dim": 64,
            "max_num_tiles": 1,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1]],
        },
        "image_token_index": _IMAGE_TOKEN,
    },
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            **_TEXT_PART,
            **_MIXED,
            "sliding_window": WINDOW,
        },
        "vision_config": {"model_type": "siglip_vision_model", **_VISION_PART, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": _IMAGE_TOKEN,
        "boi_token_index": _IMAGE_TOKEN - 1,
        "eoi_token_index": _IMAGE_TOKEN - 2,
    },
    "paligemma": {
        "text_config": {"model_type": "gemma", **_TEXT_PART},
        "vision_config": {"model_type": "siglip_vision_model", **_VISION_PART, "vision_use_head": False},
        "image_token_index": _IMAGE_TOKEN,
        "projection_dim": 32,
    },
    "qwen2_vl": {
        "text_config": {
            "model_type": "qwen2_vl_text",
            **_TEXT_PART,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        "vision_config": {
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": 4,
        },
        "image_token_id": _IMAGE_TOKEN,
        "video_token_id": _IMAGE_TOKEN - 1,
        "vision_start_token_id": _IMAGE_TOKEN - 2,
        "vision_end_token_id": _IMAGE_TOKEN - 3,
    },
    "llava_onevision1_5": {
        "text_config": {"model_type": "qwen3", **_TEXT_PART, "head_dim": 16},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 4,
            "out_hidden_size": 32,
        },
        "image_token_id": _IMAGE_TOKEN,
        "video_token_id": _IMAGE_TOKEN - 1,
        "vision_start_token_id": _IMAGE_TOKEN - 2,
        "vision_end_token_id": _IMAGE_TOKEN - 3,
    },
    "ovis2_5": {
        "text_config": {"model_type": "qwen3", **_TEXT_PART, "head_dim": 16},
        "vision_config": {
            **{name: size for name, size in _VISION_PART.items() if name != "projection_dim"},
            "patch_size": 4,
            "vocab_size": 24,
        },
        "image_token_id": _IMAGE_TOKEN,
        "video_token_id": _IMAGE_TOKEN - 1,
        "image_start_token_id": _IMAGE_TOKEN - 2,
        "image_end_token_id": _IMAGE_TOKEN - 3,
        "video_start_token_id": _IMAGE_TOKEN - 4,
        "video_end_token_id": _IMAGE_TOKEN - 5,
    },
}
#: With weights of seed 0, two beams of paligemma are as likely within 1e-6: rounding decides which one stays.
_SEEDS = {"paligemma": 2}


def names() -> list[str]:
    return [*TEXT, *SEQ2SEQ, *MULTIMODAL]


def model_type(name: str) -> str:
    return name.partition(":")[0]


def build(name: str) -> transformers.PreTrainedModel:
    """The model, in float32 and evaluation mode, with weights large enough that its tokens vary.

    Skips the test that asks, where this version of transformers does not have the model type.
    """
    if model_type(name) not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type(name)}")
    auto = transformers.AutoModelForCausalLM
    if name in SEQ2SEQ:
        auto = transformers.AutoModelForSeq2SeqLM
    elif name in ("whisper", "moonshine"):
        auto = transformers.AutoModelForSpeechSeq2Seq
    elif name in MULTIMODAL:
        auto = transformers.AutoModelForMultimodalLM
    config = _config(name)
    torch.manual_seed(_SEEDS.get(name, 0))
    model = auto.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter.is_floating_point():
            torch.nn.init.normal_(parameter.data, std=0.15)
    model.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=None, forced_eos_token_id=None)
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = 1
    return model


def _config(name: str) -> transformers.PreTrainedConfig:
    kind = CONFIG_MAPPING[model_type(name)]
    fields = {field.name for field in dataclasses.fields(kind)}
    own = {**TEXT, **SEQ2SEQ, **MULTIMODAL}[name]
    if name in ("t5gemma", "t5gemma2"):
        part = {**_TEXT_PART, **_MIXED, "head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}
        own = {"encoder": part, "decoder": part}
    if name == "t5gemma2":
        vision = {"model_type": "siglip_vision_model", **_VISION_PART, "vision_use_head": False}
        image = {"image_token_index": _IMAGE_TOKEN, "mm_tokens_per_image": 4}
        own = {"encoder": {"text_config": part, "vision_config": vision, **image}, "decoder": part, **image}
    given = {key: value for key, value in _DIMENSIONS.items() if key in fields}
    return kind(**{**given, **({"decoder_start_token_id": 1} if "decoder_start_token_id" in fields else {}), **own})


def inputs(name: str, model: transformers.PreTrainedModel, lengths: tuple[int, ...] = (PROMPT,)) -> dict:
    """Arguments of `generate`: a left-padded batch of prompts with so many tokens each."""
    generator = torch.Generator().manual_seed(1)
    rows, longest = len(lengths), max(lengths)
    ids = torch.randint(3, VOCABULARY - 4, (rows, longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    ids, batch = ids.masked_fill(~mask, 0), {"attention_mask": mask.long()}
    if name == "whisper":
        features = torch.randn((rows, 8, 24), generator=generator)
        return {"input_features": features, "decoder_input_ids": ids[:, -9:]}
    if name == "moonshine":
        return {"input_values": torch.randn((rows, 2000), generator=generator), "decoder_input_ids": ids[:, -9:]}
    if name in SEQ2SEQ:
        return {**batch, "input_ids": ids, "decoder_input_ids": ids[:, -9:]}
    if name in MULTIMODAL:
        tokens = 1 if name == "mllama" else 4
        ids[:, -6 : -6 + tokens] = _IMAGE_TOKEN
        pixels = torch.randn((rows, 3, 16, 16), generator=generator)
        if name == "mllama":
            batch["cross_attention_mask"] = torch.ones((rows, longest, 1, 1), dtype=torch.long)
            batch["aspect_ratio_ids"] = torch.ones((rows, 1), dtype=torch.long)
            batch["aspect_ratio_mask"] = torch.ones((rows, 1, 1), dtype=torch.long)
            pixels = pixels[:, None, None]
        if name in ("qwen2_vl", "llava_onevision1_5", "ovis2_5"):
            pixels = torch.randn((rows * 16, 3 * (2 if name == "qwen2_vl" else 1) * 4 * 4), generator=generator)
            batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * rows)
            ids[:, -7] = _IMAGE_TOKEN - 2  # the vision start token, by which beam search counts images
            ids[:, -2] = _IMAGE_TOKEN - 3 if name == "ovis2_5" else ids[:, -2]  # and where the image ends
            batch["mm_token_type_ids"] = (ids == _IMAGE_TOKEN).long()
        if name in ("gemma3", "paligemma"):
            batch["token_type_ids"] = (ids == _IMAGE_TOKEN).long()
        batch["pixel_values"] = pixels
    return {**batch, "input_ids": ids}
