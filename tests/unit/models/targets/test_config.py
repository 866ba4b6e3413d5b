from dataclasses import replace

import pytest
from pico import FAMILIES, TWO_WIDTHS, decoder_of

from instruments.errors import ConfigError
from models.config import GLOBAL_POOL, MoEShape
from models.targets.base import gate_kind, gate_scale_of
from models.targets.config import MOE_TARGETS, check_target, select_target, targets_of

SIZES = {"hidden_size": 24, "num_attention_heads": 4}
SHAPE = MoEShape(experts=6, n=16, top_k=2, always_on=0)
HUNYUAN = {"model_type": "hunyuan_v1_dense", "head_dim": 6}


@pytest.mark.parametrize(
    ("source", "always_on", "target"),
    [
        *(("qwen3", 0, "qwen3_moe"), ("qwen3", 5, "glm4_moe"), ("qwen2", 0, "qwen2_moe"), ("qwen2", 5, "qwen2_moe")),
        *(("llama", 0, "mixtral"), ("llama", 5, "glm4_moe"), ("mistral", 0, "mixtral")),
        ("mistral", 5, "tiny_onn"),  # its window is 4,096 tokens if config.json names none
        *(("phi3", 0, "mixtral"), ("phi3", 5, "glm4_moe"), ("olmo2", 0, "flex_olmo"), ("olmo2", 5, "tiny_onn")),
        *(("granite", 0, "granitemoe"), ("granite", 5, "granitemoeshared"), ("gemma2", 0, "tiny_onn")),
        *(("gemma3_text", 5, "tiny_onn"), ("smollm3", 0, "granitemoe_swa"), ("smollm3", 5, "granitemoe_swa")),
        ({"model_type": "mistral", "sliding_window": None}, 5, "glm4_moe"),
        ({"model_type": "phi3", "sliding_window": 2047}, 0, "mixtral"),
        ({"model_type": "phi3", "sliding_window": 2047}, 5, "tiny_onn"),
        ({"model_type": "phi3", "sliding_window": 4096, "max_position_embeddings": 4096}, 5, "glm4_moe"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, 0, "glm4_moe"),
        *(
            ("glm", 5, "glm4_moe"),
            ("seed_oss", 0, "glm4_moe"),
            ("ernie4_5", 5, "ernie4_5_moe"),
            ("helium", 0, "ernie4_5_moe"),
        ),
        *(("cohere2", 0, "cohere2_moe"), ("cohere2", 5, "cohere2_moe")),
        *((HUNYUAN, 16, "hunyuan_v1_moe"), (HUNYUAN, 17, "tiny_onn")),
        ({"model_type": "helium", "attention_bias": True}, 0, "tiny_onn"),
        ({"model_type": "llama", "attention_bias": True}, 0, "tiny_onn"),
        ({"model_type": "qwen3", "attention_bias": True}, 5, "tiny_onn"),
        ({"model_type": "qwen2", "head_dim": 8}, 5, "glm4_moe"),
    ],
)
def test_auto_takes_the_first_target_that_can_hold_the_attention(source, always_on, target):
    config = SIZES | ({"model_type": source} if isinstance(source, str) else source)
    shape = replace(SHAPE, always_on=always_on)
    assert select_target(decoder_of(config), "auto", shape).model_type == target
    assert select_target(decoder_of(config), target, shape).model_type == target


@pytest.mark.parametrize("source", FAMILIES)
def test_no_two_targets_of_a_source_have_one_rank(source):
    ranks = [target.rank(decoder_of(source)) for target in targets_of(decoder_of(source), SHAPE)]
    assert ranks == sorted(set(ranks))


@pytest.mark.parametrize(
    ("source", "requested", "always_on", "what", "others"),
    [
        ("llama", "mixtrel", 0, "unknown target 'mixtrel'", "mixtral, glm4_moe, qwen2_moe, tiny_onn"),
        ("qwen2", "mixtral", 0, "mixtral cannot hold the attention of qwen2", "qwen2_moe, glm4_moe, tiny_onn"),
        ("qwen3", "qwen3_moe", 64, "qwen3_moe has no always-on neurons, 64 are wanted", "glm4_moe, tiny_onn"),
        ("gemma2", "mixtral", 0, "mixtral cannot hold the attention of gemma2", "tiny_onn"),
        (
            *(TWO_WIDTHS | {"model_type": "gemma4_text"}, "gemma4_text", 5),
            *("gemma4_text cannot hold the layers of several widths of gemma4_text", "tiny_onn"),
        ),
        ("granite", "granitemoe", 3, "granitemoe has no always-on neurons, 3 are wanted", "granitemoeshared, tiny_onn"),
        (
            *(HUNYUAN, "hunyuan_v1_moe", 17),
            *("hunyuan_v1_moe has at most 16 always-on neurons, 17 are wanted", "tiny_onn"),
        ),
    ],
)
def test_targets_that_cannot_hold_it(source, requested, always_on, what, others):
    with pytest.raises(ConfigError) as caught:
        select_target(decoder_of(source), requested, replace(SHAPE, always_on=always_on))
    error = caught.value
    assert (error.what, error.where) == (what, "assemble.target")
    assert error.do == f"assemble.target=auto, or one of {others}"


