import logging

import pytest

from stages.data.config import DataConfig
from stages.data.settings import check_settings


def messages_of(**settings):
    return [str(error) for error in check_settings(DataConfig(**settings))]


def test_the_defaults_are_right():
    assert messages_of() == []
    assert messages_of(kind="text", path="a.jsonl", labels="completion") == []
    assert messages_of(kind="hub", name="a/b", heldout_split="test") == []


def test_every_fault_is_named_at_once():
    assert messages_of(kind="csv", packing="tight", labels="some", separator="x", max_length=1, heldout_share=1.0) == [
        "data.kind has no value 'csv'\n  do:    data.kind= one of python_stdlib, text, hub",
        "data.packing has no value 'tight'\n  do:    data.packing= one of packed, single",
        "data.labels has no value 'some'\n  do:    data.labels= one of full_sequence, completion",
        "data.separator has no value 'x'\n  do:    data.separator= one of eos, blank_line",
        "data.max_length=1 leaves nothing to predict: a sequence has at least 2 tokens\n  do:    data.max_length=256",
        "data.heldout_share=1.0 is not between 0 and 1, both excluded\n  do:    data.heldout_share=0.1",
    ]


def test_fewer_tokens_than_one_sequence():
    assert messages_of(tokens=10, heldout_tokens=20, max_length=30) == [
        "data.tokens=10 is less than one sequence of data.max_length=30 tokens\n  do:    data.tokens=30 or more",
        "data.heldout_tokens=20 is less than one sequence of data.max_length=30 tokens\n"
        "  do:    data.heldout_tokens=30 or more",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"labels": "completion"},
            "data.labels=completion needs conversations, and the standard library is plain text\n"
            "  do:    data.labels=full_sequence, or data=text data.path=a .jsonl file of messages",
        ),
        (
            {"kind": "text"},
            "data.kind=text reads local files, and none is named\n  do:    data.path=a file or a folder",
        ),
        (
            {"kind": "text", "path": "a.txt", "heldout_path": "./a.txt"},
            "data.heldout_path and data.path are the same: a.txt\n"
            "  do:    another one, or null: data.heldout_share of the documents is then held out",
        ),
        (
            {"kind": "hub"},
            "data.kind=hub reads a dataset, and none is named\n  do:    data.name=Salesforce/wikitext",
        ),
        (
            {"kind": "hub", "name": "a/b", "heldout_split": "train"},
            "data.heldout_split and data.split are the same: train\n"
            "  do:    another one, or null: data.heldout_share of the documents is then held out",
        ),
    ],
)
def test_settings_that_do_not_fit_the_source(settings, message):
    assert messages_of(**settings) == [message]


def test_a_setting_of_another_source_warns(caplog):
    with caplog.at_level(logging.WARNING):
        assert messages_of(path="my_texts") == []
    assert caplog.messages == ["data.path=my_texts is ignored: data.kind=python_stdlib"]
