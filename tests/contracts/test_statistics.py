from dataclasses import fields

import pytest
import torch

from stages.artifacts.carve import NeuronStatistics

L, F, R = 2, 7, 19


@pytest.fixture
def statistics():
    generator = torch.Generator().manual_seed(0)

    def sums(dtype=torch.float64):
        return torch.rand(L, F, generator=generator, dtype=dtype)

    return NeuronStatistics(
        tokens=40,
        samples=6,
        samples_with_gradient=5,
        mean_loss=2.25,
        sum_abs=sums(),
        sum_sq=sums(),
        max_abs=sums(),
        active_count=torch.randint(40, (L, F), generator=generator),
        sum_taylor=sums(),
        grad_norm_gate=sums(),
        grad_norm_up=sums(),
        grad_norm_down=sums(),
        weight_norm_down=sums(torch.float32),
        active_bits=torch.randint(256, (L, F, (R + 7) // 8), generator=generator, dtype=torch.uint8),
        reservoir_tokens=R,
    )


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
