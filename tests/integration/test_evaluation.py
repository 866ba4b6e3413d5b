"""The numbers the command reports, against the same quantities computed by transformers alone in a fresh process."""

import json

import pytest
from integration.carving import reopen

# Gates in parity mode differ from constant ones by the spread of the logits, 1e-3, but not in their sum.
PARITY = 5e-4

NAMES = ("embedded", "qwen2-chain")


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def reopened(carves, tmp_path_factory):
    return reopen({name: carves[name] for name in (*NAMES, "qwen2-parity")}, tmp_path_factory.mktemp("reopened"))


def read_losses(carve):
    models = json.loads((carve.evaluation / "evaluation.json").read_text())["models"]
    return {name: model["loss"] for name, model in models.items()}


def test_losses_are_those_of_transformers_in_a_fresh_process(carves, reopened, name):
    losses = read_losses(carves[name])
    assert losses["dense"] == pytest.approx(reopened[name]["dense"]["loss"], abs=1e-5)
    assert losses["carved"] == pytest.approx(reopened[name]["project"]["loss"], abs=1e-5)


def test_the_carve_before_projection_is_the_assembled_checkpoint(carves, reopened):
    """One is computed neuron by neuron, the other by transformers' experts."""
    losses = read_losses(carves["qwen2-parity"])
    assert losses["unaligned"] == pytest.approx(reopened["qwen2-parity"]["assemble"]["loss"], abs=PARITY)


def test_the_carve_beats_a_mask_and_a_random_router_of_its_width(carves):
    """The embedded model with half of the FFN active, on held-out text."""
    models = json.loads((carves["embedded"].evaluation / "evaluation.json").read_text())["models"]
    gaps = {name: model["gap"] for name, model in models.items()}
    assert 0 < gaps["carved"] < gaps["static_mask"]
    assert gaps["carved"] < gaps["random_router"]
