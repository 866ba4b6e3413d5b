"""A small model, and dumps of its training steps."""

import torch
from torch import nn

from instruments.tensor_dump.tensor_dump import TensorDump

T, D, F = 7, 6, 11


class Small(nn.Module):
    """Two Linear layers in a row."""

    def __init__(self, features=D, hidden=F):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(features, hidden), nn.Linear(hidden, features)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x).tanh()).square().sum()


def inputs(step, rows=T, features=D):
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(step))


def run(folder, config=None, *, steps=4, model=None, losses=None, rows=T, **arguments):
    """Dump some training steps; returns the closed dump."""
    model = model or Small()
    arguments.setdefault("environment", {})
    with TensorDump(model, folder, config, **arguments) as dump:
        for step in range(steps):
            loss = model(inputs(step, rows, model.layers[0].in_features))
            loss.backward()
            dump.step(losses[step] if losses else loss)
    return dump
