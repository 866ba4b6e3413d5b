"""Fingerprints are equal exactly when the results would be."""

from dataclasses import dataclass, field

from pipeline.plan import fingerprint, make_recipe, plain_settings
from pipeline.settings import STAGES

IDENTITIES = {"model": {"config": "c0ffee"}, "data": {"python": "3.11.7"}}


@dataclass
class Inner:
    batch: int = 2


@dataclass
class Outer:
    tokens: int = 3
    label: str = field(default="here", metadata={"fingerprint": False})
    inner: Inner = field(default_factory=Inner)


@dataclass
class Optional:
    tokens: int = 3
    kept: int = field(default=1, metadata={"needs": {"tokens": True}})


def recipe(stage="scan", *, parents=None, cache_keys=IDENTITIES, **changes):
    nodes = {"model": Outer(), "data": 5, "store": 6, "scan": Inner(), "score": 7, "seed": 0} | changes
    return make_recipe(STAGES[stage], nodes, cache_keys, parents or {})


def test_a_recipe_names_everything_that_decides_the_result():
    assert recipe() == {
        "stage": "scan",
        "version": STAGES["scan"].version,
        "settings": {
            "model": {"tokens": 3, "inner": {"batch": 2}},
            "data": 5,
            "store": 6,
            "scan": {"batch": 2},
            "seed": 0,
        },
        "identity": IDENTITIES,
        "parents": {},
    }


def test_only_what_the_stage_reads_enters():
    assert fingerprint(recipe()) == fingerprint(recipe(score=8))
    assert fingerprint(recipe()) != fingerprint(recipe(scan=Inner(3)))
    assert fingerprint(recipe("score", parents={"scan": "a"})) == fingerprint(
        recipe("score", parents={"scan": "a"}, model=Outer(tokens=4))
    )


def test_fields_marked_so_stay_out():
    assert plain_settings(Outer(label="there")) == plain_settings(Outer())


def test_settings_without_effect_stay_out():
    assert plain_settings(Outer(tokens=0, inner=Inner(5))) == {"tokens": 0, "inner": {"batch": 5}}
    assert "kept" not in plain_settings(Optional(tokens=0))
    assert plain_settings(Optional(tokens=3)) == {"tokens": 3, "kept": 1}


def test_it_is_stable_between_versions_of_this_program():
    assert fingerprint({"a": 1}) == "f9d86028c6e0d64e225186f96acb69338b2c59764df79162107f5c4bb34d1310"
