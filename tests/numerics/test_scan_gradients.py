"""The scan's gradient norms against autograd's true per-sample weight gradients."""

from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.errors import NumericsError
from models.ffn import ffn_modules
from models.pico import write_pico
from stages.data.batches import batch_sequences
from stages.data.sequences import TokenSequence
from stages.scan.passes import Position, scan_batches
from stages.scan.reservoir import draw_reservoir
from stages.scan.stage import enable_gradient_checkpointing
from stages.scan.unit_sums import UnitSums

LENGTHS = (9, 5, 7)
LAYERS, HIDDEN, WIDTH = 2, 24, 40


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama", "mistral"])
def folder(request, tmp_path_factory):
    return write_pico(
        tmp_path_factory.mktemp("dense"), request.param, layers=LAYERS, hidden=HIDDEN, intermediate=WIDTH, tie=True
    )


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def draw_sequences(vocab=61):
    """Ragged; the second has masked labels in front, as a prompt has."""
    generator = torch.Generator().manual_seed(3)
    sequences = []
    for index, length in enumerate(LENGTHS):
        ids = torch.randint(1, vocab, (length,), generator=generator).tolist()
        labels = [-100] * 3 + ids[3:] if index == 1 else list(ids)
        sequences.append(TokenSequence(f"sample {index}", ids, labels))
    return sequences


def count_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def scan(folder, batch_tokens, *, product="auto", prepare=None, gradients=True):
    model = load(folder)
    if prepare:
        prepare(model)
    hooks = count_hooks(model)  # transformers adds one of its own for gradient checkpointing
    batches = batch_sequences(draw_sequences(), batch_tokens, 0)
    sums = UnitSums.zeros(LAYERS, WIDTH, 11, share=0.1, threshold=None, norm_product=product)
    slots_T = draw_reservoir(sum(LENGTHS), 11, seed=5)
    position = Position()
    scan_batches(
        model, ffn_modules(model), batches, sums, position, slots_T, gradients=gradients, after_batch=lambda *_: None
    )
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    assert count_hooks(model) == hooks
    return sums.tensors, position


@pytest.fixture(scope="module")
def truth(folder):
    """Per-sample weight gradients by plain autograd, one unpadded sample at a time."""
    model = load(folder).requires_grad_(True)
    totals = {name: torch.zeros(LAYERS, WIDTH, dtype=torch.float64) for name in ("gate", "up", "down")}
    for sequence in draw_sequences():
        model.zero_grad()
        ids, labels = torch.tensor([sequence.ids]), torch.tensor([sequence.labels])
        logits = model(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:]).backward()
        for layer, mlp in enumerate(ffn_modules(model)):
            totals["gate"][layer] += mlp.gate_proj.weight.grad.double().norm(dim=1)
            totals["up"][layer] += mlp.up_proj.weight.grad.double().norm(dim=1)
            totals["down"][layer] += mlp.down_proj.weight.grad.double().norm(dim=0)
    return totals


def checkpoint_reentrant(model):
    enable_gradient_checkpointing(model, reentrant=True)


@pytest.mark.parametrize("product", ["gram", "direct"])
@pytest.mark.parametrize("prepare", [None, enable_gradient_checkpointing, checkpoint_reentrant])
def test_norms_equal_those_of_true_weight_gradients(folder, truth, product, prepare):
    found, _ = scan(folder, batch_tokens=64, product=product, prepare=prepare)
    for name, expected in truth.items():
        error = ((found[f"grad_norm_{name}"] - expected).abs() / expected).max()
        assert error <= 1e-5, (name, float(error))


def test_a_padded_batch_equals_batches_of_one(folder):
    together, _ = scan(folder, batch_tokens=64)
    single, position = scan(folder, batch_tokens=1)
    assert position.samples == len(LENGTHS)
    assert position.tokens == sum(LENGTHS)
    for name, tensor in together.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, single[name], rtol=1e-5, atol=1e-9, msg=name)
        else:
            assert torch.equal(tensor, single[name]), name


