import gzip
import json

import pytest

from instruments.errors import DataError
from stages.text.config import DataConfig
from stages.text.sources import read_sources

pytest.importorskip("datasets", reason="the optional extra hub is not installed")


@pytest.fixture
def folder(tmp_path, write_jsonl):
    """A dataset of two splits in a local folder, which is read with the same calls as a dataset of the hub."""
    write_jsonl("train.jsonl", [{"text": f"train {number}"} for number in range(40)])
    write_jsonl("test.jsonl", [{"text": "test 0"}, {"text": ""}, {"text": "test 2"}])
    return tmp_path


def read(folder, role="calibration", **settings):
    ((_, documents),) = read_sources(DataConfig(kind="hub", name=str(folder), **settings), role)
    return list(documents)


def test_the_publishers_splits(folder):
    found = read(folder, heldout_split="test")
    assert [document.text for document in found] == [f"train {number}" for number in range(40)]
    heldout = read(folder, "heldout", heldout_split="test")
    assert [(document.name, document.text) for document in heldout] == [
        (f"{folder}[test]:1", "test 0"),
        (f"{folder}[test]:3", "test 2"),
    ]


def test_compressed_conversations_and_a_damaged_file(tmp_path, conversation):
    file = tmp_path / "train.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps({"messages": conversation}).encode()))
    (document,) = read(tmp_path, heldout_share=1e-9)
    assert document.messages == tuple(conversation)
    file.write_bytes(gzip.compress(b'{"text": "a"}\n' * 99_000)[:-50])
    with pytest.raises(DataError, match="cannot read the dataset"):
        read(tmp_path)


@pytest.mark.parametrize("place", ["{}/private.jsonl", "../other/private.jsonl", "file://{}/private.jsonl"])
def test_a_dataset_that_names_files_elsewhere_is_refused(tmp_path, place):
    elsewhere, folder = tmp_path / "other", tmp_path / "dataset"
    for each in (elsewhere, folder):
        each.mkdir()
    (elsewhere / "private.jsonl").write_text('{"text": "secret"}\n')
    header = {"configs": [{"config_name": "default", "data_files": place.format(elsewhere)}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(header)}\n---\n")
    with pytest.raises(DataError):
        read(folder)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"text_column": "body"}, "[train]:1; its columns: text"),
        ({"split": "training"}, "data.name="),
        ({"heldout_split": "validation"}, "data.name="),
        ({"subset": "large"}, "data.subset=large"),
        ({"revision": "v2", "name": "nobody/nothing"}, "data.name=nobody/nothing"),
    ],
)
def test_what_a_dataset_lacks_is_an_error(folder, settings, where):
    with pytest.raises(DataError) as caught:
        read(settings.pop("name", folder), **settings)
    assert where in caught.value.where
