import json
from dataclasses import replace

import pytest

from instruments.errors import DataError
from stages.text.config import DataConfig, Source, SourceConfig, calibration_only
from stages.text.hub import find_commit
from stages.text.sources import calibration_cache_key, data_cache_key


def ask(_question, find):
    return find()


def test_local_files_count_by_content_and_by_how_they_are_read(write_jsonl, tmp_path):
    """Lines of JSON are plain text in a .txt file, records in a .jsonl file."""
    path = write_jsonl("a.jsonl", [{"text": "one"}])
    key = data_cache_key(DataConfig(kind="text", path=str(path)))
    assert data_cache_key(DataConfig(kind="text", path=str(path.rename(tmp_path / "b.jsonl")))) == key
    assert data_cache_key(DataConfig(kind="text", path=str(tmp_path))) == key
    assert data_cache_key(DataConfig(kind="mixture", sources=[SourceConfig(path=str(tmp_path))])) == key
    other = (tmp_path / "b.jsonl").rename(tmp_path / "b.txt")
    assert data_cache_key(DataConfig(kind="text", path=str(other))) != key
    write_jsonl("b.jsonl", [{"text": "two"}])
    assert data_cache_key(DataConfig(kind="text", path=str(tmp_path))) != key


def test_a_chat_template_counts_by_content_for_every_kind_of_source(write_jsonl, tmp_path):
    (tmp_path / "a").mkdir()
    path, template = write_jsonl("a/a.jsonl", [{"text": "one"}]), tmp_path / "chat.jinja"
    for where in ({"kind": "text", "path": str(path)}, {"kind": "hub", "name": str(path.parent)}):
        keys = [data_cache_key(DataConfig(**where))]
        for content in ("one", "two"):
            template.write_text(content)
            keys.append(data_cache_key(DataConfig(**where, chat_template=str(template))))
        assert len({json.dumps(key) for key in keys}) == 3


def test_of_heldout_files_the_calibration_text_depends_on_what_they_exclude(write_jsonl):
    """Documents that are in both texts; for text and for a mixture of local files."""
    path = write_jsonl("a.jsonl", [{"text": "one"}, {"text": "two"}, {"text": "three"}])
    plain = DataConfig(kind="text", path=str(path))
    mixed = DataConfig(kind="mixture", sources=[SourceConfig(path=str(path))])
    for data in (plain, mixed):
        found, whole = [], []
        for heldout in (["four"], ["five", "six"], ["two"], ["seven", "two"], ["three"]):
            named = write_jsonl("b.jsonl", [{"text": text} for text in heldout])
            settings = replace(data, heldout_path=str(named))
            whole.append(json.dumps(data_cache_key(settings)))
            found.append(calibration_cache_key(settings, data_cache_key(settings), ask))
        four, six, two, seven, three = found
        assert (four, two) == (six, seven)
        assert len({json.dumps(key) for key in (four, two, three)}) == 3
        assert len({*whole}) == 5


def test_documents_are_compared_once_for_the_same_files(write_jsonl):
    path, heldout = write_jsonl("a.jsonl", [{"text": "one"}]), write_jsonl("b.jsonl", [{"text": "two"}])
    data, asked = DataConfig(kind="text", path=str(path), heldout_path=str(heldout)), []

    def recall(question, _find):
        asked.append(question)
        return ""

    for wanted in (data, replace(data, heldout_tokens=500, tokens=9), replace(data, text_column="body")):
        calibration_cache_key(wanted, data_cache_key(wanted), recall)
    write_jsonl("b.jsonl", [{"text": "three"}])
    calibration_cache_key(data, data_cache_key(data), recall)
    first, second, third, fourth = asked
    assert first == second
    assert len({first, third, fourth}) == 3


def test_text_of_the_hub_depends_on_the_whole_heldout_text(write_jsonl):
    """It is not here yet, so it cannot be compared."""
    heldout = write_jsonl("b.jsonl", [{"text": "two"}])
    hub = DataConfig(kind="mixture", sources=[SourceConfig(name="a/b")], heldout_path=str(heldout))
    assert calibration_cache_key(hub, data_cache_key(hub), ask) == data_cache_key(hub)


def test_a_record_that_cannot_be_read_ends_the_comparison_of_its_source(write_jsonl):
    text = write_jsonl("a.jsonl", [{"text": "one"}, {"text": 3}, {"text": "two"}])
    alone = DataConfig(kind="text", path=str(text))

    def key_beside(*records):
        data = replace(alone, heldout_path=str(write_jsonl("b.jsonl", [{"text": text} for text in records])))
        return calibration_cache_key(data, data_cache_key(data), ask)

    assert key_beside("two") == calibration_cache_key(alone, data_cache_key(alone), ask) != key_beside("one")
    with pytest.raises(DataError, match="column 'text' holds int"):
        key_beside("two", 3)


def test_the_standard_library_counts_by_version(monkeypatch):
    key = data_cache_key(DataConfig())
    assert data_cache_key(DataConfig()) == key
    monkeypatch.setattr("stages.text.python_stdlib.EXCLUDED_MODULES", frozenset({"json"}))
    assert data_cache_key(DataConfig()) != key


def test_a_local_dataset_counts_by_the_content_and_the_names_of_its_files(write_jsonl, tmp_path):
    keys = []
    for name, text in (("train", "one"), ("train", "two"), ("test", "two")):
        path = write_jsonl(f"{name}.jsonl", [{"text": text}])
        keys.append(str(data_cache_key(DataConfig(kind="hub", name=str(tmp_path)))))
        path.unlink()
    assert len(set(keys)) == 3


def test_a_dataset_counts_by_the_commit_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_commit(Source(kind="hub", name="a/b")) is None
    (tmp_path / "datasets--a--b/refs").mkdir(parents=True)
    (tmp_path / "datasets--a--b/refs/main").write_text("c0ffee")
    assert data_cache_key(DataConfig(kind="hub", name="a/b"))["sources"] == ["c0ffee"]


def test_held_out_text_that_is_named_leaves_only_its_own_documents_out():
    plain = DataConfig(kind="hub", name="a/b")
    assert calibration_only(replace(plain, heldout_tokens=5)) == calibration_only(plain)
    assert calibration_only(replace(plain, heldout_share=0.5)) != calibration_only(plain)
    named = replace(plain, heldout_split="test")
    assert calibration_only(named) != calibration_only(plain)
    assert calibration_only(replace(named, heldout_split="validation", heldout_share=0.5)) == calibration_only(named)
    local = DataConfig(kind="text", path="texts")
    assert calibration_only(replace(local, heldout_path="a.txt")) == calibration_only(local)


def test_a_chat_template_of_heldout_text_alone_carves_nothing_again(write_jsonl, tmp_path):
    template, keys = tmp_path / "chat.jinja", []
    sources = [SourceConfig(path=str(write_jsonl("a.jsonl", [{"text": "one"}])), chat_template="plain", share=0.5),
               SourceConfig(python_stdlib=True, share=0.5)]  # fmt: skip
    heldout = str(write_jsonl("b.jsonl", [{"text": "two"}]))
    data = DataConfig(kind="mixture", sources=sources, heldout_path=heldout, chat_template=str(template))
    for content in ("one", "two"):
        template.write_text(content)
        whole = data_cache_key(data)
        keys.append((whole, calibration_cache_key(data, whole, lambda _question, find: find())))
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] == keys[1][1]
