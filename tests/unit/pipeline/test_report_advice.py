"""The settings that the page names for another point of its curve give one."""

from types import SimpleNamespace

import pytest

from pipeline.check import validate
from pipeline.report.sections import another_width
from pipeline.settings import compose, register_schema

LAYERS = 4  # of the embedded model


@pytest.fixture
def carve():
    """The shape that these words select for the embedded model, as in an evaluation."""
    register_schema()

    def carve(*words):
        checked = validate(compose(words)[0])
        return SimpleNamespace(shape=checked.shape, width=checked.request.width, layers=[None] * LAYERS)

    return carve


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["active=0.25"],
        ["active=0.75"],
        ["experts=null", "n=null"],
        ["experts=100", "n=256"],
        ["experts=16", "n=48", "top_k=3", "always_on=256"],
        ["experts=4", "n=64", "top_k=4"],
        ["dense_layers=[0]", "active=0.6"],
        ["topology=global_pool"],
        ["topology=global_pool", "experts=8", "n=128", "top_k=2", "always_on=64"],
    ],
)
def test_another_width_of_the_same_experts(carve, caplog, words):
    before = carve(*words)
    after = carve(*words, *another_width(before).split())
    assert (after.shape.experts, after.shape.n) == (before.shape.experts, before.shape.n)
    assert after.shape.active_width != before.shape.active_width
    assert [message for message in caplog.messages if "ignored" in message] == []


def test_nothing_is_advised_if_the_dense_layers_are_more(carve):
    assert not another_width(carve("dense_layers=[0,1,2]", "active=0.8", "assemble.target=tiny_onn"))