WINDOWS = {"use_sliding_window": True, "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PARTIAL = ROPE | {"partial_rotary_factor": 0.75}
MIXED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("config", "target", "where", "other"),
    [
        ({"model_type": "llama"}, "mixtral", None, None),
        ({"model_type": "qwen3", "attention_bias": True}, "qwen3_moe", None, None),
        ({"model_type": "qwen2"}, "glm4_moe", None, None),
        ({"model_type": "mistral"}, "mixtral", None, None),
        ({"model_type": "llama", "attention_bias": True}, "mixtral", "attention_bias", "tiny_onn"),
        ({"model_type": "mistral"}, "glm4_moe", "sliding_window", "mixtral"),
        ({"model_type": "llama", "head_dim": 8}, "qwen2_moe", "head_dim", "mixtral"),
        ({"model_type": "granite", "head_dim": 8}, "granitemoe", "head_dim", "tiny_onn"),
        (WINDOWS | {"model_type": "qwen3", "layer_types": MIXED}, "qwen3_moe", "layer_types", "tiny_onn"),
        (WINDOWS | {"model_type": "qwen2", "max_window_layers": 1}, "qwen2_moe", "layer_types", "tiny_onn"),
        (WINDOWS | {"model_type": "qwen2", "max_window_layers": 0, "sliding_window": None}, "qwen2_moe", None, None),
        (
            {"model_type": "mistral", "layer_types": MIXED, "rope_parameters": ROPE, "head_dim": 6},
            "mixtral",
            "layer_types",
            "granitemoe_swa",
        ),
        ({"model_type": "phi3", "rope_parameters": PARTIAL}, "mixtral", "partial_rotary_factor", "glm4_moe"),
        ({"model_type": "phi3", "rope_scaling": PARTIAL}, "mixtral", "partial_rotary_factor", "glm4_moe"),
    ],
)
def test_attention_that_a_target_cannot_hold(config, target, where, other):
    found = [(error.where, error.do) for error in check_target(decoder_of(SIZES | config), MOE_TARGETS[target], SHAPE)]
    assert found == ([(f"{where} in config.json", f"assemble.target={other}")] if where else [])


def test_shapes_that_a_target_cannot_hold():
    llama, one = SIZES | {"model_type": "llama"}, MoEShape(experts=1, n=16, top_k=1, always_on=0)
    (error,) = check_target(decoder_of(llama), MOE_TARGETS["glm4_moe"], one)
    assert (error.where, error.do) == ("experts=1", "assemble.target=mixtral")
    assert check_target(decoder_of(llama), MOE_TARGETS["mixtral"], one) == []
    windowed = SIZES | {"model_type": "mistral"}
    (error,) = check_target(decoder_of(windowed), MOE_TARGETS["glm4_moe"], replace(SHAPE, always_on=8))
    assert error.do == "assemble.target=tiny_onn"
    (error,) = check_target(decoder_of("apertus"), MOE_TARGETS["tiny_onn"], replace(SHAPE, topology="global_pool"))
    assert (error.where, error.do) == ("topology=global_pool", "topology=per_layer")  # its activations learn
    assert len(check_target(decoder_of(windowed, head_dim=8), MOE_TARGETS["qwen2_moe"], SHAPE)) == 2


@pytest.mark.parametrize(
    ("source", "target", "held"),
    [
        ("llama", "mixtral", [()]),
        ("llama", "glm4_moe", [(), (0,), (0, 1)]),
        ("ernie4_5", "ernie4_5_moe", [(), (0,), (0, 1), (3,), (0, 3)]),
        ("qwen3", "qwen3_moe", [(), (0,), (0, 1), (3,), (0, 3), (1,)]),
    ],
)
def test_which_layers_may_stay_dense(source, target, held):
    dense = decoder_of(source, **SIZES, num_hidden_layers=4)
    for kept in [(), (0,), (0, 1), (3,), (0, 3), (1,)]:
        errors = check_target(dense, MOE_TARGETS[target], replace(SHAPE, dense_layers=kept))
        assert [error.where for error in errors] == ([] if kept in held else [f"dense_layers={[*kept]}"])


@pytest.mark.parametrize("source", ["qwen3", "olmo2", "smollm3"])
def test_only_the_own_class_says_a_pool(source):
    pool = replace(SHAPE, topology=GLOBAL_POOL)
    assert select_target(decoder_of(source), "auto", pool).model_type == "tiny_onn"
    assert [target.model_type for target in MOE_TARGETS.values() if target.packed_pool] == ["tiny_onn"]


OF_CHOSEN = (
    "qwen3_moe",
    "mixtral",
    "granitemoe",
    "granitemoeshared",
    "granitemoe_swa",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
)


@pytest.mark.parametrize(
    ("target", "kind", "down_scale", "routed_scaling_factor"),
    [
        *((target, "softmax_of_all", 100.0, None) for target in ("qwen2_moe", "flex_olmo")),
        *((target, "sigmoid", 1.0, 2.0) for target in ("tiny_onn", "glm4_moe")),
        ("cohere2_moe", "sigmoid", 4.0, None),
        *((target, "softmax_of_chosen", 1.0, None) for target in OF_CHOSEN),
    ],
)
def test_the_gate_of_one_expert_depends_on_its_logit_where_it_can(target, kind, down_scale, routed_scaling_factor):
    shape = MoEShape(experts=100, n=16, top_k=1, always_on=8)
    gate_scale = gate_scale_of(MOE_TARGETS[target], shape)
    assert (gate_scale.down_scale, gate_scale.routed_scaling_factor) == (down_scale, routed_scaling_factor)
    assert (gate_scale.norm_topk_prob is False) is (kind in {"softmax_of_all", "sigmoid"})
    assert gate_kind(MOE_TARGETS[target], shape) == kind
