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
