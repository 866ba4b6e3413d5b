"""Pictures of a dump's tensors show what numpy counts."""

import numpy as np
import torch
from matplotlib.axes import Axes

from instruments.tensor_dump.command import draw_channels, draw_histograms

T, D = 41, 7


def test_bars_are_numpys_histogram(tmp_path, monkeypatch):
    drawn, plain = [], Axes.hist
    monkeypatch.setattr(Axes, "hist", lambda *args, **kwargs: drawn.append(plain(*args, **kwargs)))
    values = torch.randn(T, D, generator=torch.Generator().manual_seed(0))
    values[3, 2], values[5, 1] = torch.nan, torch.inf
    draw_histograms([("a", values), ("b", torch.full((3,), torch.nan))], tmp_path / "out.png")
    ((counts, edges, (polygon,)),) = drawn
    finite = values[values.isfinite()].numpy()
    expected, expected_edges = np.histogram(finite, 120)
    assert np.array_equal(counts, expected)
    assert np.array_equal(edges, expected_edges)
    heights = polygon.get_xy()[1 : 2 * len(counts) : 2, 1]
    assert np.array_equal(heights[expected > 0], expected[expected > 0])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_channels_are_ranges_and_percentiles(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Axes, "fill_between", lambda _panel, _x, low, high, **_looks: drawn.append((low, high)))
    monkeypatch.setattr(Axes, "legend", lambda *_args, **_looks: None)
    values = torch.randn(3, T, D, generator=torch.Generator().manual_seed(0))
    draw_channels([("a", values), ("none", torch.empty(0, D))], tmp_path / "out.png")
    rows = values.reshape(-1, D)
    for found, share in zip((*drawn[0], *drawn[1]), (0, 1, 0.01, 0.99), strict=True):
        assert np.allclose(found, rows.quantile(share, dim=0), rtol=1e-5)
    assert len(drawn) == 2
