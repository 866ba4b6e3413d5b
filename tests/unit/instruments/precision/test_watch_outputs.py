"""`watch_model` with outputs, parameters and calls of unusual kinds: training goes on, with right numbers."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from unit.instruments.precision.watched_net import D, H, Net, V, batch

from instruments.precision import watch_model


def train(model, steps=3):
    """Findings of the steps, without those on outputs and parameters that are not there on purpose."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.01), []
    with watch_model(model) as watch:
        for step in range(steps):
            functional.cross_entropy(model(batch(step)[0]).float(), batch(step)[1]).backward()
            norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]).item()
            optimizer.step()
            assert watch.last.gradient_norm == pytest.approx(norm, rel=1e-5)
            optimizer.zero_grad()
            found += watch.last.anomalies
    return [one for one in found if one.kind not in {"outputs_unseen", "no_gradient"}]


class Side(Net):
    """A module on the side, with a weight of its own, has outputs of another kind."""

    def __init__(self, change):
        super().__init__()
        self.side = nn.PReLU()
        self.side.register_forward_hook(lambda _module, _args, output: change(output))

    def forward(self, x):
        h = self.first(x)
        self.side(h.tanh())
        return self.head(h)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.to(torch.float8_e4m3fn),
        lambda h: h.detach().to_sparse_csr(),
        lambda h: h.detach().to_sparse(),
        lambda h: torch.nested.nested_tensor([h[:2], h[2:]]),
        lambda h: torch.nested.nested_tensor([h[:2], h[2:]], layout=torch.jagged),
        lambda h: h.detach().to_mkldnn(),
        lambda h: h.double() * 1e60,
    ],
    ids=["float8", "csr", "coo", "nested", "jagged", "mkldnn", "above float32"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
def test_outputs_that_torch_finds_no_range_of_are_left_out(change):
    assert train(Side(change)) == []


def test_the_range_of_a_nested_output():
    model = nn.Sequential(nn.Linear(D, H))
    with watch_model(model) as watch:
        output = model(torch.nested.nested_tensor([torch.ones(3, D), torch.ones(5, D)], layout=torch.jagged))
        output.values().square().mean().backward()
        watch.step()
    low, high = watch.last.outputs["0"]
    assert (low, high) == (output.values().min().item(), output.values().max().item())


def test_gradients_by_torch_func():
    """Per-sample gradients under vmap: their tensors must not be kept, and are no step."""
    model, (x, y) = Net(), batch()
    parameters = {name: one.detach() for name, one in model.named_parameters()}

    def loss(parameters, x, y):
        return functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    expected = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    with watch_model(model) as watch:
        for _ in range(2):
            found = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert watch.last is None
    assert train(model) == []


def test_parameters_without_memory():
    model = Net()
    model.unused = nn.Linear(3, 2, device="meta")
    parts = dict(model._modules)
    model._modules = {"unused": parts.pop("unused"), **parts}
    assert train(model) == []
    lazy = nn.Sequential(nn.LazyLinear(H), nn.Tanh(), nn.LazyLinear(V))
    with watch_model(lazy):
        lazy(batch()[0])
    with watch_model(nn.Sequential(nn.LazyLinear(H), nn.LazyLinear(V))) as watch:
        watch.measurement.model(batch()[0]).sum().backward()
        assert watch.step().layers.keys() == {"0", "1"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.live, self.dead = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, h):
        return h + self.live(h) + 1e-13 * self.dead(h)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch.compile
@pytest.mark.parametrize("how", ["plain", "checkpoint", "compiled"])
def test_a_dead_layer_whose_outputs_are_not_seen(how):
    """Reentrant checkpoints run without gradients first, and compiled blocks run no hooks."""
    model = nn.Sequential(nn.Linear(D, H), Block(), nn.Linear(H, V))
    if how == "compiled":
        model[1].compile(backend="eager")
    if how == "checkpoint":
        block = model[1].forward
        model[1].forward = lambda h: checkpoint(block, h, use_reentrant=True)
    assert [(one.kind, one.where) for one in train(model)] == [("dead_layer", ("1.dead",))]
