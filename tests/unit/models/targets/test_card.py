import pytest
import yaml
from pico import decoder_of

from models.card import render_card, suitable_runtimes
from models.config import GLOBAL_POOL, MoEShape
from models.targets.config import MOE_TARGETS

LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
MINISTRAL = {
    "rope_type": "yarn", "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 2048,
}  # fmt: skip
ERNIE = {
    "num_hidden_layers": 4, "moe_layer_end_index": 3, "moe_num_shared_experts": 2, "moe_intermediate_size": 8,
    "num_key_value_heads": 2, "intermediate_size": 32,
}  # fmt: skip
HEADS = {"num_attention_heads": 4, "hidden_size": 32}
PLAIN = {"model_type": "llama"}
SHAPE = MoEShape(64, 256, 8, 0)


def runtimes(target, shape=SHAPE, **config):
    """The advice for a carve with these keys in its configuration, which the dense model has, too."""
    keys = {**PLAIN, "topology": shape.topology, "mlp_only_layers": [*shape.dense_layers], **config}
    return suitable_runtimes(MOE_TARGETS[target], shape, None, PLAIN | config, keys)


def sizes(width, layers):
    return decoder_of("llama", intermediate_size=width, num_hidden_layers=layers)


def test_the_card_says_what_was_carved_from_what():
    shape = MoEShape(experts=16, n=64, top_k=4, always_on=256)
    rows = {"neurons left out": "12 in all layers together", "router": "ridge"}
    card = render_card("org/dense", MOE_TARGETS["glm4_moe"], shape, rows, sizes(1024, 4))
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert 'base_model: "org/dense"\n' in card
    for row in (
        "| architecture | `Glm4MoeForCausalLM` |",
        "| experts | 16 of 64 neurons in each of 4 layers, 4 per token |",
        "| active FFN width | 512 of the dense model's 1024 (50%) |",
        "| neurons left out | 12 in all layers together |",
        "| router | ridge |",
        "| training | none: stage=train has not run |",
    ):
        assert row in card


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("org/dense-0.5B", "org/dense-0.5B"),
        ("/home/me/secret/qwen", "qwen"),
        ("/models/x\nlicense: mit\n---", "x_license_ mit_---"),
        ('/models/a": [b]#`c`', "a__ _b___c_"),
        ("../qwen", "qwen"),
        ("/", "dense"),
    ],
)
def test_the_source_of_a_card_is_a_name_and_nothing_else(source, name):
    shape = MoEShape(experts=16, n=64, top_k=4, always_on=256)
    card = render_card(source, MOE_TARGETS["glm4_moe"], shape, {}, sizes(1024, 4))
    front = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["moe", "tiny-onn"],
        "base_model": name,
    }
    assert card.count("license") == name.count("license") * 3
    assert "/home/me" not in card


@pytest.mark.parametrize(
    ("target", "shape", "expected"),
    [
        ("qwen3_moe", SHAPE, "vLLM, SGLang: expert count and width suit the fused kernels."),
        ("qwen3_moe", MoEShape(100, 256, 8, 0), "E = 100, N = 256 take a slower path; the fast one needs E a power of"),
        ("qwen3_moe", MoEShape(64, 64, 8, 0), "converts it; N = 64 suits Q8_0 and Q4_0; K-quants want"),
        ("granitemoeshared", MoEShape(64, 256, 8, 12), "12 always-on neurons are padded with zero neurons to 16."),
        ("granitemoeshared", MoEShape(64, 256, 8, 12), "\nSGLang: does not know this architecture."),
        (
            "qwen3_moe",
            SHAPE,
            "\nllama.cpp, with less GPU memory than weights: `-ot exps=CPU` keeps the experts in RAM.",
        ),
        ("flex_olmo", SHAPE, "\nSGLang, llama.cpp: do not know this architecture."),
        ("tiny_onn", SHAPE, "needs `trust_remote_code=True`"),
        ("qwen3_5_moe_text", SHAPE, "transformers 5: loads without remote code; train with"),
        ("tiny_onn", MoEShape(64, 256, 8, 0, GLOBAL_POOL), "\nvLLM: runs no pool of experts that layers share.\n"),
        ("qwen2_moe", MoEShape(64, 256, 8, 0, dense_layers=(0,)), "\nllama.cpp: wants experts in every layer"),
        ("qwen3_moe", MoEShape(64, 48, 8, 0), "quantised formats want N % 32 == 0, N is 48: down projections"),
        ("qwen3_moe", MoEShape(64, 304, 8, 0), "padded with zero neurons to 320, a multiple of 32"),
        ("granitemoe", MoEShape(64, 304, 8, 0), 'llm_int8_skip_modules=["layer", "lm_head"]'),
        ("gemma4_text", SHAPE, 'llm_int8_skip_modules=["router.proj", "lm_head"]'),
    ],
)
def test_runtimes_are_judged_by_shape_and_target(target, shape, expected):
    assert expected in "\n".join(runtimes(target, shape))


