import torch
from benchmarks.quantised_agreement import compare_scans, main, top_overlap

from stages.artifacts.carve import NeuronStatistics
from stages.score.config import ScoreConfig

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


def test_a_scan_agrees_with_itself():
    agreement = compare_scans(draw_statistics(1), draw_statistics(1), ScoreConfig())
    for column in (agreement.score, *agreement.terms.values(), *agreement.overlap.values()):
        torch.testing.assert_close(torch.tensor(column), torch.ones(LAYERS))


def test_scans_of_other_numbers_do_not():
    agreement = compare_scans(draw_statistics(1), draw_statistics(2), ScoreConfig(method="contribution"))
    assert all(abs(correlation) < 0.7 for correlation in agreement.score)
    assert all(overlap < 1 for overlap in agreement.overlap[0.25])


def test_overlap_counts_the_best_neurons():
    first = torch.arange(8.0)[None]
    assert top_overlap(first, -first, 0.25) == [0.0]
    assert top_overlap(first, first.roll(1), 0.5) == [0.75]


def test_the_command_prints_a_row_a_layer(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        draw_statistics(3).save(tmp_path / name)
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--normalisation", "rank"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("layer    ρ score    ρ activation")
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "mean"]
    assert lines[-1].split()[1:] == ["1.0000"] * 7


def test_scans_of_another_text(tmp_path, capsys):
    for name, tokens in (("a", 30), ("b", 31)):
        (tmp_path / name).mkdir()
        draw_statistics(3, tokens).save(tmp_path / name)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().err == (
        "the scans have (layers, neurons), tokens of ((2, 20), 30) and ((2, 20), 31)\n  do:    scan the same\n"
    )
