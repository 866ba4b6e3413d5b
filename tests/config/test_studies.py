"""The studies behind the READMEs' figures name settings that exist."""

import pytest
from studies.real_model import HEALING, ROWS, row_settings

from pipeline.overrides import override_errors
from pipeline.settings import compose, register_schema
from pipeline.words import quote


@pytest.mark.parametrize("row", ROWS)
def test_the_settings_of_a_row_compose(row):
    register_schema()
    words = [quote(name, value) for name, value in {**row_settings(row, "a b.jsonl", "c.jsonl"), **HEALING}.items()]
    assert not override_errors(words, sweep=False)
    settings, _folder = compose(["data=mixture", "train=heal", *words])
    assert settings.data.sources[0].path == "a b.jsonl"
    assert sum(source.share for source in settings.data.sources) == pytest.approx(1)