def test_a_card_names_the_runtimes_that_read_no_tied_embeddings():
    def said(target, tied):
        return "\n".join(runtimes(target, tie_word_embeddings=tied))

    assert "\nSGLang: reads the output embedding only from" in said("qwen3_moe", tied=True)
    assert "\nvLLM: expert count and" in said("qwen3_moe", tied=True)
    assert "`python -m pipeline gguf` converts it and adds the output embedding" in said("qwen2_moe", tied=True)
    for target in MOE_TARGETS:
        assert ("tied_embeddings=false" in said(target, tied=True)) == bool(MOE_TARGETS[target].needs_head)
        assert "output embedding" not in said(target, tied=False)


def test_a_gate_that_cannot_speak_is_said():
    def said(experts, top_k):
        shape = MoEShape(experts, 256, top_k, 0)
        return {name for name in MOE_TARGETS if "always 1" in "\n".join(runtimes(name, shape))}

    assert said(100, 1) >= {"qwen3_moe", "mixtral", "granitemoe", "granitemoeshared", "gemma4_text"}
    assert said(100, 1).isdisjoint({"qwen2_moe", "glm4_moe", "tiny_onn", "flex_olmo"})
    assert said(100, 2) == said(1, 1) == set()


@pytest.mark.parametrize("target", MOE_TARGETS)
def test_no_runtime_is_named_for_experts_with_another_activation(target):
    said = runtimes(target, hidden_act="relu2")
    known = "gelu_pytorch_tanh" if target == "gemma4_text" else "SiLU"
    for name in MOE_TARGETS[target].runtimes:
        assert f"{name}: has only {known} for these experts, not relu2." in said
    assert not any("kernels" in line or "pipeline gguf` converts" in line for line in said)


@pytest.mark.parametrize(
    ("target", "dense", "fault"),
    [
        ("glm4_moe", {"rope_scaling": LLAMA3}, "has no llama3 position encoding for this architecture"),
        ("mixtral", {"rope_parameters": LLAMA3}, ""),
        ("mixtral", {"rope_scaling": {"type": "su"}}, "has no longrope position encoding for this architecture"),
        ("qwen2_moe", {"hidden_act": "gelu"}, "has only SiLU for these experts, not gelu"),
        ("qwen3_moe", {"attention_bias": True}, "has no bias on o_proj for this architecture"),
        ("ernie4_5_moe", ERNIE, ""),
        ("ernie4_5_moe", ERNIE | {"moe_layer_end_index": 2}, "runs dense layers only before all others"),
        (
            *("ernie4_5_moe", ERNIE | {"intermediate_size": 64}),
            "has only shared experts as wide as a dense layer / key heads",
        ),
        ("cohere2_moe", {"mlp_layer_types": ["dense", "sparse"]}, ""),
        ("cohere2_moe", {"mlp_layer_types": ["sparse", "dense"]}, "runs dense layers only before all others"),
        ("mixtral", {"rope_parameters": MINISTRAL}, ""),  # it is converted as Ministral 3
        ("glm4_moe", {"rope_parameters": MINISTRAL}, "ignores the mscale and attention_factor of yarn"),
        ("granitemoe_swa", HEADS | {"head_dim": 8, "layer_rope_theta": [0, 5e4]}, ""),
        ("granitemoehybrid", HEADS | {"head_dim": 6}, "has only heads of hidden_size / heads for this architecture"),
    ],
)
def test_what_llama_cpp_would_silently_leave_out_is_said(target, dense, fault):
    lines = runtimes(target, **dense)
    (said,) = [line.removeprefix("llama.cpp: ") for line in lines if line.startswith("llama.cpp: ")]
    assert said == f"{fault}." if fault else "`python -m pipeline gguf` converts it" in said


def test_keys_that_stay_rotated_for_short_texts_are_said():
    """tests/numerics/test_long_generation.py shows them."""
    long = {"model_type": "phi3", "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 2048}

    def said(target, dense):
        return [line for line in runtimes(target, **dense) if "use_cache=False" in line]

    (line,) = said("mixtral", long)
    assert line.startswith("transformers: generation that begins within 2,048 tokens and goes beyond is wrong")
    (line,) = said("glm4_moe", {"model_type": "phi3", "rope_parameters": {"rope_type": "longrope"}})
    assert "within 4,096 tokens" in line
    assert said("tiny_onn", long) == said("mixtral", {"model_type": "phi3"}) == []
    assert said("mixtral", long | {"model_type": "llama"}) == []  # whose class keeps them, too
