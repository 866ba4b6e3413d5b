"""Modules called several times, in layers that are recomputed (activation checkpointing)."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump

T, D = 7, 6


class Shared(nn.Module):
    """Layers with one Linear of their own and two shared ones."""

    def __init__(self, layers, run):
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.run = run

    def forward(self, x):
        return self.run(self, x).square().sum()

    def layer(self, number, x):
        return self.second(self.first(self.own[number](x).tanh()).tanh())

    def bare(self, x):
        return self.first(x).tanh()

    def twice(self, x):
        return self.first(self.first(x).tanh()).tanh()


def layers(apply):
    return lambda model, x: apply(model.layer, 2, apply(model.layer, 1, apply(model.layer, 0, x)))


def bare(apply):
    return lambda model, x: apply(model.bare, apply(model.bare, apply(model.bare, x)))


def twice(apply):
    return lambda model, x: apply(model.twice, model.own[0](apply(model.twice, x)))


def dump(folder, run, passes):
    model = Shared(3, run)
    config = DumpConfig(tensors=["input", "grad_output"])
    with TensorDump(model, folder, config, environment={}) as dumped:
        losses = [model(x) for x in passes]
        for loss in losses:
            loss.backward()
        dumped.step()
    found = {}
    with DumpReader(folder) as reader:
        for record in reader.records:
            source = record.source
            found[source.microbatch, source.call, source.module, source.tensor] = reader.load(record)
        assert len(found) == len(reader.records)
    return found


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("run", [layers, bare, twice])
def test_every_gradient_belongs_to_the_call_that_it_is_of(tmp_path, run, reentrant):
    generator = torch.Generator().manual_seed(1)
    passes = [torch.randn(T, D, generator=generator, requires_grad=True) for _ in range(2)]
    plain = dump(tmp_path / "plain", run(lambda function, *args: function(*args)), passes)
    again = dump(
        tmp_path / "again", run(lambda function, *args: checkpoint(function, *args, use_reentrant=reentrant)), passes
    )
    assert plain.keys() == again.keys()
    assert max(call for _, call, _, _ in plain) > 0
    for key, tensor in again.items():
        assert torch.equal(tensor, plain[key]), key
