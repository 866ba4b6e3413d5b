"""Rounding of a layer to the checkpoint's number format."""

import pytest
import torch

from models.experts import ExpertLoop, ExpertWeights
from models.routing import LinearRouter
from stages.project.layer_pass import Outcome, ProjectedLayer

E, N, D, S = 3, 4, 6, 2


def make_loop():
    draw = lambda *size: torch.randn(*size, generator=torch.Generator().manual_seed(len(size) + sum(size)))  # noqa: E731
    experts = ExpertWeights(draw(E, N, D), draw(E, N, D), draw(E, D, N), draw(S, D), draw(S, D), draw(D, S))
    router = LinearRouter.without_bias(draw(E, D))
    return ExpertLoop(experts, torch.arange(E * N).view(E, N), torch.tensor([12, 13]), router, 2, 14, torch.relu)


@pytest.mark.parametrize("down_scale", [1.0, 8.0, 58.0])
def test_down_is_rounded_once_as_the_product_that_is_written(down_scale):
    loop = make_loop()
    layer = ProjectedLayer.of(loop, Outcome(0.1), torch.bfloat16, down_scale)
    written = (layer.experts.down_EDN.float() * down_scale).bfloat16()
    assert torch.equal(written, (loop.experts.down_EDN * down_scale).bfloat16())
    assert layer.experts.gate_END.dtype == torch.bfloat16
    # Later layers get their inputs from the weights that the checkpoint will have.
    torch.testing.assert_close(layer.experts.down_EDN.float(), written.float() / down_scale, rtol=1e-6, atol=0)


def test_float32_is_kept_as_it_is():
    loop = make_loop()
    layer = ProjectedLayer.of(loop, Outcome(0.1), torch.float32, 58.0)
    assert torch.equal(layer.experts.down_EDN, loop.experts.down_EDN)
