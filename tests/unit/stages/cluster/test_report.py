import pytest
import torch

from models.config import MoEShape
from stages.cluster.config import ClusterConfig
from stages.cluster.stage import describe, share_of


def test_share_of_a_layer():
    contribution_F = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert share_of(contribution_F, torch.tensor([1, 3])) == pytest.approx(0.6)
    assert share_of(contribution_F, torch.tensor([], dtype=torch.int64)) == 0.0
    assert share_of(torch.zeros(4), torch.tensor([1])) == 0.0


@pytest.mark.parametrize(
    ("method", "shape", "said"),
    [
        ("router_aware", MoEShape(4, 6, 2, 8), "always-on neurons by s_p"),
        ("router_aware", MoEShape(4, 5, 2, 8), "always-on and dropped neurons by s_p"),
        ("router_aware", MoEShape(4, 8, 2, 0), "no neuron is always on or dropped"),
        ("rank", MoEShape(4, 6, 2, 8), "always-on and dealt-out neurons by s_p"),
        ("rank", MoEShape(4, 8, 2, 0), "dealt-out neurons by s_p"),
        ("router_aware", MoEShape(4, 6, 2, 8, "global_pool"), "always-on and pooled neurons by s_p"),
        ("rank", MoEShape(4, 6, 2, 0, "global_pool"), "pooled neurons by s_p"),
    ],
)
def test_nothing_is_said_to_decide_that_did_not(method, shape, said):
    cluster = ClusterConfig(method=method)
    score = "s_p" if cluster.reads_score(shape, 32) else None
    assert describe(cluster, shape, 32, score) == f"experts by {method}; {said}"
