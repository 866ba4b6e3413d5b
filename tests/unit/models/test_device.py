"""Rounded products where they are allowed; experts with and without a loop; layers that a thread fetches ahead."""

import threading
from dataclasses import fields, replace

import pytest
import torch
from draws import draw

from instruments import device
from instruments.device import allow_rounded_products, rounded_products
from models.device import fetch_ahead
from models.experts import ExpertLoop, slice_experts, sum_blocks
from models.ffn import DenseFFN, gated
from models.routing import GateKind, LinearRouter
from stages.routing.fit import distinct_neurons

T, D, F, E, N, K, S = 7, 6, 17, 3, 4, 2, 2
# Neurons 3 and 8 are in two experts.
PLAIN, COPIED = torch.arange(12).view(E, N), torch.tensor([[0, 1, 3, 8], [3, 4, 5, 6], [7, 8, 9, 10]])


def make_loop(neurons_EN=PLAIN, always=S, gate=GateKind.SOFTMAX_OF_CHOSEN):
    ffn = DenseFFN(draw(F, D, seed=1), draw(F, D, seed=2), draw(D, F, seed=3), torch.nn.functional.silu)
    always_S = torch.arange(F - always, F)
    router = LinearRouter(draw(E, D, seed=4), draw(E, seed=5))
    experts = slice_experts(ffn.projections, neurons_EN, always_S)
    return ExpertLoop(experts, neurons_EN, always_S, router, K, F, ffn.act, gate)


def compute(loop, x_TD, form):
    """Output and gradients of weights and input."""
    weights = {name: tensor.clone().requires_grad_() for name, tensor in vars(loop.experts).items() if tensor.numel()}
    x_TD = x_TD.clone().requires_grad_()
    output_TD = getattr(replace(loop, experts=replace(loop.experts, **weights)), form)(x_TD)
    output_TD.square().sum().backward()
    return [output_TD.detach(), x_TD.grad, *(tensor.grad for tensor in weights.values())]


