"""config.json of the presets' models, as far as the sizes of a carve depend on it."""

_ROPE_5 = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
           "rope_theta": 10_000_000, "rope_type": "default"}  # fmt: skip


def _attention(hidden, width, layers, heads, key_heads, vocab, **more):
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers, "vocab_size": vocab}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": key_heads, **more}


def _qwen3(*sizes, tied):
    attention = _attention(*sizes, 151_936, head_dim=128, rms_norm_eps=1e-6, rope_theta=1_000_000)
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **attention, "tie_word_embeddings": tied,
            "torch_dtype": "bfloat16"}  # fmt: skip


def _qwen3_5(*sizes, value_heads, vision, tied):
    text = _attention(*sizes, 248_320, head_dim=256, rms_norm_eps=1e-6, rope_parameters=_ROPE_5, dtype="bfloat16")
    linear = {"full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": value_heads}
    depth, hidden, width = vision
    return {
        "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": tied,
        "text_config": {"model_type": "qwen3_5_text", **text, **linear, "tie_word_embeddings": tied},
        "vision_config": {"model_type": "qwen3_5", "depth": depth, "hidden_size": hidden, "intermediate_size": width,
                          "out_hidden_size": sizes[0]},
    }  # fmt: skip


def _llama(*sizes, tied=False):
    scaling = {"factor": 32.0 if tied else 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_attention(*sizes, 128_256),
            "rope_theta": 500_000.0, "rope_scaling": scaling, "max_position_embeddings": 131_072,
            "tie_word_embeddings": tied, "torch_dtype": "bfloat16"}  # fmt: skip


def _qwen2(*sizes, tied):
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **_attention(*sizes, 151_936),
            "tie_word_embeddings": tied, "rope_theta": 1_000_000.0, "torch_dtype": "bfloat16"}  # fmt: skip


CONFIGS = {
    "qwen1_5_4b": _qwen2(2560, 6912, 40, 20, 20, tied=False),
    "qwen2_5_0_5b": _qwen2(896, 4864, 24, 14, 2, tied=True),
    "qwen2_5_coder_0_5b": _qwen2(896, 4864, 24, 14, 2, tied=True),
    "qwen3_0_6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3_1_7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3_4b_2507": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3_8b": _qwen3(4096, 12_288, 36, 32, 8, tied=False),
    "qwen3_5_4b": _qwen3_5(2560, 9216, 32, 16, 4, value_heads=32, vision=(24, 1024, 4096), tied=True),
    "qwen3_5_9b": _qwen3_5(4096, 12_288, 32, 16, 4, value_heads=32, vision=(27, 1152, 4304), tied=False),
    "qwen3_8_27b": _qwen3_5(5120, 17_408, 64, 24, 4, value_heads=48, vision=(27, 1152, 4304), tied=False),
    "llama3_2_1b": _llama(2048, 8192, 16, 32, 8, tied=True),
    "llama3_1_8b": _llama(4096, 14_336, 32, 32, 8),
    "granite4_1_8b": {
        "model_type": "granite", "architectures": ["GraniteForCausalLM"],
        **_attention(4096, 12_800, 40, 32, 8, 100_352), "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
        "logits_scaling": 16.0, "residual_multiplier": 0.22, "rope_theta": 10_000_000, "tie_word_embeddings": True,
        "max_position_embeddings": 131_072, "dtype": "bfloat16",
    },
    "ministral3_8b": {
        "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16",
        "image_token_index": 10, "spatial_merge_size": 2, "tie_word_embeddings": False,
        "text_config": {"model_type": "ministral3", **_attention(4096, 14_336, 34, 32, 8, 131_072, head_dim=128)},
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64,
                          "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "image_size": 1540},
    },
    "gemma4_31b": {
        "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "dtype": "bfloat16",
        "audio_config": None, "tie_word_embeddings": True,
        "text_config": {"model_type": "gemma4_text", **_attention(5376, 21_504, 60, 32, 16, 262_144, head_dim=256),
                        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 4,
                        "global_head_dim": 512, "sliding_window": 1024, "final_logit_softcapping": 30.0,
                        "use_bidirectional_attention": "vision"},
        "vision_config": {"model_type": "gemma4_vision"},
    },
    "lfm2_5_1_2b": {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 12_288, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "dtype": "bfloat16",
        **_attention(2048, 12_288, 16, 32, 8, 65_536),
    },
}  # fmt: skip
