"""The parameter-level scanner on models with unusual code: right norms, or the weight is left out with a reason."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from instruments import device
from instruments.errors import NumericsError
from instruments.parameter_scan.passes import Passes
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


def true_gradients(model, names, ids):
    model.requires_grad_(True)
    weights, found = dict(model.named_parameters()), {name: [] for name in names}
    for sample in ids.split(1):
        model.zero_grad()
        backward(model, sample)
        for name in names:
            found[name].append(weights[name].grad.norm())
    model.zero_grad()
    return {name: torch.stack(norms) for name, norms in found.items()}


def assert_true(model, expected, ids=IDS):
    """Exactly the expected weights have norms, the true ones, and all others are left out; returns the reasons."""
    found = gradients(*(both := scan(model, ids)))
    scanner = both[1]
    assert set(found) == set(expected)
    assert set(scanner.left_out) >= {one.name for one in scanner.parameters} - set(expected)
    assert not set(scanner.left_out) & set(expected)
    truth = true_gradients(model, expected, ids)
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


def test_a_gradient_that_is_changed_while_it_waits_for_others_is_left_out(monkeypatch):
    monkeypatch.setattr(device, "HOSTS", set())

    def double(grad):
        grad.mul_(2)

    model = Net(lambda net, x: x + net.a(x))
    # Before the scanner's hook: it gets the gradient after the scanner.
    model.a.register_forward_hook(lambda _module, _args, output: output.register_hook(double) and None)
    _, scanner = scan(model)
    assert scanner.left_out == {"a.weight": "its input or its output's gradient is changed in place"}


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


def test_a_wrapped_model_called_by_position():
    record, _ = scan(
        Wrapper(Keywords()), torch.randn(B, T, D),
        run=lambda model, x: model(x, attention_mask=torch.ones(B, T)).square().sum().backward(),
    )  # fmt: skip
    assert record.gradient_BP.isfinite().all()


class Tied(Net):
    """The embedding's weight gives the logits, by a function."""

    def forward(self, input_ids):
        return functional.linear(self.b(self.a(self.e(input_ids))), self.e.weight)


def used_twice(net, x):
    return functional.linear(net.a(x), net.a.weight)


def used_before(net, x):
    return net.a(functional.linear(x, net.a.weight))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("model", "name"), [(Tied, "e"), (lambda: Net(used_twice), "a"), (lambda: Net(used_before), "a")]
)
def test_a_weight_also_used_by_a_function_is_left_out(model, name, frozen):
    expected = [own for own in ALL[:3] if own != f"{name}.weight"]
    expected += ["h.weight"] if name == "a" else []
    left_out = assert_true(model().requires_grad_(not frozen), expected)
    assert left_out[f"{name}.weight"] == "linear uses it outside its module"


def test_embeddings_that_share_one_weight_are_left_out():
    class Two(Net):
        def __init__(self):
            super().__init__(lambda net, x: net.a(x + net.other(IDS[:1])))
            self.other = nn.Embedding(V, D)
            self.other.weight = self.e.weight

    left_out = assert_true(Two(), ALL[1:])
    assert left_out == dict.fromkeys(("e.weight", "other.weight"), "e, other share one weight")


def test_looking_at_a_weight_is_no_use_of_it():
    def middle(net, x):
        assert net.a.weight.isfinite().all()
        assert net.a.weight.detach().norm() == net.a.weight.data.norm() > 0
        return net.a(x.to(net.a.weight.dtype))

    assert_true(Net(middle), ALL)


class Scaled(nn.Linear):
    def forward(self, x):
        return functional.linear(x, self.weight * 0.1, self.bias)


def test_a_linear_with_another_forward_is_left_out():
    model = Net()
    model.b = Scaled(D, D)
    left_out = assert_true(model, ("e.weight", "a.weight", "h.weight"))
    assert left_out["b.weight"] == "its class has a forward of its own"


def test_an_embedding_scaled_by_the_frequency_of_its_tokens_is_left_out():
    model = Net()
    model.e = nn.Embedding(V, D, scale_grad_by_freq=True)
    assert_true(model, ALL[1:])


def positions_first(net, x):
    return net.a(x.transpose(0, 1)).transpose(0, 1)


