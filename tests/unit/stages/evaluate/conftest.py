import pytest
import torch

from models.config import MoEShape
from models.ffn import DenseFFN
from models.routing import LinearRouter
from stages.evaluate.baselines import LayerFacts

D, F, E, N, K, S = 6, 14, 4, 3, 2, 1


def draw_facts(hidden: int, width: int, shape: MoEShape) -> LayerFacts:
    """A layer of random weights, cut at random into experts and always-on neurons; further neurons are dropped."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    routed = shape.experts * shape.n
    order = torch.randperm(routed + shape.always_on, generator=generator)
    return LayerFacts(
        ffn=DenseFFN(draw(width, hidden), draw(width, hidden), draw(hidden, width), torch.nn.functional.silu),
        neurons_EN=order[:routed].view(shape.experts, shape.n),
        always_S=order[routed:],
        router=LinearRouter.without_bias(draw(shape.experts, hidden)),
        contribution_F=draw(width).abs(),
        shape=shape,
        seed=5,
    )


@pytest.fixture
def facts() -> LayerFacts:
    """A layer cut into E experts of N neurons and S always-on neurons; neuron 13 is dropped."""
    return draw_facts(D, F, MoEShape(E, N, K, S))


@pytest.fixture
def wide() -> LayerFacts:
    """A wider layer, all of whose neurons are in an expert or always on."""
    return draw_facts(12, 60, MoEShape(9, 5, 3, 15))


@pytest.fixture
def x_TD() -> torch.Tensor:
    return torch.randn(9, D, generator=torch.Generator().manual_seed(1))
