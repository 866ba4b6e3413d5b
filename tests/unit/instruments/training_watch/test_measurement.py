"""watch_model with outputs, parameters and modules of unusual kinds: training goes on, with right numbers."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from unit.instruments.training_watch.watched_net import D, H, Net, T, V, batch, loss_of, norm_of
from unit.instruments.training_watch.watched_net import train as train_unseen

from instruments.training_watch.step_log import WatchConfig
from tiny_onn import watch_model


def train(model, steps=3):
    """Findings of the steps, without those on outputs and parameters that are not there on purpose."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.01), []
    with watch_model(model, optimizer) as watch:
        for step in range(steps):
            loss_of(model, step).backward()
            norm = norm_of(model)
            optimizer.step()
            assert watch.last.gradient_norm == pytest.approx(norm, rel=1e-5)
            optimizer.zero_grad()
            found += watch.last.anomalies
    return [one for one in found if one.kind not in {"outputs_unseen", "no_gradient"}]


def test_outputs_split_over_processes(mesh):
    model, whole = (nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, V)) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    outputs = []
    for one in (model, whole):
        with watch_model(one) as watch:
            loss_of(one).backward()
            outputs.append(watch.step().outputs)
    assert outputs[0] == outputs[1]


def test_replicas_on_several_devices():
    model, (x, _y) = Net(), batch()
    with watch_model(model) as watch:
        model(x)
        functional_call(model, {name: one.to("meta") for name, one in model.named_parameters()}, x.to("meta"))
        found = {(name, low.device.type) for (name, *_), (low, _high) in watch.measurement.peaks.items()}
    assert found == {(name, kind) for name in ("first", "norm", "middle", "head") for kind in ("cpu", "meta")}


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


def test_frozen_unused_tied_and_sparse_parameters():
    model = Net()
    model.first.requires_grad_(False)
    model.unused = nn.Linear(2, 3)
    model.sparse = nn.Embedding(9, D, sparse=True)
    model.again = model.middle
    ids = torch.tensor([1, 4, 4, 2, 0, 8, 1])
    with watch_model(model) as watch:
        functional.cross_entropy(model(model.sparse(ids)), batch()[1]).backward()
        report = watch.step()
    assert set(report.layers) == {"sparse", "norm", "middle", "head"}
    assert report.layers["sparse"] == pytest.approx(model.sparse.weight.grad.to_dense().norm().item(), rel=1e-6)
    assert report.layers["middle"] == pytest.approx(norm_of(model.middle), rel=1e-6)
    assert report.anomalies == ()


def test_parameters_without_memory():
    model = Net()
    model.unused = nn.Linear(3, 2, device="meta")
    parts = dict(model._modules)
    model._modules = {"unused": parts.pop("unused"), **parts}
    assert train(model) == []
    lazy = nn.Sequential(nn.LazyLinear(H), nn.Tanh(), nn.LazyLinear(V))
    with watch_model(lazy):
        lazy(batch()[0])
    lazy = nn.Sequential(nn.LazyLinear(H), nn.LazyLinear(V))
    with watch_model(lazy) as watch:
        lazy(batch()[0]).sum().backward()
        assert watch.step().layers.keys() == {"0", "1"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_wide_and_complex_parameters(dtype):
    model = nn.Sequential(nn.Linear(D, H, dtype=dtype), nn.Linear(H, V, dtype=dtype))
    with watch_model(model) as watch:
        model(batch()[0].to(dtype)).abs().square().mean().backward()
        report = watch.step()
    assert report.gradient_norm == pytest.approx(norm_of(model), rel=1e-6)
    assert (report.outputs.keys(), report.anomalies) == ({"0", "1"}, ())


def test_norms_of_16_bit_gradients_are_summed_in_float32():
    model = Net().to(torch.bfloat16)
    with watch_model(model, config=WatchConfig(exploding=1e9)) as watch:
        loss = functional.cross_entropy(model(batch()[0].bfloat16()).float(), batch()[1])
        (loss * 1e-3).backward()
        report = watch.step()
    squares = sum(p.grad.double().square().sum() for p in model.parameters())
    assert report.gradient_norm == pytest.approx(math.sqrt(squares), rel=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # raised by torch itself during tracing
@pytest.mark.parametrize("how", ["wrapped", "before", "part"])
def test_under_torch_compile_outputs_are_reported_as_unseen(how, caplog):
    model = Net()
    torch._dynamo.reset()
    trained = torch.compile(model, backend="eager", fullgraph=True) if how in {"wrapped", "before"} else model
    if how == "part":
        model.middle = torch.compile(model.middle, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    watch = watch_model(model if how == "before" else trained, optimizer)
    train_unseen(trained, 5, optimizer=optimizer)
    (message,) = [record.message for record in caplog.records if record.name.startswith("instruments")]
    count = 1 if how == "part" else 4
    assert message.startswith(f"step {int(how == 'before')}: the outputs of {count} modules are unseen: ")
    assert watch.last.gradient_norm > 0.1
    assert watch.next_step == 5


class Attention(Net):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(H, 1, batch_first=True)

    def forward(self, x):
        h = self.first(x)[None]
        return self.head(self.middle(self.norm(self.attention(h, h, h)[0])))[0]


@pytest.mark.parametrize("name", ["attention", "middle"])
def test_modules_that_use_weights_of_submodules_are_found(name):
    model = Attention()
    if name == "middle":
        nn.utils.parametrizations.weight_norm(model.middle)
        model.middle.bias.data[0] = math.nan
    else:
        model.attention.in_proj_bias.data[0] = math.nan
    with watch_model(model) as watch:
        loss_of(model).backward()
        assert watch.step().anomalies[0].where[0] == name


def test_the_first_output_that_is_not_finite_is_found_under_a_checkpoint():
    model, (x, y) = Net(), batch()
    model.middle.weight.data[0, 0] = math.nan
    body = nn.Sequential(model.first, model.norm, model.middle)
    model.forward = lambda x: model.head(checkpoint(body, x, use_reentrant=False))
    with watch_model(model) as watch:
        functional.cross_entropy(model(x.requires_grad_()), y).backward()
        findings = watch.step().anomalies
    assert [one.where[0] for one in findings if one.message.startswith("NaN first in")] == ["middle"]
    assert list(watch.last.outputs) == ["first", "norm", "middle", "head"]


@pytest.mark.parametrize("how", ["step", "optimizer"])
def test_weights_that_were_not_finite_before_a_step_are_named_also_after_it(how):
    """The step makes all weights NaN."""
    model = Net()
    model.head.bias.data[0] = math.nan
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch_model(model, optimizer) as watch:
        loss_of(model).backward()
        if how == "step":
            watch.step(optimizer)
        optimizer.step()
    assert watch.last.anomalies[0].where == ("head",)
    assert watch.last.anomalies[0].message.startswith("1 of 8 sampled parameters were not finite before the step: head")


class Masked(Net):
    """Adds a causal mask, made by a module, to the scores of an attention."""

    def __init__(self, fill):
        super().__init__()
        self.mask = nn.Identity()
        self.fill = fill

    def forward(self, x):
        mask = self.mask(torch.full((T, T), self.fill).triu(1))
        h = self.first(x)
        return self.head(self.middle((h @ h.mT / 9 + mask).softmax(-1) @ self.norm(h)))


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min])
def test_a_mask_is_no_finding_and_hides_none(fill):
    model = Masked(fill)
    assert train(model) == []
    model.middle.weight.data[0, 0] = math.nan
    with watch_model(model) as watch:
        loss_of(model).backward()
        assert watch.step().anomalies[0].where[0] == "middle"
