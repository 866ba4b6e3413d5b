from importlib import import_module

import pytest
import torch
from pico_moes import MOES, UNUSUAL_MOES, make_moe

from models.training import find_routers


@pytest.fixture(params=[*MOES, *UNUSUAL_MOES])
def moe(request):
    """A tiny MoE of every architecture in training mode, its routers far from even."""
    torch.manual_seed(1)
    model = make_moe(request.param).train()
    for router in find_routers(model):
        torch.nn.init.normal_(router.weight)
    return model


@pytest.fixture
def replicate(monkeypatch):
    """Make two replicas as nn.DataParallel does, which Trainer uses where one process sees several GPUs; on the CPU."""
    module = import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(module, "_get_device_index", lambda device, _optional: device)
    copies = lambda tensors, *_, **__: [[tensor.detach().clone() for tensor in tensors] for _ in range(2)]  # noqa: E731
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    return lambda model: module.replicate(model, [0, 1])
