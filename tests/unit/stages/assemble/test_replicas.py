import torch

from models.experts import LayerExperts
from stages.assemble.replicas import divide_by_multiplicity


def test_copies_share_a_down_column():
    units_EN = torch.tensor([[0, 1], [1, 2], [1, 3]])
    multiplicity_F = torch.tensor([1, 3, 1, 1])
    none = torch.empty(0, 5)
    experts = LayerExperts(torch.ones(3, 2, 5), torch.ones(3, 2, 5), torch.ones(3, 5, 2), none, none, none.T)
    shared = divide_by_multiplicity(experts, units_EN, multiplicity_F)
    torch.testing.assert_close(shared.down_EDN[:, 0], torch.tensor([[1, 1 / 3], [1 / 3, 1], [1 / 3, 1]]))
    assert torch.equal(shared.gate_END, experts.gate_END)
