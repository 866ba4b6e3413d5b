import copy

import pytest
import torch
from pico import write_pico
from transformers import AutoModelForCausalLM

from models.config import MoEShape
from models.routing import LinearRouter
from models.stream import LayerStream
from stages.evaluate.baselines import LayerFacts
from stages.evaluate.comparison import Text, run_baselines, watch_states
from stages.losses import measure_loss, measure_losses
from stages.project.config import ProjectConfig
from stages.text.batches import TokenSequence, batch_sequences

L, D, F, V, E, N, K, S = 2, 24, 40, 61, 4, 8, 2, 8


SETTINGS = ProjectConfig(penalties=[1e-2, 1e-1], validation_share=0.25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("pico"), "qwen2", layers=L, hidden=D, intermediate=F, vocab=V)


@pytest.fixture(scope="module")
def text():
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        lengths = torch.randint(5, 13, (count,), generator=generator).tolist()
        drawn = [torch.randint(V, (length,), generator=generator).tolist() for length in lengths]
        return [TokenSequence(str(number), ids, ids) for number, ids in enumerate(drawn)]

    return Text(batch_sequences(draw(60), 30, 0), batch_sequences(draw(9), 30, 0))


def run(folder, text, *names, top_k=K, always_on=S, states=()):
    shape = MoEShape(E, N, top_k, always_on)

    def facts_of(index, ffn):
        generator = torch.Generator().manual_seed(index)
        order = torch.randperm(F, generator=generator)
        rows_ED = torch.randn(E, D, generator=generator)
        contribution_F = torch.rand(F, generator=generator)
        router = LinearRouter.without_bias(rows_ED)
        return LayerFacts(ffn, order[S:].view(E, N), order[:S], router, contribution_F, shape, seed=index)

    with LayerStream(folder, device=torch.device("cpu")) as stream:
        return run_baselines(names, stream, text, facts_of, SETTINGS, replicated=False, dense=states)


@pytest.mark.parametrize("name", ["unaligned", "static_mask", "random_router", "oracle"])
def test_with_every_neuron_on_each_baseline_is_the_dense_model(folder, text, name):
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = run(folder, text, name, top_k=E)[name]
    expected = measure_loss(dense, text.heldout, "dense")
    assert loss.tokens == expected.tokens
    assert loss.nats == pytest.approx(expected.nats, rel=1e-6)


def test_a_baseline_is_as_far_from_the_dense_model_as_its_predictions(folder, text):
    """With every neuron the mask is the dense model, with none the dense model without FFNs."""
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with watch_states(dense, 0, None) as states:
        measure_loss(dense, text.heldout)
    with_all = run(folder, text, "static_mask", top_k=E, states=states)["static_mask"]
    assert (with_all.divergence, with_all.agreement) == (pytest.approx(0, abs=1e-6), 1)
    found = run(folder, text, "static_mask", "oracle", top_k=0, always_on=0, states=states)["static_mask"]
    bare = copy.deepcopy(dense)
    for layer in bare.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    wanted = measure_losses({"dense": dense, "bare": bare}, text.heldout)["bare"]
    assert found.divergence == pytest.approx(wanted.divergence, rel=1e-4)
    assert found.agreement == wanted.agreement < 1
    assert found.divergence > 0.001


def test_alignment_reads_calibration_text_only(folder, text):
    """A held-out batch has the same loss with and without the other held-out batches."""
    whole = run(folder, text, "static_mask_aligned")["static_mask_aligned"]
    parts = [run(folder, Text(text.calibration, [batch]), "static_mask_aligned") for batch in text.heldout]
    total = sum(part["static_mask_aligned"].total for part in parts)
    assert whole.total == pytest.approx(total, rel=1e-6)
