"""A carve in bf16 and fp16, loaded or under autocast, keeps the loss and the routing of fp32."""

import pytest
import torch
from integration.carving import TARGETS
from survival import load_fp32, measure, read_batches, read_text_batches
from transformers import AutoModelForCausalLM

import models.tiny_onn.register  # noqa: F401 - registers TinyONN with transformers

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TINY, EMBEDDED = 0.01, 0.003  # nats


def load(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def losses_of(checkpoint, heldout):
    """The loss in fp32; way of computing → (loss, share of (token, layer) pairs whose experts are those of fp32)."""
    plain = load_fp32(checkpoint).eval()
    exact, wanted = measure(plain, heldout)
    lows = {"bfloat16 autocast": measure(plain, heldout, torch.bfloat16)}
    lows |= {name: measure(load(checkpoint, dtype), heldout) for name, dtype in HALF.items()}
    return exact, {way: (loss, float((wanted == kept).all(-1).float().mean())) for way, (loss, kept) in lows.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_low_precision_changes_next_to_nothing(carves, text, name):
    carve = carves[name]
    exact, found = losses_of(carve.checkpoints["project"], read_text_batches(carve.dense, text, 2))
    for way, (loss, alike) in found.items():
        assert loss == pytest.approx(exact, abs=TINY), way
        assert alike > 0.9, way


def test_nor_does_it_in_the_model_of_the_repository(carves):
    carve = carves["embedded"]
    exact, found = losses_of(carve.checkpoints["project"], read_batches(carve.dense, "heldout", 3))
    for way, (loss, alike) in found.items():
        assert loss == pytest.approx(exact, abs=EMBEDDED), way
        assert alike > 0.85, way


def test_tiny_logits_do_not_survive_it(carves, text):
    """The reason for the default size of logits: in bf16, σ of tiny ones is ½."""
    carve = carves["tiny-logits"]
    _exact, found = losses_of(carve.checkpoints["project"], read_text_batches(carve.dense, text, 4))
    assert found["bfloat16 autocast"][1] < 0.5