class PositionsFirst(Net):
    def forward(self, input_ids):
        return super().forward(input_ids.T.contiguous()).transpose(0, 1)


class Positions(Net):
    def __init__(self):
        super().__init__(lambda net, x: x + net.a(net.table))
        self.table = nn.Buffer(torch.randn(T, D))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: Net(positions_first), ("e.weight",)),
        (PositionsFirst, ()),
        (Positions, ("e.weight", "b.weight", "h.weight")),
        (Net, ALL),
    ],
)
def test_as_many_samples_as_positions(model, expected):
    """The shape of an input does not tell whether its rows are samples."""
    ids = torch.randint(0, V, (T, T), generator=torch.Generator().manual_seed(2))
    if expected:
        assert_true(model(), expected, ids)
        return
    with ParameterTensorScanner(model_ := model()) as scanner:
        backward(model_, ids)
        with pytest.raises(NumericsError, match="is missing, zero or not finite"):
            scanner.collect()
    assert set(scanner.left_out) == set(ALL)


def test_a_weight_whose_module_never_runs_is_left_out(caplog):
    class Attention(Net):
        def __init__(self):
            super().__init__(lambda net, x: net.attention(x, x, x)[0])
            self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    left_out = assert_true(Attention(), ("e.weight", "b.weight", "h.weight"))
    assert left_out["attention.out_proj.weight"] == "multi_head_attention_forward uses it outside its module"
    assert left_out["a.weight"] == "its module did not run, or no gradient reached it"
    assert "1 weights are left out: a.weight (its module did not run" in caplog.text


@pytest.mark.parametrize("product", ["gram", "direct"])
def test_double_precision(product, monkeypatch):
    monkeypatch.setattr(Passes, "product", product)
    record, _ = scan(Net().double())
    assert_true(Net().double(), ALL)
    expected, _ = scan(Net())
    torch.testing.assert_close(record.activation_BP, expected.activation_BP, rtol=1e-5, atol=0)


def test_complex_weights_are_left_out():
    model = Net(lambda net, x: net.a(x.to(torch.complex64)).abs())
    model.a = nn.Linear(D, D, dtype=torch.complex64)
    assert assert_true(model, ("e.weight", "b.weight", "h.weight")) == {"a.weight": "complex weights are not measured"}


def test_a_parametrized_weight_is_not_computed_more_often():
    """spectral_norm runs its power iteration at every reading of the weight, which changes the model's result."""

    def losses(scanned):
        model = Net()
        parametrizations.spectral_norm(model.a)
        parametrizations.weight_norm(model.b)
        parametrizations.weight_norm(model.h)
        with ParameterTensorScanner(model) if scanned else nullcontext() as scanner:
            found = [model(IDS).sum() for _ in range(3)]
            found[-1].backward()
        if scanned:
            assert scanner.left_out == {}
            assert scanner.collect()[0].gradient_BP.isfinite().all()
        return torch.stack(found)

    assert torch.equal(losses(scanned=True), losses(scanned=False))


def test_labels_of_a_model_that_does_not_shift_them(caplog):
    class Classifier(Net):
        def forward(self, input_ids, labels):
            logits = super().forward(input_ids)
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    labels = torch.full((B, T), -100)
    labels[0, 0], labels[1, 3] = 1, 3
    record, scanner = scan(Classifier(), IDS, lambda model, ids: model(ids, labels=labels).backward())
    assert [sequence.name for sequence in record.sequences] == ["step 1, sample 1", "step 1, sample 2"]
    assert scanner.skipped == ["step 1, sample 3"]
    assert "samples without a supervised token are skipped: step 1, sample 3" in caplog.text


class Results(dict):
    pass


@pytest.mark.parametrize("kind", [Results, SimpleNamespace, None])
def test_outputs_whose_tensors_are_not_found(kind):
    class Losses(Net):
        def forward(self, input_ids):
            self.loss = super().forward(input_ids).logsumexp(-1).sum()
            return None if kind is None else kind(loss=self.loss)

    record, _ = scan(Losses(), IDS, lambda model, ids: (model(ids), model.loss.backward()))
    expected, _ = scan(Net())
    assert torch.equal(record.gradient_BP, expected.gradient_BP)
