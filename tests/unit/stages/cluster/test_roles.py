import torch

from stages.cluster.layer import split_neurons

MEASURE = torch.tensor([0.1, 0.9, 0.3, 0.8, 0.2, 0.7])
SCORES = torch.tensor([6.0, 1.0, 4.0, 2.0, 5.0, 3.0])


def listed(roles):
    return [neurons.tolist() for neurons in roles]


def test_the_highest_stay_on_and_all_others_are_routed():
    assert listed(split_neurons(MEASURE, SCORES, always_on=2, slots=4)) == [[1, 3], [0, 2, 4, 5], []]
    assert listed(split_neurons(MEASURE, SCORES, always_on=2, slots=400)) == [[1, 3], [0, 2, 4, 5], []]


def test_the_lowest_scored_of_the_others_are_dropped():
    assert listed(split_neurons(MEASURE, SCORES, always_on=2, slots=3)) == [[1, 3], [0, 2, 4], [5]]
    assert listed(split_neurons(MEASURE, SCORES, always_on=0, slots=2)) == [[], [0, 4], [1, 2, 3, 5]]


def test_ties_go_to_the_lower_index():
    flat = torch.zeros(5)
    assert listed(split_neurons(flat, flat, always_on=1, slots=3)) == [[0], [1, 2, 3], [4]]
