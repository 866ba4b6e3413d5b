"""A small network and its batches, for tests of the watch."""

import torch
from torch import nn

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
