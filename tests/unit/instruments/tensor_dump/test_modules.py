"""Models with tensors that cannot be dumped: the rest is dumped, and the manifest says what is missing."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump

T, D, F = 7, 6, 11
EVERYTHING = DumpConfig(tensors=["input", "weight", "output", "grad_output"])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "dump"


def dump(model, folder, config=EVERYTHING, x=None):
    with TensorDump(model, folder, config, environment={}) as running:
        output = model(torch.ones(T, D) if x is None else x)
        if output.requires_grad:
            output.sum().backward()
        running.step()
    return running.manifest


def tensors_of(folder, module):
    """Names of a module's tensors; all are read."""
    with DumpReader(folder) as reader:
        for record in reader.records:
            reader.load(record)
        return {record.source.tensor for record in reader.records if record.source.module == module}


def test_complex_tensors(folder, caplog):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.inside = nn.Linear(D, F), nn.Linear(F, F, dtype=torch.complex64)

        def forward(self, x):
            return self.inside(torch.fft.fft(self.before(x))).abs()

    manifest = dump(Spectral(), folder)
    assert tensors_of(folder, "before") == set(EVERYTHING.tensors)
    assert tensors_of(folder, "inside") == set()
    assert manifest.not_dumped == {"inside": dict.fromkeys(EVERYTHING.tensors, "complex numbers")}
    assert (manifest.never_fired, manifest.missing) == ([], {})
    assert "1 modules are not dumped completely: inside: input, weight," in caplog.text


def test_a_parametrized_weight_is_not_read(folder):
    def losses(scanned):
        torch.manual_seed(0)
        model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(D, F)), nn.Linear(F, D))
        found = [model(torch.ones(T, D)).sum() for _ in range(2)]
        if scanned:
            manifest = dump(model, folder)
            assert set(manifest.not_dumped) == {"0"}
            assert set(manifest.not_dumped["0"]) == {"weight"}
            assert manifest.missing == {}
        else:
            model(torch.ones(T, D))
        return torch.stack([*found, model(torch.ones(T, D)).sum()])

    assert torch.equal(losses(scanned=True), losses(scanned=False))
    assert tensors_of(folder, "0") == {"input", "output", "grad_output"}


class WithBias(nn.Linear):
    def forward(self, x):
        return functional.linear(x, self.weight), self.bias


class Dictionary(nn.Linear):
    def forward(self, x):
        return {"y": super().forward(x)}


def test_a_linear_that_returns_more_than_a_tensor(folder):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = WithBias(D, F), Dictionary(F, D)

        def forward(self, x):
            return self.b(sum(self.a(x)))["y"]

    manifest = dump(Model(), folder)
    assert tensors_of(folder, "a") == set(EVERYTHING.tensors)
    assert tensors_of(folder, "b") == {"input", "weight"}
    assert manifest.not_dumped == {"b": dict.fromkeys(("output", "grad_output"), "the output is of type dict")}
    assert manifest.missing == {}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_part(folder):
    model = nn.Sequential(nn.Linear(D, F), torch.jit.script(nn.Sequential(nn.Linear(F, F), nn.ReLU())))
    manifest = dump(model, folder)
    assert tensors_of(folder, "0") == set(EVERYTHING.tensors)
    assert manifest.unseen_weights == ["1.0.weight"]


def test_a_linear_called_with_a_nested_tensor(folder):
    nested = torch.nested.nested_tensor([torch.ones(3, D), torch.ones(T, D)], layout=torch.jagged)
    with torch.no_grad():
        manifest = dump(nn.Sequential(nn.Linear(D, F)), folder, x=nested)
    assert manifest.not_dumped == {"0": dict.fromkeys(EVERYTHING.tensors, "the input is a nested tensor")}


class Coder(nn.Module):
    """A model whose forward is never called."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, F), nn.Linear(F, D)

    def training_step(self, x):
        return self.decoder(self.encoder(x)).square().mean()


def test_calls_without_gradients_outside_a_forward_pass_are_an_evaluation(folder):
    model = Coder()
    with TensorDump(model, folder, environment={}) as running:
        model.training_step(torch.ones(T, D)).backward()
        with torch.no_grad():
            model.training_step(torch.ones(T, D))
        running.step()
    records = DumpReader(folder).select(module="encoder", tensor="input")
    assert [record.source.evaluation for record in records] == [False, True]
