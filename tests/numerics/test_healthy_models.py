"""Instruments accuse no healthy model: 25 of 6 kinds; one of each kind in the quick suite."""


import healthy_models
import pytest

from instruments.precision import auto_diff
from instruments.precision.verdict import Verdict

QUICK = {"cnn residual", "lstm deep", "vit", "encoder torch", "decoder llama", "moe plain"}
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in healthy_models.MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_auto_diff_is_content(name):
    for precision, mode in (("bf16", "autocast"), ("fp16", "cast")):
        diff = auto_diff(healthy_models.make(name), healthy_models.batch_of(name), precision=precision, mode=mode)
        assert diff.verdict is Verdict.OK, str(diff)
