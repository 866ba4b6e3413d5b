import time

import pytest

from instruments.errors import DataError
from stages.text.config import DataConfig
from stages.text.hub import read_hub

datasets = pytest.importorskip("datasets", reason="the optional extra hub is not installed")


@pytest.fixture
def folder(tmp_path, write_jsonl):
    """A dataset of two splits in a local folder, which is read with the same calls as a dataset of the hub."""
    write_jsonl("train.jsonl", [{"text": f"train {number}"} for number in range(40)])
    write_jsonl("test.jsonl", [{"text": "test 0"}, {"text": ""}, {"text": "test 2"}])
    return tmp_path


def read(side="calibration", **settings):
    return list(read_hub(DataConfig(kind="hub", **settings), side))


def message_of(**settings):
    with pytest.raises(DataError) as caught:
        read(**settings)
    return str(caught.value)


def test_the_publishers_splits(folder):
    settings = {"name": str(folder), "heldout_split": "test"}
    assert [document.text for document in read(**settings)] == [f"train {number}" for number in range(40)]
    heldout = read("heldout", **settings)
    assert [(document.name, document.text) for document in heldout] == [
        (f"{folder}[test]:1", "test 0"),
        (f"{folder}[test]:3", "test 2"),
    ]


def test_a_share_of_one_split(folder):
    calibration, heldout = read(name=str(folder)), read("heldout", name=str(folder))
    assert len(calibration) + len(heldout) == 40
    assert {document.text for document in calibration}.isdisjoint(document.text for document in heldout)
    assert heldout


def test_conversations(tmp_path, write_jsonl, conversation):
    write_jsonl("train.jsonl", [{"messages": conversation, "id": 3}])
    (document,) = read(name=str(tmp_path), heldout_split=None, heldout_share=1e-9)
    assert document.messages == tuple(conversation)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"text_column": "body"}, "a record has neither column 'messages' nor column 'body'"),
        ({"split": "training", "heldout_split": "validation"}, "no split training and no split validation"),
        ({"subset": "large"}, "cannot read the dataset: BuilderConfig 'large' not found. Available: ['default']"),
        ({"name": "nobody/nothing"}, "Couldn't reach 'nobody/nothing' on the Hub (OfflineModeIsEnabled)"),
    ],
)
def test_what_a_dataset_lacks_is_said(folder, settings, what):
    assert what in message_of(**{"name": str(folder)} | settings).splitlines()[0]


def test_a_hub_that_cannot_be_reached_is_given_up_soon(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.perf_counter()
    assert message_of(name="nobody/nothing", revision="main").startswith(
        "the hub cannot be reached at http://127.0.0.1:9, and the dataset is streamed from it"
    )
    assert time.perf_counter() - started < 5
