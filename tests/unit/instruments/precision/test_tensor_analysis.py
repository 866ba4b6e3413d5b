"""Errors of a tensor in number formats: shares counted by hand, sums against loops, odd tensors."""

import json

import pytest
import torch

from instruments.errors import ConfigError
from instruments.precision.tensor_analysis import analyze_tensor, notes_of, rows_of, to_json
from instruments.precision.verdict import Verdict

FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loss(found, name):
    return next(one for one in found.losses if one.format == name)


def test_a_healthy_tensor():
    found = analyze_tensor(normal(7, 300), FORMATS)
    assert [found.verdict(name) for name in FORMATS[:2]] == [Verdict.OK, Verdict.OK]
    assert loss(found, "bfloat16").normalised_l2 == pytest.approx(2**-8 / 3**0.5 * 0.72, rel=0.1)
    assert loss(found, "float16").sqnr_db == pytest.approx(loss(found, "bfloat16").sqnr_db + 18.06, abs=0.5)
    assert found.nonfinite == 0
    # fp8 without scaling loses digits below 2^-6, P(|x| < 2^-6) = 1.2 %, and all of them below 2^-9.
    assert 0.005 < loss(found, "float8_e4m3fn").flushed < 0.02
    assert loss(found, "float8_e4m3fn").underflow < 0.005
    assert found.verdict("float8_e4m3fn") is Verdict.OK


@pytest.mark.parametrize(
    ("name", "edge"),
    [("float8_e4m3fn", 464.0), ("float8_e5m2", 61440.0), ("float16", 65520.0), ("bfloat16", 3.3961775e38)],
)
def test_overflow_begins_half_a_unit_above_the_largest_value(name, edge):
    values = torch.tensor([edge * (1 - 2**-20), -edge, edge * 0.9, -1.0])
    found = analyze_tensor(values, target_dtype=name)
    assert [one.format for one in found.losses] == [name]
    assert found.losses[0].overflow == 1
    assert found.verdict(name) is Verdict.SEVERE
    assert analyze_tensor(values[2:], [name]).losses[0].overflow == 0


@pytest.mark.parametrize("name", FORMATS)
def test_underflow_is_what_torch_rounds_to_zero(name):
    dtype = getattr(torch, name)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    values = smallest * torch.tensor([0.3, 0.5, 0.6, 1.0, 1.5])
    assert loss(analyze_tensor(values, [name]), name).underflow == (values.to(dtype).float() == 0).sum() / 5 == 0.4


def test_scaled_by_its_largest_value():
    values = normal(7, 300) * 1e-7
    plain, scaled = (analyze_tensor(values, ["e4m3"], scale=scale).losses[0] for scale in (None, "amax"))
    assert (plain.underflow, plain.verdict, plain.scale) == (1.0, Verdict.SEVERE, 1.0)
    assert scaled.scale == pytest.approx(448 / values.abs().max().item())
    assert (scaled.overflow, scaled.verdict) == (0, Verdict.OK)
    assert scaled.normalised_l2 < 0.03
    large = analyze_tensor(values * 1e20, target_dtype=torch.float8_e5m2, scale="amax").losses[0]
    assert (large.overflow, large.verdict) == (0, Verdict.OK)


def test_sums_are_those_of_a_loop():
    values = normal(5, 400).abs()
    found = analyze_tensor(values, ["bfloat16"])
    last, first = found.reductions
    assert (last.axis, last.length, first.axis, first.length) == (-1, 400, -2, 5)
    total = torch.zeros(5, dtype=torch.bfloat16)
    for addend in values.bfloat16().unbind(1):
        total += addend
    exact = values.double().sum(1)
    assert last.one_by_one == pytest.approx(float((total.double() - exact).norm() / exact.norm()), rel=1e-6)
    assert last.fp32 < 1e-6
    assert first.one_by_one < 0.01


def test_a_running_sum_that_stands_still():
    values = torch.ones(11, 1000)
    (sums, _) = analyze_tensor(values, ["bfloat16"]).reductions
    assert sums.stagnant == pytest.approx((1000 - 256) / 1000)  # 256 + 1 = 256 in bfloat16
    assert sums.one_by_one == pytest.approx(1 - 0.256)
    assert sums.advice


def test_odd_tensors():
    empty = analyze_tensor(torch.empty(0, 3))
    assert (empty.reductions, empty.ranges, empty.notes) == ([], [], ["the tensor is empty"])
    scalar = analyze_tensor(torch.tensor(3.0))
    assert (scalar.shape, scalar.reductions) == ((), [])
    broken = analyze_tensor(torch.tensor([1.0, float("nan"), float("inf")]), ["float16"])
    assert broken.nonfinite == 2
    assert broken.notes == ["2 of 3 values are not finite and left out"]
    assert broken.verdict("float16") is Verdict.OK
    zeros = analyze_tensor(torch.zeros(3, 4))
    found = [empty, scalar, broken, zeros]
    json.dumps(to_json(found), allow_nan=False)
    assert len(rows_of(found)) == 3 * 4 + 1
    assert notes_of(found)
    for tensor in (torch.arange(3), torch.ones(3).to_sparse(), torch.ones(3, dtype=torch.complex64)):
        with pytest.raises(ConfigError):
            analyze_tensor(tensor, name="odd")
    for settings in ({"formats": ["int4"]}, {"scale": "max"}):
        with pytest.raises(ConfigError):
            analyze_tensor(torch.ones(3), **settings)
