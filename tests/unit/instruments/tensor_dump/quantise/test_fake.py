"""Rounded tensors and their errors."""

import math

import pytest
import torch

from instruments.tensor_dump.config import QUANT_TYPES
from instruments.tensor_dump.rounding import round_into


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_the_error_is_that_of_the_tensor_given_back(quant_type):
    values = torch.randn(7, 70, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()
    rounded, error = round_into(values, quant_type)
    gap = (rounded.double() - values.double()).norm() / values.double().norm()
    assert error.relative_l2 == pytest.approx(float(gap))
    assert error.max_abs == float((rounded.double() - values.double()).abs().max())
    if quant_type == "bf16":
        assert (error.relative_l2, error.sqnr_db) == (0, None)
    else:
        assert error.sqnr_db == pytest.approx(-20 * math.log10(error.relative_l2)) if error.relative_l2 else True


def test_more_bits_cost_less():
    values = torch.randn(64, 320, generator=torch.Generator().manual_seed(1))
    errors = {quant_type: round_into(values, quant_type)[1].relative_l2 for quant_type in QUANT_TYPES}
    assert errors["fp16"] < errors["bf16"] < errors["mxfp8"] < errors["mxfp4"]
    assert errors["bf16"] < errors["hifp8"] < errors["mxfp4"]


def test_zeros_cost_nothing():
    for quant_type in QUANT_TYPES:
        assert round_into(torch.zeros(3, 5), quant_type)[1].relative_l2 == 0
