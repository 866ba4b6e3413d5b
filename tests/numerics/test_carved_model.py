"""Gradients of the KL divergence from the dense to the carved model, against autograd in the emitted checkpoint."""

from dataclasses import fields, replace

import pytest
import torch
from pico import load_frozen, write_pico
from torch.nn.functional import pad

import models.tiny_onn.register  # noqa: F401 - from_pretrained is to know the class
from models.config import MoEShape
from models.emit import emit_checkpoint
from models.experts import ExpertLoop, ExpertWeights, slice_experts
from models.ffn import DenseFFN, ffn_modules, separate_ffns
from models.routing import GateKind, LinearRouter
from models.targets.base import gate_kind, gate_scale_of
from models.targets.config import MOE_TARGETS
from stages.project import carved_model
from stages.project.carved_model import CarvedModel, clip_tokens
from stages.text.batches import TokenSequence, batch_sequences

E, N, K, F, D, L = 4, 8, 2, 40, 24, 3
LENGTHS = (9, 5, 7)
CASES = [("qwen3", "qwen3_moe", 0), ("qwen3", "glm4_moe", 4), ("qwen2", "qwen2_moe", 4), ("gemma2", "tiny_onn", 4)]


def read_batches():
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, 61, (length,), generator=generator).tolist() for length in LENGTHS]
    return batch_sequences([TokenSequence(f"sample {index}", row, row) for index, row in enumerate(ids)], 18, 0)


def cut_loops(dense, shape, gate):
    generator, order = torch.Generator().manual_seed(0), torch.randperm(F, generator=torch.Generator().manual_seed(4))
    neurons_EN, always_S = (
        order[: E * N].view(E, N).sort(1).values,
        order[E * N : E * N + shape.always_on].sort().values,
    )
    loops = []
    for mlp in ffn_modules(dense):
        ffn = DenseFFN.of(mlp)
        rows_ED = torch.randn(E, D, generator=generator) / 3
        experts = slice_experts(ffn.projections, neurons_EN, always_S)
        loops.append(ExpertLoop(experts, neurons_EN, always_S, LinearRouter.without_bias(rows_ED), K, F, ffn.act, gate))
    return loops


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("dense"), "qwen3", layers=L, hidden=D, intermediate=F)


@pytest.fixture
def dense(folder):
    return load_frozen(folder)


@pytest.fixture
def carved(dense):
    return CarvedModel(dense, cut_loops(dense, MoEShape(E, N, K, 4), GateKind.SOFTMAX_OF_CHOSEN))


def find_gradients(carved, batch):
    weights = [weight for _, weight in carved.weights()]
    found = [None] * len(weights)
    carved.backward(batch, weights, found.__setitem__)
    return found


@pytest.mark.parametrize(("source", "target", "always_on"), CASES)
def test_gradients_are_those_of_the_emitted_checkpoint(tmp_path, source, target, always_on, monkeypatch):
    monkeypatch.setattr(carved_model, "clip_tokens", lambda gradient_TD: gradient_TD)
    folder = write_pico(tmp_path / "dense", source, layers=L, hidden=D, intermediate=F)
    dense, shape, moe = load_frozen(folder), MoEShape(E, N, K, always_on), MOE_TARGETS[target]
    loops = cut_loops(dense, shape, GateKind(gate_kind(moe, shape)))
    emit_checkpoint(
        folder,
        tmp_path / "moe",
        target=moe,
        shape=shape,
        routers=lambda layer: loops[layer].router.rows_ED,
        experts=lambda layer: loops[layer].experts,
    )
    batches = read_batches()
    carved = CarvedModel(dense, loops)
    taught = carved.teach(batches)
    parts = [[g * batch.tokens.tokens for g in find_gradients(carved, batch)] for batch in taught]
    found = [sum(each) / sum(LENGTHS) for each in zip(*parts, strict=True)]
    weights = carved.weights()

    emitted, teacher = load_frozen(tmp_path / "moe").requires_grad_(True), load_frozen(folder)
    losses = []
    for batch in batches:
        mask_BT = batch.attention_mask.bool()
        arguments = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        ours, theirs = (model(**arguments).logits[mask_BT].log_softmax(-1) for model in (emitted, teacher))
        losses.append((theirs.detach().exp() * (theirs.detach() - ours)).sum())
    loss = sum(losses) / sum(LENGTHS)
    loss.backward()
    assert carved.divergence(taught) == pytest.approx(loss.item(), rel=1e-4)
    assert loss.item() > 1e-4

    expected = [gradient for layer in emitted.get_decoder().layers for gradient in gradients_of(layer, moe, shape)]
    assert len(found) == len(expected) == len(weights) == L * (6 if always_on else 3)
    for (name, weight), gradient, wanted in zip(weights, found, expected, strict=True):
        assert gradient.shape == weight.shape
        assert gradient.any()
        torch.testing.assert_close(gradient, wanted, rtol=2e-3, atol=1e-6 + 1e-4 * float(wanted.abs().max()), msg=name)


def test_the_head_of_a_class_that_also_has_experts_gives_logits(tmp_path):
    keys = {"num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": ["attention"] * L, "mamba_n_heads": 4}
    write_pico(tmp_path, "granitemoehybrid", layers=L, hidden=D, shared_intermediate_size=F, **keys)
    dense = load_frozen(tmp_path)
    separate_ffns(dense)
    carved = CarvedModel(dense, cut_loops(dense, MoEShape(E, N, K, 4), GateKind.SOFTMAX_OF_CHOSEN))
    assert 1e-4 < carved.divergence(carved.teach(read_batches())) < 1e4


