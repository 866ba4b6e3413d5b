"""A small network, its batches and training loop, for tests of the watch."""

import pytest
import torch
from torch import nn
from torch.nn import functional

T, D, H, V = 7, 6, 11, 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.middle = nn.Linear(D, H), nn.LayerNorm(H), nn.Linear(H, H)
        self.head = nn.Linear(H, V)

    def forward(self, x):
        return self.head(self.middle(self.norm(self.first(x))).tanh())


def batch(step=0):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(T, D, generator=draw), torch.randint(V, (T,), generator=draw)


def loss_of(model, step=0, lossy=functional.cross_entropy):
    x, y = batch(step)
    return lossy(model(x).float(), y)


def train(model, steps=6, *, lossy=functional.cross_entropy, rate=0.05, clip=None, optimizer=None):
    """A training loop without any call of the watch."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(steps):
        loss_of(model, step, lossy).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def norm_of(*modules):
    gradients = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients).item()


def clipped_step(watch, loss, optimizer, *parts):
    """A step of `parts` with clipped gradients, of which the watch has seen the norm before clipping."""
    loss.backward()
    norm = norm_of(*parts)
    nn.utils.clip_grad_norm_([parameter for part in parts for parameter in part.parameters()], 1e-3)
    optimizer.step()
    assert watch.last.gradient_norm == pytest.approx(norm, rel=1e-5)
    optimizer.zero_grad()


def hooks_of(model):
    """All hooks on a model's modules and parameters."""
    found = []
    for module in model.modules():
        found += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        for parameter in module.parameters(recurse=False):
            found += (parameter._post_accumulate_grad_hooks or {}).values()
    return found
