"""The checkpoints that the command writes, read by transformers in a fresh process, and tensor by tensor."""

import json
import math

import pytest
import torch
from integration.carving import CARVES, EXACT, reopen
from pico import tensors_in
from safetensors.torch import load_file

TOLERANCE = 1e-5

# Computed by hand: the scale of the experts' down, with which the chosen gates sum to K; and that of the shared expert.
GATE_SCALES = {
    "embedded": (1, 1),  # glm4_moe: in config.json
    "qwen2-chain": (4, 2),  # qwen2_moe: E, for gates that are not renormalised; and σ(0) = ½
    "llama-dropped": (2, None),  # mixtral: K
    "qwen3-hundred": (2, None),  # qwen3_moe: K
}
COPIED = {"embedded", "qwen3-hundred"}  # some neurons are in several experts
# Names of an expert's matrices and of the shared expert's.
NAMES = {
    "qwen3_moe": ("mlp.experts.{}.{}_proj.weight", None),
    "qwen2_moe": ("mlp.experts.{}.{}_proj.weight", "mlp.shared_expert.{}_proj.weight"),
    "glm4_moe": ("mlp.experts.{}.{}_proj.weight", "mlp.shared_experts.{}_proj.weight"),
    "mixtral": ("block_sparse_moe.experts.{}.{}.weight", None),
}
MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


@pytest.fixture(scope="module")
def reopened(carves, tmp_path_factory):
    return reopen({name: carves[name] for name in (*CARVES, "tiny-logits")}, tmp_path_factory.mktemp("reopened"))


@pytest.mark.parametrize("name", EXACT)
def test_all_experts_on_give_the_dense_models_logits(reopened, carves, name):
    """Also after projection, which has no error to correct here."""
    for stage in carves[name].checkpoints:
        assert reopened[name][stage]["difference"] <= TOLERANCE, stage


@pytest.mark.parametrize("name", CARVES)
def test_checkpoints_load_speak_and_learn(reopened, carves, name):
    for stage, checkpoint in carves[name].checkpoints.items():
        found = reopened[name][stage]
        assert found["loading"] == {}, "missing or unexpected keys"
        assert found["warnings"] == []
        assert found["generated"] == 5
        assert found["prompt"] == "three sparrows met"
        assert len(found["router_gradients"]) == read_config(checkpoint)["num_hidden_layers"]
        assert all(0 < norm < math.inf for norm in found["router_gradients"])
        before, after = found["losses"]
        assert after < before


def read_losses(carve):
    models = json.loads((carve.evaluation / "evaluation.json").read_text())["models"]
    return {name: model["loss"] for name, model in models.items()}


@pytest.mark.parametrize("name", ["embedded", "qwen2-chain"])
def test_losses_are_those_of_transformers_in_a_fresh_process(carves, reopened, name):
    losses = read_losses(carves[name])
    assert losses["dense"] == pytest.approx(reopened[name]["dense"]["loss"], abs=1e-5)
    assert losses["carved"] == pytest.approx(reopened[name]["project"]["loss"], abs=1e-5)


def test_the_carve_before_projection_is_the_assembled_checkpoint(carves, reopened):
    """One is computed neuron by neuron, with constant gates, the other by transformers' experts.

    They differ by the spread of the logits, 1e-3, but not in their sum.
    """
    losses = read_losses(carves["tiny-logits"])
    assert losses["unaligned"] == pytest.approx(reopened["tiny-logits"]["assemble"]["loss"], abs=5e-4)


def test_the_carve_beats_a_mask_and_a_random_router_of_its_width(carves):
    """The embedded model with half of the FFN active, on held-out text."""
    losses = read_losses(carves["embedded"])
    assert losses["dense"] < losses["carved"] < losses["static_mask"]
    assert losses["carved"] < losses["random_router"]


@pytest.mark.parametrize("name", GATE_SCALES)
def test_experts_are_the_dense_slices_bit_for_bit(carves, name):
    """Fitted down columns are multiples of the slice's columns; without copies, by one factor per expert."""
    carve, (gate_scale, shared_scale) = carves[name], GATE_SCALES[name]
    dense, moe = tensors_in(carve.dense), tensors_in(carve.checkpoints["assemble"])
    expert, shared = NAMES[read_config(carve.checkpoints["assemble"])["model_type"]]
    partition = load_file(carve.stage("cluster") / "partition.safetensors")
    compared = 0
    neurons_LEN = partition["neurons"].unflatten(0, (len(partition["always_on"]), -1))
    for layer, (neurons_EN, always_S) in enumerate(zip(neurons_LEN, partition["always_on"], strict=True)):
        prefix = f"model.layers.{layer}."
        for part in ("gate", "up", "down"):
            weight = dense[f"{prefix}mlp.{part}_proj.weight"]
            for index, neurons_N in enumerate(neurons_EN):
                written = moe[prefix + expert.format(index, part_name(expert, part))]
                if part == "down":
                    assert_fitted(written, weight[:, neurons_N] * gate_scale, copies=name in COPIED)
                else:
                    assert_slice(written, weight, neurons_N, part)
                compared += 1
            if shared:
                assert_slice(moe[prefix + shared.format(part)], weight, always_S, part, shared_scale)
    assert compared == 3 * neurons_LEN.shape[:2].numel()


def assert_fitted(written, wanted, *, copies):
    """Compare columns of down, which are multiples of the wanted ones; the padding must be zero."""
    assert written.dtype == wanted.dtype
    assert not written[:, wanted.shape[1] :].any()
    columns, slices = written[:, : wanted.shape[1]].float(), wanted.float()
    rounding = 2.0**-7 if written.dtype == torch.bfloat16 else 1e-5
    scale_N = (columns * slices).sum(0) / slices.square().sum(0)
    torch.testing.assert_close(columns, slices * scale_N, rtol=rounding, atol=1e-6)
    assert (scale_N > 0.05).all()
    assert (scale_N < 2).all()
    if not copies:
        torch.testing.assert_close(scale_N, scale_N[:1].expand_as(scale_N), rtol=rounding, atol=0)


def part_name(expert, part):
    return MIXTRAL_PARTS[part] if "block_sparse" in expert else part


def assert_slice(written, weight, neurons, part, gate_scale=1):
    """Compare columns of down, rows of the others; the padding must be zero."""
    axis = 1 if part == "down" else 0
    wanted = weight.index_select(axis, neurons)
    wanted = wanted * gate_scale if part == "down" else wanted
    assert written.dtype == weight.dtype
    assert torch.equal(written.narrow(axis, 0, len(neurons)), wanted)
    assert not written.narrow(axis, len(neurons), written.shape[axis] - len(neurons)).any()


def read_config(checkpoint):
    return json.loads((checkpoint / "config.json").read_text())
