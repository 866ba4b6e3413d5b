import pytest
import torch

from instruments.errors import ContractError
from models.config import MoEShape
from stages.artifacts.carve import Partition, PoolPartition, load_partition

L, E, N, F, S = 3, 5, 4, 20, 2
NEURONS = torch.stack([torch.arange(N) + start for start in (0, 4, 0, 3, 8)]).int()
HOME = torch.tensor([0, 0, 2, 2, 2], dtype=torch.int32)  # no experts from layer 1; layer 2 has neuron 3 twice
ALWAYS_ON = torch.tensor([[12, 13], [0, 14], [18, 19]], dtype=torch.int32)


def test_round_trip(tmp_path):
    PoolPartition(F, NEURONS, HOME, ALWAYS_ON, "by hand").save(tmp_path)
    read = load_partition(tmp_path, MoEShape(E, N, 2, S, "global_pool"))
    assert (read.width, read.description, read.sizes) == (F, "by hand", (L, E, N, S, F))
    for name, tensor in (("neurons", NEURONS), ("home", HOME), ("always_on", ALWAYS_ON)):
        assert torch.equal(getattr(read, name), tensor)


def test_each_layer_knows_what_it_gives():
    partition = PoolPartition(F, NEURONS, HOME, ALWAYS_ON)
    assert partition.given == [2, 0, 3]
    assert [torch.equal(partition.neurons_of(layer), NEURONS[layer == HOME]) for layer in range(L)] == [True] * L
    assert partition.neurons_of(1).shape == (0, N)
    assert partition.multiplicity.shape == (L, F)
    assert partition.multiplicity[0].tolist() == [1] * 8 + [0] * 12
    assert not partition.multiplicity[1].any()
    assert partition.multiplicity[2].tolist() == [1, 1, 1, 2, 1, 1, 1, 0, 1, 1, 1, 1] + [0] * 8


def test_the_topology_decides_what_is_read(tmp_path):
    PoolPartition(F, NEURONS, HOME, ALWAYS_ON).save(tmp_path)
    with pytest.raises(ContractError, match="cannot read Partition"):
        load_partition(tmp_path, MoEShape(E, N, 2, S))
    Partition(F, NEURONS[None, :2], ALWAYS_ON[:1]).save(tmp_path)
    assert load_partition(tmp_path, MoEShape(2, N, 2, S)).sizes == (1, 2, N, S, F)


def changed(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("neurons", "home", "what", "where"),
    [
        (NEURONS, HOME.flip(0), "home layers do not ascend within 0..2", "pool partition"),
        (NEURONS, changed(HOME, 4, 3), "home layers do not ascend within 0..2", "pool partition"),
        (NEURONS, HOME[:4], "pool partition shapes (5, 4), (4,), (3, 2)", ""),
        (changed(NEURONS, (4, 0), F), HOME, "neuron index outside 0..19", "pool partition, layer 2"),
        (changed(NEURONS, (0, 0), 12), HOME, "an always-on neuron is also in an expert", "pool partition, layer 0"),
        (changed(NEURONS, (3, 1), 3), HOME, "a neuron is twice in one expert", "pool partition, layer 2"),
    ],
)
def test_what_is_no_partition_is_refused(neurons, home, what, where):
    with pytest.raises(ContractError) as error:
        PoolPartition(F, neurons, home, ALWAYS_ON)
    assert (error.value.what, error.value.where) == (what, where)
