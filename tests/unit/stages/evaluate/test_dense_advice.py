"""Layers that the note of evaluate advises to leave dense: the same command accepts the settings."""

import json
import shlex
from functools import partial

import pytest

from models.source import EMBEDDED
from pipeline.check import find_errors, validate
from pipeline.settings import compose, register_schema
from stages.evaluate.report import Evaluation, LayerResult, costly_layers
from stages.evaluate.stage import target_with_dense

COSTLY = 3  # of the four layers


@pytest.fixture
def note_of(tmp_path):
    """The note on the layers of a carve of the embedded model, the last of which costs most."""
    register_schema()

    def note(*words, others=0.02):
        checked = validate(compose(words)[0])
        shape = checked.shape
        (tmp_path / "config.json").write_text(json.dumps({"model_type": checked.request.target(shape).model_type}))
        layers = [
            LayerResult(0.1, 0.5, 1.0, 0, saved=None if index in shape.dense_layers else others + (index == COSTLY))
            for index in range(4)
        ]
        target_for = partial(target_with_dense, EMBEDDED, tmp_path, shape)
        (found,) = costly_layers(Evaluation(shape, checked.request.width, 1, {}, {}, layers, target_for=target_for))
        return found

    return note


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ([], "'dense_layers=[3]' assemble.target=tiny_onn"),
        (["always_on=0"], "'dense_layers=[3]'"),
        (["assemble.target=tiny_onn"], "'dense_layers=[3]'"),
    ],
)
def test_the_advice_is_accepted(note_of, words, advice):
    assert f"that of layer 3 (1.0200): {advice} leaves them dense" in note_of(*words)
    assert find_errors(compose([*words, *shlex.split(advice)])[0]) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["active=0.25"], "only 25% of the neurons are active"),
        (["dense_layers=[0]", "always_on=0"], "only 48% of the neurons are active"),
        (["topology=global_pool"], "one pool serves all layers"),
    ],
)
def test_nothing_is_advised_where_no_layer_can_stay_dense(note_of, words, reason):
    assert note_of(*words).endswith(f"that of layer 3 (1.0200); no more layers can stay dense, since {reason}")


def test_no_layer_is_named_where_the_carve_costs_nothing(note_of):
    wanted = "each layer's carve costs -0.1000 nats on average, too little for a comparison of layers"
    assert note_of("always_on=0", others=-0.35) == note_of("assemble.target=tiny_onn", others=-0.35) == wanted
