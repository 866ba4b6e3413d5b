import json
import os

import pytest

from instruments.errors import DataError
from stages.text.config import DataConfig, Source, list_sources
from stages.text.sources import MAX_LINE, read_file, read_sources


def read(role="calibration", **settings):
    ((_, documents),) = read_sources(DataConfig(**{"kind": "text", "path": "none"} | settings), role)
    return list(documents)


def texts(path):
    return [document.text for document in read("heldout", heldout_path=str(path))]


def refusal(path):
    with pytest.raises(DataError) as caught:
        read(path=str(path))
    return caught.value


def test_a_jsonl_record_is_a_document_named_by_file_and_line(write_jsonl):
    path = write_jsonl("a.jsonl", [{"text": "one"}, {"text": ""}, {"messages": [{"role": "user", "content": "two"}]}])
    first, second = read(path=str(path), heldout_share=1e-9)
    assert (first.name, first.text) == (f"{path}:1", "one")
    assert (second.name, second.messages) == (f"{path}:3", ({"role": "user", "content": "two"},))


def test_a_txt_file_is_cut_into_passages_named_by_their_first_lines(tmp_path):
    path = tmp_path / "a.txt"
    paragraph = "lobster " * 300 + "\n\n"
    path.write_bytes(("\ufeff" + paragraph * 3).replace("\n", "\r\n").encode())
    documents = read("heldout", heldout_path=str(path))
    assert [document.name for document in documents] == [f"{path}:1", f"{path}:3", f"{path}:5"]
    assert [document.text for document in documents] == [paragraph.strip()] * 3


def test_the_passages_of_a_running_text_hold_all_of_it(tmp_path):
    text = "\n\n".join("word " * (37 * number % 400) + str(number) for number in range(100))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert "\n\n".join(texts(tmp_path)) == text


@pytest.mark.parametrize("letter", ["a", "é", "龙", "🦞"])
@pytest.mark.parametrize("shift", range(4))
def test_long_lines_are_cut_between_characters(tmp_path, letter, shift):
    text = "b" * shift + letter * 50_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert "".join(texts(tmp_path)) == text
    assert max(len(part.encode()) for part in texts(tmp_path)) <= MAX_LINE


def test_long_lines_are_cut_at_spaces_and_read_as_far_as_needed(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 12_000 + "\nlast\n", encoding="utf-8")
    assert " ".join(texts(tmp_path)).split() == ["some", "words"] * 12_000 + ["last"]
    os.truncate(tmp_path / "a.txt", 2**33)  # a hole
    assert next(read_file(tmp_path / "a.txt", Source())).text.startswith("some words")


def test_a_share_of_one_path_is_held_out(write_jsonl):
    path = str(write_jsonl("a.jsonl", [{"text": f"text {number}"} for number in range(300)]))
    heldout, calibration = read("heldout", path=path), read("calibration", path=path)
    assert len(heldout) + len(calibration) == 300
    assert {document.text for document in heldout}.isdisjoint(document.text for document in calibration)
    assert 10 < len(heldout) < 60


def test_calibration_leaves_out_what_the_heldout_file_in_its_folder_holds(tmp_path, write_jsonl):
    chat = {"messages": [{"role": "user", "content": "b"}]}
    write_jsonl("a.jsonl", [{"text": "one"}, {"text": "two"}, chat])
    heldout = write_jsonl("heldout.jsonl", [{"text": "two"}, {"text": "three"}, chat])
    assert [document.text for document in read(path=str(tmp_path), heldout_path=str(heldout))] == ["one"]
    found = read("heldout", path=str(tmp_path), heldout_path=str(heldout))
    assert [document.text for document in found] == ["two", "three", ""]


def test_the_files_of_a_folder_take_turns(tmp_path, write_jsonl, monkeypatch):
    (tmp_path / "deeper").mkdir()
    write_jsonl("deeper/b.JSONL", [{"text": f"b{number}"} for number in range(2)])
    write_jsonl("a.jsonl", [{"text": f"a{number}"} for number in range(3)])
    (tmp_path / "c.txt").write_text("c0", encoding="utf-8")
    (tmp_path / "d.csv").write_text("d0", encoding="utf-8")
    assert texts(tmp_path) == ["a0", "c0", "b0", "a1", "b1", "a2"]
    monkeypatch.setattr("stages.text.sources.FILES_AT_ONCE", 2)
    assert texts(tmp_path) == ["a0", "c0", "a1", "a2", "b0", "b1"]


@pytest.mark.parametrize("name", ["missing.jsonl", "a.parquet", "README", ""])
def test_a_path_without_text_names_its_setting(tmp_path, name):
    for unread in ("a.parquet", "README"):
        (tmp_path / unread).touch()
    assert refusal(tmp_path / name).where.startswith(f"data.path={tmp_path / name}")
    with pytest.raises(DataError) as caught:
        read("heldout", heldout_path=str(tmp_path / name))
    assert caught.value.do.startswith("data.heldout_path=")


def test_a_folder_that_may_not_be_entered(closed):
    assert "Permission denied" in refusal(closed / "x").what


def test_a_file_that_may_not_be_opened(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.touch()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert refusal(path).where == str(path)


@pytest.mark.parametrize("line", ["{oops}", "[" * 500_000, '{"text": "a", "number": ' + "9" * 5000 + "}", "\0" * 50])
def test_a_line_that_is_no_json_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one"}) + f"\n\n{line}\n", encoding="utf-8")
    assert refusal(path).where == f"{path}:3"


@pytest.mark.parametrize(
    "content", [b"one\ncaf\xe9\n", "one\ncaf\n".encode("utf-16"), "one\ntwo\n".encode("utf-16-le")], ids=str
)
def test_bytes_that_are_no_utf8(tmp_path, content):
    """The last is valid UTF-8 with many zeros."""
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert "not UTF-8" in refusal(path).what


def test_labels_of_answers_need_conversations(write_jsonl):
    path = write_jsonl("a.jsonl", [{"text": "one"}])
    with pytest.raises(DataError) as caught:
        read(path=str(path), heldout_share=1e-9, labels="completion")
    assert (caught.value.where, "data.labels=full_sequence" in caught.value.do) == (f"{path}:1", True)
    assert len(read("heldout", heldout_path=str(path), labels="completion")) == 1


def test_heldout_text_of_a_file_beside_the_standard_library(write_jsonl):
    """No module is held out then."""
    path = str(write_jsonl("a.jsonl", [{"text": "one"}]))
    assert [document.text for document in read("heldout", kind="python_stdlib", heldout_path=path)] == ["one"]
    (source,) = list_sources(DataConfig(heldout_path=path), "calibration")
    assert (source.kind, source.heldout_share) == ("python_stdlib", 0)
