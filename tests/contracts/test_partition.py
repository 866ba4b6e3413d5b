import pytest
import torch

from instruments.errors import ContractError
from models.routing import LinearRouter
from stages.artifacts.carve import Partition, Routers

L, E, N, F, S = 3, 5, 4, 20, 2
NEURONS = torch.stack([torch.arange(N) + start for start in (0, 4, 0, 3, 8)]).int()
HOME = torch.tensor([0, 0, 2, 2, 2], dtype=torch.int32)  # no experts from layer 1; layer 2 has neuron 3 twice
ALWAYS_ON = torch.tensor([[12, 13], [0, 14], [18, 19]], dtype=torch.int32)


def changed(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("always_on", [ALWAYS_ON, ALWAYS_ON[:, :0]], ids=["always on", "none always on"])
def test_round_trip(tmp_path, always_on, pooled):
    Partition(F, NEURONS, HOME, always_on, pooled, "by hand").save(tmp_path)
    read = Partition.load(tmp_path)
    experts = E if pooled else 3
    assert (read.description, read.pooled, read.sizes) == ("by hand", pooled, (L, experts, N, always_on.shape[1], F))
    for name, tensor in (("neurons", NEURONS), ("home", HOME), ("always_on", always_on)):
        assert torch.equal(getattr(read, name), tensor)
        assert getattr(read, name).dtype == torch.int32


def test_equal_contents_are_equal_files(tmp_path):
    files = set()
    for _ in range(6):
        Partition(F, NEURONS, HOME, ALWAYS_ON).save(tmp_path)
        files.add((tmp_path / Partition.FILE).read_bytes())
    assert len(files) == 1


def test_each_layer_knows_its_experts_and_those_of_its_router():
    pool, partition = (Partition(F, NEURONS, HOME, ALWAYS_ON, pooled) for pooled in (True, False))
    assert pool.given == partition.given == [2, 0, 3]
    for layer in range(L):
        own = NEURONS[layer == HOME]
        assert torch.equal(pool.neurons_of(layer), own)
        assert torch.equal(pool.routed(layer), NEURONS)
        assert torch.equal(partition.routed(layer), own)
    assert pool.multiplicity.shape == (L, F)
    assert pool.multiplicity[0].tolist() == [1] * 8 + [0] * 12
    assert not pool.multiplicity[1].any()
    assert pool.multiplicity[2].tolist() == [1, 1, 1, 2, 1, 1, 1, 0, 1, 1, 1, 1] + [0] * 8


def test_layers_that_stay_dense_drop_nothing():
    mixed = Partition(F, NEURONS, HOME, changed(ALWAYS_ON, 1, -1))
    assert (mixed.layers, mixed.carved_layers) == (L, [0, 2])
    assert mixed.multiplicity.shape == (2, F)
    assert mixed.dropped == (F - 8 - S) + (F - 11 - S)


def test_routers_of_layers_that_stay_dense_are_zeros():
    rows_ED = torch.randn(E, 7, generator=torch.Generator().manual_seed(0))
    routers = Routers.of({1: LinearRouter.without_bias(rows_ED)}, 3, torch.float32, 0.5)
    assert torch.equal(routers.rows, torch.stack([0 * rows_ED, rows_ED, 0 * rows_ED]))
    assert routers.bias.shape == (3, E)


@pytest.mark.parametrize(
    ("neurons", "home", "always_on", "what", "where"),
    [
        (NEURONS, HOME.flip(0), ALWAYS_ON, "home layers do not ascend within 0..2", "partition"),
        (NEURONS, changed(HOME, 4, 3), ALWAYS_ON, "home layers do not ascend within 0..2", "partition"),
        (NEURONS, HOME[:4], ALWAYS_ON, "partition shapes (5, 4), (4,), (3, 2)", ""),
        (changed(NEURONS, (4, 0), F), HOME, ALWAYS_ON, "neuron index outside 0..19", "partition, layer 2"),
        (changed(NEURONS, (0, 2), -1), HOME, ALWAYS_ON, "neuron index outside 0..19", "partition, layer 0"),
        (changed(NEURONS, (0, 0), 12), HOME, ALWAYS_ON, "an always-on neuron is also in an expert",
         "partition, layer 0"),
        (changed(NEURONS, (3, 1), 3), HOME, ALWAYS_ON, "a neuron is twice in one expert", "partition, layer 2"),
        (NEURONS, HOME, changed(ALWAYS_ON, (0, 0), 13), "a neuron is twice in one expert", "partition, layer 0"),
    ],
)  # fmt: skip
def test_what_is_no_partition_is_refused(neurons, home, always_on, what, where):
    with pytest.raises(ContractError) as error:
        Partition(F, neurons, home, always_on)
    assert (error.value.what, error.value.where) == (what, where)


@pytest.mark.parametrize(
    ("damage", "what"),
    [(lambda path: path.unlink(), "missing"), (lambda path: path.write_bytes(path.read_bytes()[:-3]), "damaged")],
)
def test_a_partition_that_is_not_there_or_truncated(tmp_path, damage, what):
    Partition(F, NEURONS, HOME, ALWAYS_ON).save(tmp_path)
    damage(tmp_path / Partition.FILE)
    with pytest.raises(ContractError, match=f"cannot read Partition: {Partition.FILE} is .*{what}") as error:
        Partition.load(tmp_path)
    assert error.value.where == str(tmp_path / Partition.FILE)
    assert error.value.do == "run the stage that writes it again, with fresh=true"
