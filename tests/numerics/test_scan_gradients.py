"""The scan's gradient norms against autograd's true per-sample weight gradients."""

from pathlib import Path

import pytest
import torch
from operator_counts import Operators, count_operators
from pico import load_frozen, write_pico

from instruments import device
from instruments.errors import NumericsError
from instruments.ffn_probe import neuron_norms
from models.ffn import ffn_modules
from stages.accumulators.sums import LocalStore, empty_sums
from stages.artifacts.job import ALONE
from stages.losses import enable_gradient_checkpointing, forward_losses
from stages.scan.batch_sums import sum_shapes
from stages.scan.config import ScanConfig
from stages.scan.passes import Scanner, draw_reservoir, scan_shares
from stages.text.batches import TokenSequence, batch_sequences

LENGTHS = (9, 5, 7)
LAYERS, HIDDEN, WIDTH = 2, 24, 40


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def folder(request, tmp_path_factory):
    return write_pico(
        tmp_path_factory.mktemp("dense"), request.param, layers=LAYERS, hidden=HIDDEN, intermediate=WIDTH, tie=True
    )


def draw_sequences(vocab=61):
    """Sequences of different lengths; the second starts with masked labels, like a prompt."""
    generator = torch.Generator().manual_seed(3)
    sequences = []
    for index, length in enumerate(LENGTHS):
        ids = torch.randint(1, vocab, (length,), generator=generator).tolist()
        labels = [-100] * 3 + ids[3:] if index == 1 else list(ids)
        sequences.append(TokenSequence(f"sample {index}", ids, labels))
    return sequences


def count_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


SHAPES = sum_shapes(LAYERS, WIDTH, 11)


class MemoryStore(LocalStore):
    """A store without files."""

    def flush(self):
        """Write nothing."""


def scan_model(model, batches, *, gradients=True, store=None):
    scanner = Scanner(model, ffn_modules(model), ScanConfig(active_share=0.1, gradients=gradients))
    store = store or MemoryStore(Path("nowhere"), SHAPES, identity={}, every=3600.0)
    slots_M = draw_reservoir(sum(LENGTHS), 11, seed=5)
    scan_shares(scanner, batches, slots_M, store, ALONE, after_batch=lambda _tokens: None)
    return store.collect()


def scan(folder, batch_tokens, *, prepare=None, **options):
    model = load_frozen(folder)
    if prepare:
        prepare(model)
    hooks = count_hooks(model)  # transformers adds its own hook for gradient checkpointing
    sums = scan_model(model, batch_sequences(draw_sequences(), batch_tokens, 0), **options)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    assert count_hooks(model) == hooks
    return sums.tensors, sums.counters


@pytest.fixture(scope="module")
def truth(folder):
    """Per-sample weight gradients by plain autograd, one unpadded sample at a time."""
    model = load_frozen(folder).requires_grad_(True)
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
def test_norms_equal_those_of_true_weight_gradients(folder, truth, product, prepare, monkeypatch):
    monkeypatch.setattr("stages.scan.batch_sums.neuron_norms", lambda record, _auto: neuron_norms(record, product))
    found, _ = scan(folder, batch_tokens=64, prepare=prepare)
    for name, expected in truth.items():
        error = ((found[f"grad_norm_{name}"] - expected).abs() / expected).max()
        assert error <= 1e-5, (name, float(error))


def test_a_padded_batch_equals_batches_of_one(folder):
    together, _ = scan(folder, batch_tokens=64)
    single, counters = scan(folder, batch_tokens=1)
    assert counters["samples"] == len(LENGTHS)
    assert counters["tokens"] == sum(LENGTHS)
    for name, tensor in together.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, single[name], rtol=1e-5, atol=1e-9, msg=name)
        else:
            assert torch.equal(tensor, single[name]), name


def test_activation_sums_are_those_of_plain_hooks_without_padding(folder):
    found, _ = scan(folder, batch_tokens=64)
    model = load_frozen(folder)
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
        assert found["active_count"][layer].sum() == 4 * sum(LENGTHS)  # 10 % of 40 neurons for every token


def test_taylor_sums_are_activation_times_gradient(folder):
    found, _ = scan(folder, batch_tokens=64)
    model = load_frozen(folder)
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


@pytest.fixture(params=["checked at once", "checked by drain"])
def moment(request, monkeypatch):
    """When batches are checked: on a CPU at once, on a GPU when its sums reach the host."""
    if request.param == "checked by drain":
        monkeypatch.setattr(device, "HOSTS", set())


@pytest.mark.usefixtures("moment")
def test_an_interrupted_scan_goes_on_to_the_same_bits(folder, tmp_path):
    model, batches = load_frozen(folder), batch_sequences(draw_sequences(), 1, 0)
    whole = scan_model(model, batches)
    scan_model(model, batches[:2], store=LocalStore(tmp_path, SHAPES, identity={}, every=0.0))
    second = LocalStore(tmp_path, SHAPES, identity={}, every=0.0)
    assert second.done() == {0, 1}
    resumed = scan_model(model, batches, store=second)
    assert resumed.done == whole.done == {0, 1, 2}
    assert resumed.counters == whole.counters
    assert all(torch.equal(tensor, whole.tensors[name]) for name, tensor in resumed.tensors.items())


