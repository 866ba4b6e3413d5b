import pytest
import torch
from benchmarks.quantised_agreement import compare_scans, main, top_overlap

from stages.artifacts.carve import NeuronStatistics

LAYERS, WIDTH, TOKENS = 2, 20, 30


def draw_statistics(seed, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.rand(LAYERS, WIDTH, generator=generator, dtype=torch.float64)

    sums = ("sum_abs", "sum_sq", "max_abs", "sum_taylor", "grad_norm_gate", "grad_norm_up", "grad_norm_down")
    return NeuronStatistics(
        tokens=tokens,
        samples=3,
        samples_with_gradient=3,
        mean_loss=1.0,
        active_count=(draw() * tokens).long(),
        active_bits=torch.zeros(LAYERS, WIDTH, 1, dtype=torch.uint8),
        reservoir_tokens=5,
        **{name: draw() for name in sums},
        weight_norm_down=draw().float(),
    )


def test_a_scan_agrees_with_itself_and_not_with_other_numbers():
    assert compare_scans(draw_statistics(1), draw_statistics(1)) == [pytest.approx([1.0] * 4)] * LAYERS
    for correlation, *overlaps in compare_scans(draw_statistics(1), draw_statistics(2)):
        assert abs(correlation) < 0.7
        assert min(overlaps) < 1


def test_overlap_counts_the_best_neurons():
    first = torch.arange(8.0)[None]
    assert top_overlap(first, -first, 0.25) == [0.0]
    assert top_overlap(first, first.roll(1), 0.5) == [0.75]


@pytest.mark.parametrize(("tokens", "code"), [(30, 0), (31, 1)])
def test_the_command_prints_a_row_a_layer_and_refuses_another_text(tmp_path, capsys, tokens, code):
    for name, count in (("a", 30), ("b", tokens)):
        (tmp_path / name).mkdir()
        draw_statistics(3, count).save(tmp_path / name)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == code
    said = capsys.readouterr()
    assert ("((2, 20), 30) and ((2, 20), 31)" in said.err) == bool(code)
    if not code:
        lines = said.out.splitlines()
        assert [line.split()[0] for line in lines] == ["layer", "-------", "0", "1", "mean"]
        assert lines[-1].split()[1:] == ["1.0000"] * 4
