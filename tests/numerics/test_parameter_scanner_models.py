"""The parameter-level scanner on models with unusual code: right norms, or the weight is left out with a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from instruments.parameter_scan.scanner import ParameterTensorScanner

B, T, D, V = 3, 5, 8, 20
IDS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """An embedding and three Linear layers; `middle(net, x)` replaces the first of them."""

    def __init__(self, middle=lambda net, x: net.a(x)):
        super().__init__()
        torch.manual_seed(0)
        self.e, self.a, self.b, self.h = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, V)
        self.middle = middle

    def forward(self, input_ids):
        return self.h(self.b(self.middle(self, self.e(input_ids))))


def backward(model, ids):
    model(ids).logsumexp(-1).sum().backward()


def scan(model, ids=IDS, run=backward, **settings):
    """The only record of a pass, and the scanner."""
    with ParameterTensorScanner(model, **settings) as scanner:
        run(model, ids)
    (record,) = scanner.collect()
    return record, scanner


def gradients(record, scanner):
    """Norms by name, without those that were not measured."""
    found = {one.name: record.gradient_BP[:, index] for index, one in enumerate(scanner.parameters)}
    return {name: norms for name, norms in found.items() if not norms.isnan().any()}


def true_gradients(model, names, ids=IDS, run=backward):
    model.requires_grad_(True)
    weights, found = dict(model.named_parameters()), {name: [] for name in names}
    for sample in ids.split(1):
        model.zero_grad()
        run(model, sample)
        for name in names:
            found[name].append(weights[name].grad.norm())
    model.zero_grad()
    return {name: torch.stack(norms) for name, norms in found.items()}


def assert_true(model, expected, ids=IDS, run=backward, **settings):
    """Exactly the expected weights have norms, the true ones, and all others are left out; returns the reasons."""
    found = gradients(*(both := scan(model, ids, run, **settings)))
    scanner = both[1]
    assert set(found) == set(expected)
    assert set(scanner.left_out) >= {one.name for one in scanner.parameters} - set(expected)
    assert not set(scanner.left_out) & set(expected)
    truth = true_gradients(model, expected, ids, run)
    for name in expected:
        torch.testing.assert_close(found[name].double(), truth[name].double(), rtol=2e-5, atol=0, msg=name)
    return scanner.left_out


ALL = ("e.weight", "a.weight", "b.weight", "h.weight")


def scale_rows(net, x):
    x *= 2.0
    return net.a(x)


def add_residual(net, x):
    y = net.a(x)
    y += x
    return y


IN_PLACE = {
    "relu": lambda net, x: functional.relu(net.a(x), inplace=True),
    "residual": add_residual,
    "embedding": scale_rows,
    "dropout": lambda net, x: net.a(functional.dropout(x, 0.0, True, inplace=True)),
    "checkpoint": lambda net, x: checkpoint(lambda x: add_residual(net, x), x, use_reentrant=False),
}


@pytest.mark.parametrize("middle", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_model_changes_outputs_in_place(middle, frozen):
    assert_true(Net(middle).requires_grad_(not frozen), ALL)


def test_activations_of_rows_that_the_model_scales_in_place():
    record, _ = scan(Net(scale_rows))
    expected = Net().e(IDS).flatten(1).norm(dim=1)
    torch.testing.assert_close(record.activation_BP[:, :2], torch.stack([expected, 2 * expected], 1))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_input_that_a_frozen_model_changes_afterwards_is_left_out(checkpointed):
    def middle(net, x):
        def run(x):
            y = net.a(x := x * 1.0)
            x += 1.0
            return (x + y).tanh()  # saved after the change, so that recomputation reaches it

        return checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)

    record, scanner = scan(Net(middle).requires_grad_(False))
    assert scanner.left_out == {"a.weight": "the model changes its input in place"}
    assert record.gradient_BP[:, 1].isnan().all()
    assert record.gradient_BP[:, [0, 2, 3]].isfinite().all()


def test_an_input_changed_in_place_between_two_layers_is_measured_again():
    def middle(net, x):
        x = x.clone()
        x += net.a(x)
        net.seen = x.flatten(1).norm(dim=1)
        return x

    model = Net(middle)
    with torch.no_grad():
        record, _ = scan(model, run=lambda model, ids: model(ids), gradients=False)
    torch.testing.assert_close(record.activation_BP[:, 2], model.seen)


class Keywords(nn.Module):
    """Takes some arguments by keyword only, and any others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(D, D)

    def forward(self, inputs_embeds, *, temperature=1.0, **others):
        self.seen = sorted(others)
        return self.a(inputs_embeds) * others["attention_mask"].unsqueeze(2) / temperature


@pytest.mark.parametrize("by_name", [False, True])
def test_a_forward_with_any_keyword_arguments_gets_the_same_ones(by_name):
    model, x = Keywords(), torch.randn(B, T, D)
    mask = (torch.arange(T) < torch.tensor([[2], [5], [3]])).float()
    with ParameterTensorScanner(model) as scanner:
        named = {"inputs_embeds": x} if by_name else {}
        found = model(*() if by_name else (x,), attention_mask=mask, temperature=2.0, **named)
        found.square().sum().backward()
    assert model.seen == ["attention_mask"]
    assert torch.equal(found, model(x, attention_mask=mask, temperature=2.0))
    assert [sequence.tokens for sequence in scanner.collect()[0].sequences] == [2, 5, 3]


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def test_a_wrapper_called_by_position():
    assert_true(Wrapper(Net()), [f"module.{name}" for name in ALL])


def test_frozen_layers_of_a_wrapped_model_called_by_position():
    record, _ = scan(
        Wrapper(Keywords().requires_grad_(False)), torch.randn(B, T, D),
        run=lambda model, x: model(x, attention_mask=torch.ones(B, T)).square().sum().backward(),
    )  # fmt: skip
    assert record.gradient_BP.isfinite().all()