@pytest.mark.usefixtures("moment")
def test_a_sample_without_a_usable_label_is_named(folder):
    sequences = draw_sequences()
    sequences[2] = TokenSequence("sample 2", sequences[2].ids, [sequences[2].ids[0]] + [-100] * (LENGTHS[2] - 1))
    with pytest.raises(NumericsError, match=r"^no token counts in the loss in 1 of 3 samples") as caught:
        scan_model(load_frozen(folder), batch_sequences(sequences, 64, 0))
    assert caught.value.where == "sample 2"


@pytest.mark.usefixtures("moment")
def test_gradients_that_are_all_zero_are_an_error_and_add_nothing(folder):
    model = load_frozen(folder)
    # With zero up and down weights, no gradient of the loss reaches a neuron.
    for mlp in ffn_modules(model):
        mlp.down_proj.weight.zero_()
        mlp.up_proj.weight.zero_()
    store = MemoryStore(Path("nowhere"), SHAPES, identity={}, every=3600.0)
    with pytest.raises(NumericsError, match=r"^all gradients are zero in 3 of 3 samples") as caught:
        scan_model(model, batch_sequences(draw_sequences(), 64, 0), store=store)
    assert caught.value.where == "sample 0, sample 1, sample 2"
    assert not any(tensor.any() for tensor in store.collect().tensors.values())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_half_precision_is_close_to_single(folder, truth, dtype, bound):
    model = load_frozen(folder).to(dtype)
    found = scan_model(model, batch_sequences(draw_sequences(), 64, 0)).tensors
    for name, expected in truth.items():
        error = (found[f"grad_norm_{name}"] - expected).norm() / expected.norm()
        assert error <= bound, (name, float(error))


@pytest.mark.parametrize(("factor", "bound"), [(2e-4, 0.02), (30, 0.05)])  # would vanish; would overflow
def test_float16_gradients_are_scaled(folder, factor, bound):
    model, batches = load_frozen(folder), batch_sequences(draw_sequences(), 64, 0)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * factor, requires_grad=False)
    single = scan_model(model, batches).tensors["grad_norm_gate"]
    half = scan_model(model.to(torch.float16), batches).tensors["grad_norm_gate"]
    assert (half - single).norm() / single.norm() <= bound


def test_a_batch_waits_for_nothing_and_one_flush_fetches_all(folder, monkeypatch):
    monkeypatch.setattr(device, "HOSTS", set())
    fetched = []

    def to_host(tensors):
        fetched.append(tensors)
        return tensors

    monkeypatch.setattr("stages.scan.batch_sums.to_host", to_host)
    model, batches = load_frozen(folder), batch_sequences(draw_sequences(), 1, 0)
    scanner, store = Scanner(model, ffn_modules(model), ScanConfig()), MemoryStore(Path(), SHAPES, identity={}, every=1)
    for number, batch in enumerate(batches):
        slots_BT = torch.arange(LENGTHS[number])[None]  # all go to the reservoir
        with Operators() as found:
            scanner.scan(batch, slots_BT, store.sums, number=number)
        assert not found.waits
    assert not fetched
    assert not store.sums.done
    scanner.drain()
    ((_sums, *of_batches),) = fetched  # one transfer
    facts = [tensor for tensor in of_batches if tensor.dtype != torch.uint8]  # without the reservoir's bits
    assert sum(tensor.nbytes for tensor in facts) <= len(batches) * 2**12
    assert sum(tensor.nbytes for tensor in of_batches) - sum(tensor.nbytes for tensor in facts) == (
        LAYERS * sum(LENGTHS) * WIDTH // 8
    )
    assert store.sums.done == {0, 1, 2}
    assert store.sums.counters["tokens"] == sum(LENGTHS)


def test_operators_of_a_scan_hardly_grow_with_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "HOSTS", set())
    counts = []
    for layers in (2, 4):
        model = load_frozen(write_pico(tmp_path / str(layers), "qwen3", layers=layers))
        (batch,), mlps = batch_sequences(draw_sequences(), 64, 0), ffn_modules(model)
        sums = empty_sums(sum_shapes(layers, WIDTH, 64))
        scanner, slots_BT = Scanner(model, mlps, ScanConfig()), torch.full(batch.input_ids.shape, -1)
        plain = count_operators(lambda model=model, batch=batch: forward_losses(model, batch).sum().backward())
        scanned = count_operators(scanner.scan, batch, slots_BT, sums, number=0)
        counts.append(scanned.started.total() - plain.started.total())
    assert counts[1] - counts[0] <= 2 * 4
