import importlib.util

from stages.text.cache_key import check_first_records
from stages.text.config import DataConfig


def messages_of(**settings):
    return [str(error) for error in check_first_records(DataConfig(**{"kind": "text", **settings}))]


def test_the_faults_of_all_files_are_named_at_once(tmp_path, write_jsonl):
    folder = tmp_path / "texts"
    folder.mkdir()
    write_jsonl("texts/a.jsonl", [{"text": "one"}, {"body": "two"}])
    write_jsonl("texts/b.jsonl", [{"text": "one"}])
    (folder / "c.jsonl").write_text("{\n", encoding="utf-8")
    column, broken, missing = messages_of(path=str(folder), heldout_path=str(tmp_path / "none"))
    assert f"  where: {folder}/a.jsonl:2; its columns: body\n" in column
    assert f"  where: {folder}/c.jsonl:1, character 3\n" in broken
    assert missing.startswith(f"no file and no folder {tmp_path}/none\n  where: data.heldout_path, ")


def test_an_empty_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(" \n\n", encoding="utf-8")
    (error,) = messages_of(path=str(path))
    assert error.startswith(f"the text is empty\n  where: data.path={path}")


def test_readable_text_has_no_fault(tmp_path, write_jsonl):
    write_jsonl("a.jsonl", [{"text": f"text {number}"} for number in range(40)])
    (tmp_path / "b.txt").touch()
    assert messages_of(path=str(tmp_path)) == messages_of(kind="python_stdlib") == []


def test_plain_text_where_conversations_are_needed(write_jsonl):
    path = write_jsonl("a.jsonl", [{"text": "one"}])
    (error,) = messages_of(path=str(path), labels="completion")
    assert error.startswith(f"data.labels=completion needs conversations, and this is plain text\n  where: {path}:1")


def test_plain_heldout_text_may_stand_beside_conversations(write_jsonl, conversation):
    path = write_jsonl("a.jsonl", [{"messages": conversation}])
    heldout = write_jsonl("b.jsonl", [{"text": "one"}])
    assert messages_of(path=str(path), heldout_path=str(heldout), labels="completion") == []


def test_too_few_documents_to_hold_some_out(write_jsonl):
    path = write_jsonl("a.jsonl", [{"text": "text 0"}])
    (error,) = messages_of(path=str(path))
    assert error.startswith("no document falls to the heldout text")


def test_held_out_text_is_asked_for_only_where_it_is_read(write_jsonl):
    path = write_jsonl("a.jsonl", [{"text": "text 0"}])
    assert check_first_records(DataConfig(kind="text", path=str(path)), heldout=False) == []


def test_calibration_text_that_is_all_held_out(write_jsonl):
    path, heldout = write_jsonl("a.jsonl", [{"text": "one"}]), write_jsonl("b.jsonl", [{"text": "one"}])
    (error,) = messages_of(path=str(path), heldout_path=str(heldout))
    assert error.startswith("no document is left for the calibration text: all of them also occur in the held-out text")


def test_a_fault_behind_the_first_records_is_found_where_they_are_read(write_jsonl):
    path = write_jsonl("a.jsonl", [{"text": "text 0"}] * 30 + [{"body": "two"}])
    (error,) = messages_of(path=str(path))
    assert f"{path}:31; its columns: body" in error


def test_the_optional_package_is_missing(monkeypatch):
    assert messages_of(kind="hub", name="a/b") == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (error,) = messages_of(kind="hub", name="a/b")
    assert error.startswith("reading a dataset needs the package datasets\n  where: data.kind=hub")
