"""All experts on, constant gates: in transformers alone, an emitted checkpoint gives the dense model's logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.emission_cases import CASES, LAYERS, neurons_of, reload_all, write_case
from pico import tensors_in

from models.targets.config import MOE_TARGETS


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("emission")
    for name, case in CASES.items():
        write_case(folder / name, case)
    return folder


@pytest.fixture(scope="module")
def report(cases: Path) -> dict[str, dict[str, Any]]:
    return reload_all(cases)


def test_every_target_has_a_case() -> None:
    assert {case.target for case in CASES.values()} == set(MOE_TARGETS)


@pytest.mark.parametrize("name", CASES)
def test_all_experts_on_equals_dense_in_a_fresh_process(report: dict[str, dict[str, Any]], name: str) -> None:
    found, case = report[name], CASES[name]
    assert found["architecture"] == case.architecture
    assert found["difference"] <= case.tolerance * max(1.0, found["scale"])
    assert found["saved_again"] == 0.0
    assert found["loading"] == {}, "missing or unexpected keys"
    assert len(found["warnings"]) == case.warned
    assert found["generated"] == 4
    assert found["own_dtype"] == str(case.dtype)


@pytest.mark.parametrize("name", ["qwen2-always-on", "llama", "qwen3-glm4", "qwen3-bfloat16", "qwen2-bfloat16"])
def test_expert_tensors_are_the_dense_slices_up_to_the_fold(cases: Path, name: str) -> None:
    case, target = CASES[name], MOE_TARGETS[CASES[name].target]
    # The expected scale by hand: K is 5 (rounded once) or 4 (exact); glm4_moe does not scale.
    scale = 1 if case.target == "glm4_moe" else case.experts
    dense, moe = tensors_in(cases / name / "dense"), tensors_in(cases / name / "moe")
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp."
        gate, up, down = (dense[f"{mlp}{part}_proj.weight"] for part in ("gate", "up", "down"))
        neurons_EN, always_on_S = (neurons.long() for neurons in neurons_of(case, layer))
        for e, neurons_N in enumerate(neurons_EN):
            expert = [moe[tensor] for tensor in target.ffn(layer, e)]
            assert torch.equal(expert[0][: case.n], gate[neurons_N])
            assert torch.equal(expert[1][: case.n], up[neurons_N])
            assert torch.equal(expert[2][:, : case.n], down[:, neurons_N] * scale)
            assert not expert[2][:, case.n :].any()
            assert expert[0].dtype == case.dtype
        if case.always_on:
            shared = [moe[tensor] for tensor in target.shared_ffn(layer)]
            assert torch.equal(shared[0][: case.always_on], gate[always_on_S])
            assert torch.equal(
                shared[2][:, : case.always_on], down[:, always_on_S] * (2 if target.shared_router else 1)
            )
            assert not shared[2][:, case.always_on :].any()


def test_everything_but_the_ffns_is_carried_over(cases: Path) -> None:
    dense, moe = tensors_in(cases / "qwen2-glm4" / "dense"), tensors_in(cases / "qwen2-glm4" / "moe")
    kept = [name for name in dense if ".mlp." not in name]
    assert len(kept) == 3 + LAYERS * 9
    assert all(torch.equal(dense[name], moe[name]) for name in kept)


def test_every_target_keeps_tied_embeddings_as_one_tensor(cases: Path) -> None:
    tied = {name: case.target for name, case in CASES.items() if not has_head(cases / name / "dense")}
    assert {*tied.values()} == set(MOE_TARGETS)
    assert all(has_head(cases / name / "moe") != CASES[name].tied_embeddings for name in tied)
    assert all(has_head(cases / name / "moe") for name in CASES.keys() - tied.keys())


@pytest.mark.parametrize("name", ["qwen3", "smollm3"])
def test_tied_embeddings_written_twice_on_request_give_the_same_logits(
    report: dict[str, dict[str, Any]], cases: Path, name: str
) -> None:
    once, twice = (tensors_in(cases / name / "moe") for name in (name, f"{name}-untied"))
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    assert twice.keys() - once.keys() == {head}
    assert torch.equal(twice[head], once[embedding])
    assert report[f"{name}-untied"]["difference"] == report[name]["difference"]


def has_head(folder: Path) -> bool:
    """Whether a checkpoint has an output embedding of its own."""
    return any(name.endswith("lm_head.weight") for name in tensors_in(folder))
