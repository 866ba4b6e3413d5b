import importlib.util

import pytest

from stages.text.check import check_data, check_length, check_training
from stages.text.config import DataConfig, SourceConfig
from stages.train.config import TrainConfig


@pytest.fixture
def path(write_jsonl):
    return str(write_jsonl("a.jsonl", [{"text": f"text {number}"} for number in range(40)]))


def remedies(**settings):
    return [error.do for error in check_data(DataConfig(**settings))]


def mixture(*sources, **settings):
    return remedies(kind="mixture", sources=[SourceConfig(**source) for source in sources], **settings)


def test_right_settings(path):
    assert (
        remedies() == remedies(kind="text", path=path) == remedies(kind="hub", name="a/b", heldout_split="test") == []
    )
    assert remedies(labels="generated", max_length=96, temperature=0.7) == []
    sources = {"path": path, "share": 0.4}, {"python_stdlib": True, "share": 0.4}, {"name": "a/b", "share": 0.2}
    assert mixture(*sources) == mixture(*sources, heldout_path=path) == []


@pytest.mark.parametrize(
    ("settings", "do"),
    [
        ({"tokens": 10, "max_length": 30}, "data.tokens=30"),
        ({"sample_tokens": 10, "max_length": 30}, "data.sample_tokens=30"),
        ({"heldout_tokens": 1, "max_length": 30}, "data.heldout_tokens=30"),
        ({"labels": "generated", "prompt_tokens": 20, "max_new_tokens": 45, "max_length": 64}, "data.max_length=65"),
        ({"kind": "text"}, "data.path=FILE_OR_FOLDER"),
        ({"kind": "hub"}, "data.name=Salesforce/wikitext"),
        ({"kind": "hub", "paths": ["a.txt"]}, "data.name=Salesforce/wikitext"),
        ({"kind": "hub", "name": "a/b", "heldout_split": "train"}, "data.heldout_split=null"),
    ],
)
def test_settings_that_contradict_each_other(settings, do):
    assert remedies(**settings) == [do]


def test_sources_that_contradict_each_other(path):
    assert "data.sources=[" in mixture()[0] == mixture(paths=[path])[0]
    assert mixture({"path": path, "name": "a/b"}) == ["data.sources.0.name=null"]
    assert mixture({"path": path, "python_stdlib": True}) == ["data.sources.0.python_stdlib=false"]
    assert mixture({}) == ["data.sources.0.path=FILE_OR_FOLDER"]
    shares = mixture({"path": path, "share": 0.75}, {"name": "a/b", "share": 0.75})
    assert shares == ["data.sources.0.share=0.5 data.sources.1.share=0.5"]
    same = {"name": "a/b", "heldout_split": "train"}
    assert mixture(same) == ["data.sources.0.heldout_split=null"]


def test_faults_of_a_trainings_own_text_name_its_settings(path):
    def faults(*sources):
        training = TrainConfig(sources=[SourceConfig(**source) for source in sources]).own_text(DataConfig())
        return [(error.where, error.do) for error in check_training(training)]

    assert faults({"path": path}) == []
    halved = "train.sources.0.share=0.5 train.sources.1.share=0.5"
    assert faults({"path": path}, {"name": "a/b"}) == [("setting train.sources", halved)]
    ((_where, do),) = faults({"path": "/nowhere"})
    assert do.startswith("train.sources.0.path=")


def test_paths_and_first_documents_of_all_sources_are_checked_at_once(tmp_path, path, write_jsonl):
    wrong = write_jsonl("b.jsonl", [{"body": "one"}])
    first, second, heldout = mixture(
        {"path": str(wrong), "share": 0.5}, {"path": "/nowhere", "share": 0.5}, heldout_path=str(tmp_path / "none")
    )
    assert "data.sources.0.text_column=" in first
    assert second.startswith("data.sources.1.path=")
    assert heldout.startswith("data.heldout_path=")
    assert mixture({"path": str(wrong), "text_column": "body"}, heldout_path=path) == []


def test_a_split_without_a_document(tmp_path, write_jsonl):
    (tmp_path / "empty.txt").write_text(" \n\n")
    for wrong in (tmp_path / "empty.txt", write_jsonl("one.jsonl", [{"text": "text 0"}])):
        assert "data.heldout_share" in remedies(kind="text", path=str(wrong))[-1]
    assert check_data(DataConfig(kind="text", path=str(wrong)), heldout=False) == []


def test_records_whose_text_is_in_another_column(write_jsonl):
    path = write_jsonl("a.jsonl", [{"title": " ", "text": None, "body": f"text {n}"} for n in range(20)])
    (first, *_) = check_data(DataConfig(kind="text", path=str(path)))
    assert first.what.endswith("and 20 records have their text in other columns")
    assert f": {path}:1 with body; {path}:2 with body; " in first.where
    assert first.do == "name one of them: data.text_column= or data.messages_column="


def test_the_optional_package_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert {*remedies(kind="hub", name="a/b")} == {"pip install datasets"}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}


@pytest.mark.parametrize(
    ("source", "longest"),
    [
        pytest.param({"max_position_embeddings": 200, "rope_scaling": YARN}, 800, id="Qwen2.5 with yarn"),
        pytest.param({"max_position_embeddings": 200, "rope_parameters": YARN}, 800, id="transformers 5"),
        pytest.param({"max_position_embeddings": 900, "rope_scaling": YARN}, 900, id="Llama 3.1: stated in full"),
        pytest.param({"max_position_embeddings": 300, "rope_scaling": {"factor": 2.0}}, 600, id="linear"),
        pytest.param({"max_position_embeddings": 300, "rope_parameters": {"rope_theta": 1e4}}, 300, id="plain"),
        pytest.param({"max_position_embeddings": 300, "rope_scaling": "yarn"}, 300, id="damaged"),
        pytest.param({"max_position_embeddings": 300, "rope_scaling": {"factor": float("nan")}}, 300, id="no number"),
    ],
)
def test_sequences_longer_than_the_model_reads(source, longest):
    assert check_length(DataConfig(max_length=longest), source) == []
    (error,) = check_length(DataConfig(max_length=longest + 1), source)
    assert error.do == f"data.max_length={longest}"
