from dataclasses import fields

import pytest
import torch
from neuron_statistics import make_statistics

from stages.artifacts.carve import NeuronStatistics


@pytest.fixture
def statistics():
    bits_LFr = torch.arange(2 * 7 * 3, dtype=torch.uint8).view(2, 7, 3)
    return make_statistics(2, 7, samples_with_gradient=5, active_bits=bits_LFr, reservoir_tokens=19)


def test_round_trip_keeps_values_and_number_formats(tmp_path, statistics):
    statistics.save(tmp_path)
    read = NeuronStatistics.load(tmp_path)
    for spec in fields(NeuronStatistics):
        written, found = getattr(statistics, spec.name), getattr(read, spec.name)
        if isinstance(written, torch.Tensor):
            assert found.dtype == written.dtype
            assert torch.equal(found, written)
        else:
            assert found == written
            assert type(found) is type(written)


def test_equal_contents_are_equal_files(tmp_path, statistics):
    files = set()
    for _ in range(6):
        statistics.save(tmp_path)
        files.add((tmp_path / NeuronStatistics.FILE).read_bytes())
    assert len(files) == 1