def gradients_of(layer, moe, shape):
    """Gradients of one emitted layer in the order of ExpertWeights, with respect to unscaled down projections."""
    gate_scale = gate_scale_of(moe, shape)
    gate_up, down = layer.mlp.experts.gate_up_proj.grad, layer.mlp.experts.down_proj.grad
    yield from (*gate_up.chunk(2, dim=1), down * gate_scale.down_scale)
    if shape.always_on:
        shared = getattr(layer.mlp, "shared_expert", None) or layer.mlp.shared_experts
        down = shared.down_proj.weight.grad * gate_scale.shared_down_scale
        # Targets may round the width up with zero neurons, which are cut off here.
        yield from (shared.gate_proj.weight.grad[: shape.always_on], shared.up_proj.weight.grad[: shape.always_on])
        yield down[:, : shape.always_on]


def test_nothing_of_the_model_has_changed_afterwards(dense):
    loops = cut_loops(dense, MoEShape(E, N, K, 4), GateKind.SIGMOID_OF_CHOSEN)
    ids = torch.arange(1, 8)[None]
    before, ffns = dense(input_ids=ids).logits, [layer.mlp for layer in dense.model.layers]
    carved = CarvedModel(dense, loops)
    find_gradients(carved, carved.teach(read_batches())[0])
    assert torch.equal(dense(input_ids=ids).logits, before)
    assert all(layer.mlp is ffn for layer, ffn in zip(dense.model.layers, ffns, strict=True))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in dense.parameters())
    for loop, original in zip(carved.loops, loops, strict=True):
        assert all(
            getattr(loop.experts, spec.name) is getattr(original.experts, spec.name) for spec in fields(ExpertWeights)
        )


def test_experts_that_layers_share_have_one_gradient(dense):
    loops = cut_loops(dense, MoEShape(E, N, K, 0), GateKind.SOFTMAX_OF_CHOSEN)
    own = CarvedModel(dense, [loops[0], loops[1], loops[2]])
    pool = [type(loop)(loops[0].experts, *[getattr(loop, spec.name) for spec in fields(loop)[1:]]) for loop in loops]
    shared = CarvedModel(dense, pool)
    assert len(own.weights()) == 3 * L
    assert [name for name, _ in shared.weights()] == ["gate_END", "up_END", "down_EDN"]
    (batch, *_) = shared.teach(read_batches())
    calls = []
    shared.backward(batch, [weight for _, weight in shared.weights()], lambda index, _: calls.append(index))
    assert sorted(calls) == [0, 1, 2]
    equal = [
        replace(loop, experts=ExpertWeights(**{k: v.clone() for k, v in vars(loops[0].experts).items()}))
        for loop in loops
    ]
    parts = find_gradients(CarvedModel(dense, equal), batch)
    for place, found in enumerate(find_gradients(shared, batch)):
        torch.testing.assert_close(found, sum(parts[place::3]))


def test_no_token_weighs_more_than_the_median_one():
    gradient_TD = torch.tensor([[3.0, 4.0], [0.0, 0.0], [60.0, 80.0], [0.0, 2.0], [-7.0, 0.0]])
    clipped_TD = clip_tokens(gradient_TD)
    assert torch.allclose(clipped_TD, torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 4.0], [0.0, 2.0], [-5.0, 0.0]]))


def test_padding_does_not_change_clipped_gradients(carved):
    (batch,) = batch_sequences([TokenSequence("one", ids := [*range(1, 8)], ids)], 18, 0)
    padded = replace(
        batch, input_ids=pad(batch.input_ids, (0, 11)), attention_mask=pad(batch.attention_mask, (0, 11)),
        labels=pad(batch.labels, (0, 11), value=-100),
    )  # fmt: skip
    plain, same = (find_gradients(carved, *carved.teach([each])) for each in (batch, padded))
    for expected, found in zip(plain, same, strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_are_clipped_and_repeatable(carved, monkeypatch):
    (batch, *_) = carved.teach(read_batches())
    clipped, again = (find_gradients(carved, batch) for _ in range(2))
    monkeypatch.setattr(carved_model, "clip_tokens", lambda gradient_TD: gradient_TD)
    plain = find_gradients(carved, batch)
    assert all(torch.equal(a, b) for a, b in zip(clipped, again, strict=True))
    assert all(0 < b.norm() < a.norm() for a, b in zip(plain, clipped, strict=True))


def test_weights_may_move_while_backward_runs(carved):
    (batch, *_) = carved.teach(read_batches())
    expected, weights = find_gradients(carved, batch), [weight for _, weight in carved.weights()]
    found = [None] * len(weights)

    def move(index, gradient):
        found[index] = gradient.clone()
        weights[index].fill_(torch.nan)

    carved.backward(batch, weights, move)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not any(weight.requires_grad or weight.grad is not None for weight in weights)


def test_gradients_do_not_vanish_in_float16(dense):
    with torch.no_grad():  # the same function of a residual stream 8,192 times as large
        for name, weight in dense.named_parameters():
            if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
                weight.mul_(8192)
    loops = cut_loops(dense, MoEShape(E, N, K, 4), GateKind.SOFTMAX_OF_CHOSEN)
    found = []
    for dtype in (torch.float32, torch.float16):
        carved = CarvedModel(dense.to(dtype), loops)
        found.append(find_gradients(carved, carved.teach(read_batches())[0]))
    for exact, rounded in zip(*found, strict=True):
        cosine = torch.nn.functional.cosine_similarity(exact.flatten(), rounded.flatten(), dim=0)
        assert cosine > 0.999