@pytest.mark.parametrize("form", ["__call__", "differentiable"])
@pytest.mark.parametrize("gate", GateKind)
@pytest.mark.parametrize("always", [0, S])
def test_all_neurons_times_gates_are_the_loop_with_the_same_gradients(form, gate, always, monkeypatch):
    loops = [make_loop(neurons_EN, always, gate) for neurons_EN in (PLAIN, COPIED)]
    loops += [loops[0].part(1, 2)]  # of one of two workers
    loops += [replace(loops[0], router=LinearRouter(draw(E, D, seed=4), torch.tensor([0.0, 0.0, -99.0])))]  # one unused
    expected = [compute(loop, draw(T, D, seed=6), "differentiable") for loop in loops]
    assert not any(loop.masked for loop in loops)
    monkeypatch.setattr(device, "HOSTS", set())
    assert all(loop.masked for loop in loops)
    for loop, results in zip(loops, expected, strict=True):
        for found, wanted in zip(compute(loop, draw(T, D, seed=6), form), results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("neurons_EN", [PLAIN, COPIED])
def test_blocks_slices_and_outputs_of_experts_are_those_of_the_loop(neurons_EN, monkeypatch):
    x_TD, found = draw(T, D, seed=6), {}
    for name, hosts in {"loop": {"cpu"}, "masked": set()}.items():
        monkeypatch.setattr(device, "HOSTS", hosts)
        loop = make_loop(neurons_EN)
        blocks, output_TD = loop.run(x_TD)
        routed = distinct_neurons(loop)
        norms_TE = routed.expert_norms(loop.hidden(x_TD, routed.gate_RD, routed.up_RD))
        found[name] = [sum_blocks(blocks, T, F), output_TD, loop.expert_outputs(x_TD), norms_TE]
        for spec in fields(loop.experts):
            tensor = getattr(loop.experts.to("cpu", torch.float32), spec.name)
            assert torch.equal(tensor, getattr(loop.experts, spec.name)), spec.name
            found[name].append(tensor)
    assert len(blocks) == (E + 1 if neurons_EN is COPIED else 2)
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_down_columns_of_a_workers_part_are_one_matrix_without_a_copy(monkeypatch):
    monkeypatch.setattr(device, "HOSTS", set())
    down_EDN = make_loop().part(0, 2).experts.down_EDN
    assert len(down_EDN) == 2
    assert down_EDN.mT.flatten(0, 1).data_ptr() == down_EDN.data_ptr()


def test_a_wide_layer_keeps_the_loop(monkeypatch):
    monkeypatch.setattr(device, "HOSTS", set())
    loop = replace(make_loop(always=0), top_k=1)
    assert loop.masked
    wide = LinearRouter.without_bias(draw(8, D, seed=4))
    assert not replace(loop, router=wide, neurons_EN=torch.zeros(8, N, dtype=torch.int64)).masked


def formats():
    """Formats of a GPU's products, as torch is told, and of this CPU's, as they come out."""
    told = torch.backends.cuda.matmul.fp32_precision
    left, right = draw(64, 96, seed=1), draw(96, 80, seed=2)
    found = left @ right
    with rounded_products(use=False, on=["cpu"]):
        exact = left @ right
    return told == "tf32", not torch.allclose(found, exact, rtol=1e-5, atol=1e-4)


def test_products_are_rounded_inside_of_the_block_where_the_setting_and_the_device_allow_it(amx):
    before, rounded = formats(), (True, amx)
    assert before == (False, False)
    with rounded_products():
        assert formats() == rounded
        with rounded_products(use=False):
            assert formats() == before
        with rounded_products(use=False, on=["cpu"]):
            assert formats() == (True, False)
        assert formats() == rounded
    with rounded_products(on=["cpu"]):
        assert formats() == (False, amx)
    allow_rounded_products(allowed=False)
    try:
        with rounded_products():
            assert formats() == before
    finally:
        allow_rounded_products(allowed=True)
    assert formats() == before


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_items_come_in_order_with_what_was_fetched(kind):
    assert [*fetch_ahead(str, range(5), torch.device(kind))] == [(number, str(number)) for number in range(5)]
    assert [*fetch_ahead(str, [], torch.device(kind))] == []


def test_with_a_gpu_the_next_item_is_fetched_while_one_is_used_and_no_more():
    fetched, wanted = [], [threading.Event() for _ in range(4)]

    def fetch(number):
        fetched.append(number)
        wanted[number].set()

    for number, _ in fetch_ahead(fetch, range(4), torch.device("cuda")):
        assert wanted[min(number + 1, 3)].wait(10)
        assert fetched == [*range(min(number + 2, 4))]


def test_without_a_gpu_an_item_is_fetched_when_it_is_due():
    fetched = []
    for number, _ in fetch_ahead(fetched.append, range(4), torch.device("cpu")):
        assert fetched == [*range(number + 1)]


def test_an_error_of_the_thread_is_raised_where_the_item_is_due():
    items = fetch_ahead(lambda number: 1 // number, [2, 1, 0, 3], torch.device("cuda"))
    assert [next(items), next(items)] == [(2, 0), (1, 1)]
    with pytest.raises(ZeroDivisionError):
        next(items)


def test_threads_that_leave_in_the_order_in_which_they_came_leave_the_format_as_it_was(amx):
    before, first, second = formats(), rounded_products(), rounded_products()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert formats() == (True, amx)
    second.__exit__(None, None, None)
    assert formats() == before


def test_a_cpu_whose_products_are_rounded_computes_all_neurons_of_all_experts(amx):
    loop = make_loop()
    assert loop.masked == amx
    allow_rounded_products(allowed=False)
    try:
        assert not loop.masked
    finally:
        allow_rounded_products(allowed=True)


def test_a_product_of_activations_takes_the_memory_of_one_factor_unless_a_gradient_needs_it():
    gate, up = draw(T, F, seed=1), draw(T, F, seed=2)
    expected = torch.nn.functional.silu(gate) * up
    kept = gated(torch.nn.functional.silu, gate, up)
    assert torch.equal(kept, expected)
    assert kept.data_ptr() != up.data_ptr()
    with torch.no_grad():
        found = gated(torch.nn.functional.silu, gate, up)
    assert torch.equal(found, expected)
    assert found.data_ptr() == up.data_ptr()
