import pytest
import torch

from instruments.errors import ContractError
from models.routing import LinearRouter
from stages.artifacts.carve import STAYS_DENSE, NeuronStatistics, Partition, Routers

L, E, N, F, S = 2, 3, 4, 20, 5
NEURONS = torch.stack([torch.arange(E * N).view(E, N), torch.arange(E * N).view(E, N) + 1]).int()
ALWAYS_ON = torch.tensor([[12, 13, 14, 15, 16], [0, 14, 15, 16, 19]], dtype=torch.int32)


def changed(layer, expert, slot, neuron):
    neurons = NEURONS.clone()
    neurons[layer, expert, slot] = neuron
    return neurons


@pytest.mark.parametrize("always_on", [ALWAYS_ON, ALWAYS_ON[:, :0]], ids=["always on", "none always on"])
def test_round_trip(tmp_path, always_on):
    Partition(F, NEURONS, always_on).save(tmp_path)
    read = Partition.load(tmp_path)
    assert read.width == F
    assert torch.equal(read.neurons, NEURONS)
    assert torch.equal(read.always_on, always_on)
    assert read.neurons.dtype == read.always_on.dtype == torch.int32


def test_multiplicity_counts_the_experts_of_each_neuron():
    copies = Partition(F, changed(1, 2, 3, 4), ALWAYS_ON).multiplicity
    assert copies[0].tolist() == [1] * 12 + [0] * 8
    assert copies[1].tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_layers_that_stay_dense_hold_nothing_and_drop_nothing(tmp_path):
    dense = torch.full_like(NEURONS[:1], STAYS_DENSE)
    nothing = torch.full_like(ALWAYS_ON[:1], STAYS_DENSE)
    Partition(F, torch.cat([dense, NEURONS]), torch.cat([nothing, ALWAYS_ON])).save(tmp_path)
    mixed, plain = Partition.load(tmp_path), Partition(F, NEURONS, ALWAYS_ON)
    assert (mixed.layers, mixed.carved_layers) == (L + 1, [1, 2])
    assert torch.equal(mixed.multiplicity, plain.multiplicity)
    assert mixed.dropped == plain.dropped == L * (F - E * N - S)


def test_routers_of_layers_that_stay_dense_are_zeros():
    rows_ED = torch.randn(E, 7, generator=torch.Generator().manual_seed(0))
    routers = Routers.of({1: LinearRouter.without_bias(rows_ED)}, 3, torch.float32, 0.5)
    assert torch.equal(routers.rows, torch.stack([0 * rows_ED, rows_ED, 0 * rows_ED]))
    assert routers.bias.shape == (3, E)


@pytest.mark.parametrize(
    ("neurons", "always_on", "what", "layer"),
    [
        (changed(1, 0, 2, 20), ALWAYS_ON, "neuron index outside 0..19", 1),
        (changed(0, 0, 2, -1), ALWAYS_ON, "neuron index outside 0..19", 0),
        (changed(1, 0, 0, 2), ALWAYS_ON, "a neuron is twice in one expert", 1),
        (changed(0, 1, 3, 14), ALWAYS_ON, "an always-on neuron is also in an expert", 0),
        (NEURONS, torch.where(ALWAYS_ON == 16, 15, ALWAYS_ON), "a neuron is twice in one expert", 0),
        (NEURONS, ALWAYS_ON[:1], "partition shapes (2, 3, 4) and (1, 5)", None),
        (NEURONS[0], ALWAYS_ON, "partition shapes (3, 4) and (2, 5)", None),
    ],
)
def test_what_is_no_partition_is_refused(neurons, always_on, what, layer):
    with pytest.raises(ContractError) as error:
        Partition(F, neurons, always_on)
    assert error.value.what == what
    assert error.value.where == ("" if layer is None else f"partition, layer {layer}")


def test_another_contract_is_refused(tmp_path):
    Partition(F, NEURONS, ALWAYS_ON).save(tmp_path)
    (tmp_path / Partition.FILE).rename(tmp_path / NeuronStatistics.FILE)
    with pytest.raises(ContractError) as error:
        NeuronStatistics.load(tmp_path)
    assert str(error.value).startswith("expected NeuronStatistics version 2, found Partition version 2")


@pytest.mark.parametrize(
    ("damage", "what"),
    [(lambda path: path.unlink(), "missing"), (lambda path: path.write_bytes(path.read_bytes()[:-3]), "truncated")],
)
def test_a_partition_that_is_not_there_or_truncated(tmp_path, damage, what):
    Partition(F, NEURONS, ALWAYS_ON).save(tmp_path)
    damage(tmp_path / Partition.FILE)
    with pytest.raises(ContractError, match=f"cannot read Partition: {Partition.FILE} is .*{what}") as error:
        Partition.load(tmp_path)
    assert error.value.where == str(tmp_path / Partition.FILE)
    assert error.value.do == "run the stage that writes it again, with fresh=true"
