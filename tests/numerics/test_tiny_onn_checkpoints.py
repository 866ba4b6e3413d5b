"""All experts on, zero routers: in a fresh process, TinyONN gives the dense logits with and without the project."""

import pytest
from numerics.emission_cases import PLAIN_ROPE, TOLERANCE
from numerics.tiny_onn_carves import reload, write_carve

GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e2},
    "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# Other families are in test_emission.
CASES = {
    "qwen3-tied": {"source": "qwen3", "tie": True},
    "none-always-on": {"source": "llama", "always_on": 0},
    "gemma3": {"source": "gemma3_text", "tie": True, "sliding_window": 4, "layer_types": MIXED,
               "rope_parameters": GEMMA3_ROPE, "query_pre_attn_scalar": 5},
    "phi3": {"source": "phi3", "rope_parameters": PLAIN_ROPE},
}  # fmt: skip
REMOTE = ("gemma3", "phi3")


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, object]]]:
    folder = tmp_path_factory.mktemp("tiny_onn")
    for name, case in CASES.items():
        write_carve(folder / name, **case)
    return reload(folder, registered=[*CASES], remote=[*REMOTE])


@pytest.mark.parametrize("name", CASES)
def test_all_experts_on_equals_dense_in_a_fresh_process(reloaded, name: str) -> None:
    check(reloaded["registered"][name], name, module="models")


@pytest.mark.parametrize("name", REMOTE)
def test_the_code_beside_the_weights_is_enough(reloaded, name: str) -> None:
    check(reloaded["remote"][name], name, module="transformers_modules")


def check(found: dict[str, object], name: str, *, module: str) -> None:
    assert found["module"] == module
    assert found["difference"] <= TOLERANCE
    assert found["again"] == 0.0, "save_pretrained, then from_pretrained"
    without = module == "transformers_modules" and name.startswith("gemma")  # vLLM would use SiLU, not GELU
    assert found["decoder"] == (None if without else 0.0), "AutoModel"
    assert found["loading"] == {}, "missing or unexpected keys"
    assert found["warnings"] == []
    assert found["cached"] == found["uncached"]
    assert len(found["cached"][0]) == 9
    assert found["bias_dtypes"] == ["torch.float32"]
    assert found["tied"] == CASES[name].get("tie", False)
