import pytest
import torch
from benchmarks.quantised_agreement import compare_scans, main, top_overlap
from neuron_statistics import make_statistics

LAYERS, WIDTH = 2, 20


def test_a_scan_agrees_with_itself_and_not_with_other_numbers():
    one, same, other = (make_statistics(LAYERS, WIDTH, seed) for seed in (1, 1, 2))
    assert compare_scans(one, same) == [pytest.approx([1.0] * 4)] * LAYERS
    for correlation, *overlaps in compare_scans(one, other):
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
        make_statistics(LAYERS, WIDTH, tokens=count).save(tmp_path / name)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == code
    said = capsys.readouterr()
    assert ("((2, 20), 30) and ((2, 20), 31)" in said.err) == bool(code)
    if not code:
        lines = said.out.splitlines()
        assert [line.split()[0] for line in lines] == ["layer", "-------", "0", "1", "mean"]
        assert lines[-1].split()[1:] == ["1.0000"] * 4
