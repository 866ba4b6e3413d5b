"""Scales of the experts' down columns, and the size of the router logits."""

from types import SimpleNamespace

import pytest
import torch
from unit.stages.calibration.test_alignment import APART, E, N, make_loop

from models.config import MoEShape
from models.routing import LOGIT_STD, GateKind, LinearRouter
from stages.artifacts.carve import Partition
from stages.assemble.config import AssembleConfig
from stages.assemble.stage import RouterReport, column_scales, logit_std, scaled, summarise


@pytest.mark.parametrize("gate", GateKind)
def test_logits_are_as_large_as_asked(gate):
    assert logit_std(AssembleConfig(), gate) == LOGIT_STD[gate]
    assert logit_std(AssembleConfig(logit_std=0.7), gate) == 0.7
    assert logit_std(AssembleConfig(logit_std=0.0), gate) == 0.0


def test_every_column_gets_its_own_scale():
    experts, scale_EN = make_loop(GateKind.SIGMOID).experts, torch.rand(E, N) + 0.5
    down_EDN = scaled(experts, scale_EN).down_EDN
    torch.testing.assert_close(down_EDN[2, :, 1], experts.down_EDN[2, :, 1] * scale_EN[2, 1])
    assert scaled(experts, torch.ones(E, N)) is experts


def test_all_layers_together_scale_a_pool():
    partition = Partition(12, APART.int(), torch.tensor([0, 0, 0, 1]).int(), torch.zeros(2, 0).int(), pooled=True)
    router, load_E, ones_EN = LinearRouter.without_bias(torch.zeros(E, 6)), torch.ones(E), torch.ones(E, N)
    moments = torch.tensor([[[1.0], [2.0]], [[5.0], [6.0]]]).expand(2, 2, E).double()
    reports = {layer: RouterReport(router, ones_EN, moments[layer], load_E) for layer in range(2)}
    scales = column_scales(reports, partition)
    assert [tuple(scale.shape) for scale in scales.values()] == [(3, N), (1, N)]
    assert torch.cat([*scales.values()]).unique().tolist() == [0.75]


def test_experts_of_a_layer_that_writes_nothing_are_not_missed():
    partition = Partition(12, APART.int(), torch.tensor([0, 0, 0, 1]).int(), torch.zeros(2, 0).int())
    router, load_E = LinearRouter.without_bias(torch.zeros(E, 6)), torch.tensor([0.0, *[1.0] * (E - 1)])
    checkpoint = SimpleNamespace(target=SimpleNamespace(architecture="Any"), shape=MoEShape(E, N, 2, 0))
    reports = {
        layer: RouterReport(router, torch.ones(E, N), torch.zeros(2, E), load_E, silent=layer == 1) for layer in (0, 1)
    }
    _shape, silent, unused = summarise(reports, checkpoint, partition, AssembleConfig()).notes
    assert "'dense_layers=[1]'" in silent
    assert unused.startswith("1 experts are chosen by no")