def test_activation_sums_are_those_of_plain_hooks_without_padding(folder):
    found, _ = scan(folder, batch_tokens=64)
    model = load(folder)
    hidden = {layer: [] for layer in range(LAYERS)}
    for layer, mlp in enumerate(ffn_modules(model)):
        mlp.down_proj.register_forward_pre_hook(lambda _m, args, layer=layer: hidden[layer].append(args[0][0]))
    for sequence in draw_sequences():
        model(input_ids=torch.tensor([sequence.ids]))
    for layer, parts in hidden.items():
        h_TF = torch.cat(parts).double()
        torch.testing.assert_close(found["sum_abs"][layer], h_TF.abs().sum(0), rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(found["sum_sq"][layer], h_TF.square().sum(0), rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(found["max_abs"][layer], h_TF.abs().amax(0), rtol=1e-5, atol=1e-8)
        assert found["active_count"][layer].sum() == 4 * sum(LENGTHS)  # 10 % of 40 units for every token


def test_taylor_sums_are_activation_times_gradient(folder):
    found, _ = scan(folder, batch_tokens=64)
    model = load(folder)
    total = torch.zeros(LAYERS, WIDTH, dtype=torch.float64)
    for sequence in draw_sequences():
        kept = {}
        hooks = [
            mlp.down_proj.register_forward_pre_hook(
                lambda _m, args, layer=layer, kept=kept: kept.update({layer: args[0]})
            )
            for layer, mlp in enumerate(ffn_modules(model))
        ]
        inputs = model.get_input_embeddings()(torch.tensor([sequence.ids])).requires_grad_(True)
        logits = model(inputs_embeds=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(sequence.labels)[1:])
        for layer, grad in enumerate(torch.autograd.grad(loss, [kept[layer] for layer in range(LAYERS)])):
            total[layer] += (kept[layer] * grad)[0].detach().double().abs().sum(0)
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(found["sum_taylor"], total, rtol=1e-5, atol=1e-9)


def test_a_forward_only_scan_gives_the_same_activations(folder):
    full, _ = scan(folder, batch_tokens=64)
    forward, _ = scan(folder, batch_tokens=64, gradients=False)
    for name in ("sum_abs", "sum_sq", "max_abs", "active_count", "bits_LRf"):
        torch.testing.assert_close(forward[name], full[name], rtol=1e-6, atol=0)
    assert not forward["sum_taylor"].any()
    assert not forward["grad_norm_gate"].any()


def test_an_interrupted_scan_goes_on_to_the_same_bits(folder):
    model, batches = load(folder), batch_sequences(draw_sequences(), 1, 0)
    slots_T = draw_reservoir(sum(LENGTHS), 11, seed=5)

    def run(sums, position, count):
        scan_batches(
            model, ffn_modules(model), batches[:count], sums, position, slots_T, gradients=True,
            after_batch=lambda *_: None,
        )  # fmt: skip

    whole, interrupted = (UnitSums.zeros(LAYERS, WIDTH, 11, share=0.1, threshold=None) for _ in range(2))
    run(whole, Position(), 3)
    position = Position()
    run(interrupted, position, 2)
    resumed = UnitSums({name: tensor.clone() for name, tensor in interrupted.tensors.items()}, 0.1, None)
    run(resumed, Position(**asdict(position)), 3)
    assert all(torch.equal(tensor, whole.tensors[name]) for name, tensor in resumed.tensors.items())


def test_a_sample_without_a_usable_label_is_named(folder):
    model = load(folder)
    sequences = draw_sequences()
    sequences[2] = TokenSequence("sample 2", sequences[2].ids, [-100] * LENGTHS[2])
    sums = UnitSums.zeros(LAYERS, WIDTH, 11, share=0.1, threshold=None)
    slots_T = draw_reservoir(sum(LENGTHS), 11, seed=5)
    with pytest.raises(NumericsError) as caught:
        scan_batches(
            model, ffn_modules(model), batch_sequences(sequences, 64, 0), sums, Position(), slots_T, gradients=True,
            after_batch=lambda *_: None,
        )  # fmt: skip
    assert str(caught.value) == (
        "the loss is not finite in 1 of 3 samples\n"
        "  where: sample 2\n"
        "  do:    look for a sample without a supervised next token, or scan in another format: model.dtype=float32"
    )


def test_vanishing_gradients_are_an_error(folder):
    model = load(folder)
    # Attention and FFN outputs of exactly zero weight leave no path from the loss to any unit.
    for mlp in ffn_modules(model):
        mlp.down_proj.weight.zero_()
        mlp.up_proj.weight.zero_()
    sums = UnitSums.zeros(LAYERS, WIDTH, 11, share=0.1, threshold=None)
    with pytest.raises(NumericsError, match="all gradients are zero in 3 of 3 samples"):
        scan_batches(
            model, ffn_modules(model), batch_sequences(draw_sequences(), 64, 0), sums, Position(),
            draw_reservoir(sum(LENGTHS), 11, seed=5), gradients=True, after_batch=lambda *_: None,
        )  # fmt: skip
