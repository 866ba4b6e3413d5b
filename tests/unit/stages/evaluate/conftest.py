import pytest
import torch

from models.config import MoEShape
from models.ffn import DenseFFN
from models.routing import LinearRouter
from stages.evaluate.baselines import LayerFacts

D, F, E, N, K, S = 6, 14, 4, 3, 2, 1


@pytest.fixture
def facts() -> LayerFacts:
    """A layer cut into E experts of N neurons and S always-on neurons; neuron 13 is dropped."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    order = torch.randperm(F - 1, generator=generator)
    return LayerFacts(
        ffn=DenseFFN(draw(F, D), draw(F, D), draw(D, F), torch.nn.functional.silu),
        neurons_EN=order[: E * N].view(E, N),
        always_S=order[E * N :],
        router=LinearRouter.without_bias(draw(E, D)),
        contribution_F=draw(F).abs(),
        shape=MoEShape(E, N, K, S),
        seed=5,
    )


@pytest.fixture
def x_TD() -> torch.Tensor:
    return torch.randn(9, D, generator=torch.Generator().manual_seed(1))
