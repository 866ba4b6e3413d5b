"""Configuration keys for transformers 4 and 5; tests/numerics compares the logits."""

import json

import pytest
from pico import bare_decoder
from transformers import AutoConfig

from models.config import MoEShape
from models.targets.base import expert_width, shared_width
from models.targets.config import MOE_TARGETS
from models.targets.config_json import emit_config, source_dtype

SHAPE = MoEShape(experts=6, n=16, top_k=2, always_on=20)
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 116,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 2e-5,
    "eos_token_id": [3, 4],
    "tie_word_embeddings": True,
}


def emitted(source, target, **more):
    return written({"model_type": source, **SIZES, **more}, target, dtype="bfloat16")


def written(dense, target, shape=SHAPE, dtype="float32", pad_to=None):
    decoder = bare_decoder({"pad_token_id": 0, **dense})
    return emit_config(decoder, MOE_TARGETS[target], shape, dtype, pad_to, tied=decoder.tied)


def read_by_transformers(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


OLD_STYLE = {"rope_theta": 7e3, "rope_scaling": {"type": "linear", "factor": 2.0}}
NEW_STYLE = {"rope_parameters": {"rope_theta": 7e3, "rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize("source", [OLD_STYLE, NEW_STYLE], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize("target", ["mixtral", "glm4_moe"])
def test_position_encoding_in_both_spellings(tmp_path, source, target):
    config = emitted("llama", target, **source)
    assert config["rope_theta"] == 7e3
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    whole_heads = {"partial_rotary_factor": 1.0} if target == "glm4_moe" else {}
    expected = {"rope_theta": 7e3, "rope_type": "linear", "factor": 2.0} | whole_heads
    assert config["rope_parameters"] == expected
    assert read_by_transformers(tmp_path, config).rope_parameters == expected


def test_a_scaling_without_a_base_has_that_of_the_dense_class():
    scaling = {"rope_type": "linear", "factor": 2.0}
    assert emitted("ernie4_5", "ernie4_5_moe", rope_scaling=scaling)["rope_theta"] == 5e5


@pytest.mark.parametrize("source", [OLD_STYLE, NEW_STYLE], ids=["transformers 4", "transformers 5"])
def test_a_target_that_knows_one_spelling_gets_it(tmp_path, source):
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    config = read_by_transformers(tmp_path, emitted("cohere2", "cohere2_moe", **source, **kinds))
    assert config.rope_parameters.items() >= NEW_STYLE["rope_parameters"].items()


def test_keys_that_a_source_leaves_out_mean_its_own_defaults():
    left_out = {"rms_norm_eps", "num_key_value_heads", "hidden_act", "eos_token_id"}
    bare = {key: SIZES[key] for key in SIZES.keys() - left_out}
    defaults = {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": 6, "hidden_act": "silu"}
    config = written({"model_type": "llama", **bare}, "mixtral")
    assert config.items() >= (defaults | {"eos_token_id": 2, "rope_theta": 1e4}).items()
    qwen3 = written({"model_type": "qwen3", **bare}, "qwen3_moe")
    assert qwen3.items() >= {"head_dim": 128, "eos_token_id": None}.items()


@pytest.mark.parametrize(
    ("target", "source", "always_on", "pad_to", "expected"),
    [
        ("qwen2_moe", "qwen2", 20, None, {"shared_expert_intermediate_size": 24}),
        ("glm4_moe", "qwen2", 20, None, {"n_shared_experts": 2}),  # of 16 neurons
        ("qwen2_moe", "qwen2", 0, None, {"shared_expert_intermediate_size": 8}),
        ("glm4_moe", "qwen2", 0, None, {"n_shared_experts": 1}),
        ("mixtral", "llama", 0, 128, {"intermediate_size": 128}),
        ("qwen2_moe", "qwen2", 130, 128, {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256}),
        ("glm4_moe", "qwen2", 130, 128, {"moe_intermediate_size": 128, "n_shared_experts": 2}),
        ("granitemoeshared", "granite", 130, 128, {"intermediate_size": 128, "shared_intermediate_size": 256}),
        ("flex_olmo", "olmo2", 0, 128, {"intermediate_size": 128}),
        ("tiny_onn", "olmo2", 130, 128, {"moe_intermediate_size": 128, "shared_intermediate_size": 256}),
    ],
)
def test_widths_of_experts_and_always_on_neurons(target, source, always_on, pad_to, expected):
    dense, shape = {"model_type": source, **SIZES}, MoEShape(6, 16, 2, always_on)
    assert written(dense, target, shape, pad_to=pad_to).items() >= expected.items()


_FACTORS = {"short_factor": [1.0, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0]}


@pytest.mark.parametrize("outside", [{}, {"original_max_position_embeddings": 64}])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "factor": 3.0, **_FACTORS},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_the_length_of_any_scaling_is_the_one_that_transformers_reads(tmp_path, scaling, outside):
    if scaling["rope_type"] == "llama3" and not outside:
        scaling = scaling | {"original_max_position_embeddings": 128}
    dense = {**SIZES, "model_type": "llama", "rope_theta": 7e3, "rope_scaling": scaling, **outside}
    wanted, found = (read_by_transformers(tmp_path, one) for one in (dense, emitted("llama", "mixtral", **dense)))
    for config in (wanted, found):
        config.standardize_rope_params()  # as the model does before it reads them
    assert found.rope_parameters == wanted.rope_parameters


@pytest.mark.parametrize(("source", "share"), [("llama", 1.0), ("qwen3", 1.0), ("phi3", 0.5)])
def test_only_families_that_read_it_rotate_a_part_of_each_head(source, share):
    config = emitted(source, "glm4_moe", partial_rotary_factor=0.5)
    assert config["partial_rotary_factor"] == config["rope_parameters"]["partial_rotary_factor"] == share


def test_keys_that_are_kept():
    given = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "attention_multiplier": 0.1}
    assert emitted("granite", "granitemoe", **given).items() >= (given | {"residual_multiplier": 1.0}).items()
    assert emitted("llama", "mixtral", transformers_version="4.41.0")["transformers_version"] == "4.41.0"
    assert "transformers_version" not in emitted("llama", "mixtral")
    formats = ({"dtype": "bfloat16"}, {"torch_dtype": "float16"}, {"torch_dtype": "torch.float32"}, {})
    assert [source_dtype(source) for source in formats] == ["bfloat16", "float16", "float32", None]


@pytest.mark.parametrize(
    ("n", "pad_to", "width"),
    [(304, None, 320), (64, None, 64), (48, None, 48), (100, None, 104), (7, None, 8), (304, 8, 304), (304, 256, 512)],
)
def test_experts_are_filled_up_to_whole_blocks_where_that_is_cheap(n, pad_to, width):
    shape = MoEShape(16, n, 4, 4 * n)
    assert expert_width(shape, pad_to) == width
    assert shared_width(MOE_TARGETS["glm4_moe"], shape, pad_to) == -(-4 * n // width) * width
