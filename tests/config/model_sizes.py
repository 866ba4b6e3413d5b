"""config.json of well-known models, as far as the sizes of a carve depend on it, and these sizes."""

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
    "Qwen/Qwen1.5-4B": _qwen2(2560, 6912, 40, 20, 20, tied=False),
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, tied=True),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "Qwen/Qwen3-4B-Instruct-2507": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32, 8, tied=False),
    "Qwen/Qwen3.5-4B": _qwen3_5(2560, 9216, 32, 16, 4, value_heads=32, vision=(24, 1024, 4096), tied=True),
    "Qwen/Qwen3.5-9B": _qwen3_5(4096, 12_288, 32, 16, 4, value_heads=32, vision=(27, 1152, 4304), tied=False),
    "Qwen/Qwen3.8-27B": _qwen3_5(5120, 17_408, 64, 24, 4, value_heads=48, vision=(27, 1152, 4304), tied=False),
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, tied=True),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14_336, 32, 32, 8),
    "ibm-granite/granite-4.1-8b": {
        "model_type": "granite", "architectures": ["GraniteForCausalLM"],
        **_attention(4096, 12_800, 40, 32, 8, 100_352), "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
        "logits_scaling": 16.0, "residual_multiplier": 0.22, "rope_theta": 10_000_000, "tie_word_embeddings": True,
        "max_position_embeddings": 131_072, "dtype": "bfloat16",
    },
    "mistralai/Ministral-3-8B-Instruct-2512": {
        "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16",
        "image_token_index": 10, "spatial_merge_size": 2, "tie_word_embeddings": False,
        "text_config": {"model_type": "ministral3", **_attention(4096, 14_336, 34, 32, 8, 131_072, head_dim=128)},
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64,
                          "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "image_size": 1540},
    },
    "google/gemma-4-31B-it": {
        "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "dtype": "bfloat16",
        "audio_config": None, "tie_word_embeddings": True,
        "text_config": {"model_type": "gemma4_text", **_attention(5376, 21_504, 60, 32, 16, 262_144, head_dim=256),
                        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 4,
                        "global_head_dim": 512, "sliding_window": 1024, "final_logit_softcapping": 30.0,
                        "use_bidirectional_attention": "vision"},
        "vision_config": {"model_type": "gemma4_vision"},
    },
    "LiquidAI/LFM2.5-1.2B-Instruct": {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 12_288, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "dtype": "bfloat16",
        **_attention(2048, 12_288, 16, 32, 8, 65_536),
    },
}  # fmt: skip

# Layers, width; experts, neurons of each, experts per token, neurons always on: with the default settings.
SHAPES = {
    "Qwen/Qwen1.5-4B": (40, 6912, 82, 64, 28, 1664),
    "Qwen/Qwen2.5-0.5B": (24, 4864, 58, 64, 20, 1152),
    "Qwen/Qwen3-0.6B": (28, 3072, 36, 64, 12, 768),
    "Qwen/Qwen3-1.7B": (28, 6144, 73, 64, 25, 1472),
    "Qwen/Qwen3-4B-Instruct-2507": (36, 9728, 116, 64, 40, 2304),
    "Qwen/Qwen3-8B": (36, 12288, 146, 64, 50, 2944),
    "Qwen/Qwen3.5-4B": (32, 9216, 109, 64, 37, 2240),
    "Qwen/Qwen3.5-9B": (32, 12288, 146, 64, 50, 2944),
    "Qwen/Qwen3.8-27B": (64, 17408, 207, 64, 71, 4160),
    "meta-llama/Llama-3.2-1B": (16, 8192, 97, 64, 33, 1984),
    "meta-llama/Llama-3.1-8B": (32, 14336, 170, 64, 58, 3456),
    "ibm-granite/granite-4.1-8b": (40, 12800, 152, 64, 52, 3072),
    "mistralai/Ministral-3-8B-Instruct-2512": (34, 14336, 170, 64, 58, 3456),
    "google/gemma-4-31B-it": (60, 21504, 255, 64, 87, 5184),
    "LiquidAI/LFM2.5-1.2B-Instruct": (16, 8192, 97, 64, 33, 1984),
}
