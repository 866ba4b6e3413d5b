import pytest

from models.families.card import CarveFacts, render_card, suitable_runtimes
from models.families.moe import MOE_TARGETS
from models.shape import Shape


def test_the_card_says_what_was_carved_from_what():
    shape = Shape(experts=16, n=64, top_k=4, always_on=256)
    card = render_card(
        CarveFacts("org/dense", MOE_TARGETS["glm4_moe"], shape, 1024, 4, 12, 3, "by hand", "ridge", "none")
    )
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "base_model: org/dense\n" in card
    for row in (
        "| architecture | `Glm4MoeForCausalLM` |",
        "| experts | 16 of 64 neurons in each of 4 layers, 4 per token |",
        "| active FFN width | 512 of the dense model's 1024 (50%) |",
        "| neurons left out | 12 in all layers together |",
        "| most copies of one neuron | 3 |",
        "| partition | by hand |",
        "| router | ridge |",
    ):
        assert row in card


@pytest.mark.parametrize(
    ("target", "shape", "expected"),
    [
        ("qwen3_moe", Shape(64, 256, 8, 0), "vLLM, SGLang: expert count and width suit the fused kernels."),
        ("qwen3_moe", Shape(100, 256, 8, 0), "E = 100, N = 256 take a slower path"),
        ("qwen3_moe", Shape(64, 100, 8, 0), "padded with zero units to 104"),
        ("qwen3_moe", Shape(64, 64, 8, 0), "K-quants want N % 256 == 0, N is 64"),
        ("qwen2_moe", Shape(100, 256, 8, 0), "llama.cpp: does not renormalise this architecture's gates"),
    ],
)
def test_runtimes_are_judged_by_shape_and_target(target, shape, expected):
    assert expected in "\n".join(suitable_runtimes(MOE_TARGETS[target], shape))
